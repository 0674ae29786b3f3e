"""Prints pip's settings as `export` lines for uv, which reads none of pip's files and variables.

python scripts/uv_settings.py        of the interpreter that runs it; what is set of uv's variables stays
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys

# pip's name, uv's variable, and what separates several values there.
TRANSLATED = (
    ("index-url", "UV_DEFAULT_INDEX", " "),
    ("extra-index-url", "UV_INDEX", " "),
    ("find-links", "UV_FIND_LINKS", ","),
    ("trusted-host", "UV_INSECURE_HOST", " "),
    ("cert", "SSL_CERT_FILE", " "),
    ("timeout", "UV_HTTP_TIMEOUT", " "),
    ("default-timeout", "UV_HTTP_TIMEOUT", " "),
    ("proxy", "ALL_PROXY", " "),
)
# pip takes the best version of all indices, uv by default the first index that has the name.
FIXED = {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def pip_settings(listing: str) -> dict[str, list[str]]:
    """Parse `pip config list` (`global.find-links='/a /b'`); a variable overrides a file, as with pip."""
    settings: dict[str, list[str]] = {}
    from_variable: set[str] = set()
    for line in listing.splitlines():
        full_name, _, value = line.partition("=")
        source, _, name = full_name.rpartition(".")
        if name in from_variable:
            continue
        if source == ":env:":
            from_variable.add(name)
        settings[name] = str(ast.literal_eval(value)).split()
    return settings


def exports(settings: dict[str, list[str]], environment: dict[str, str]) -> list[str]:
    """Lines for a shell."""
    wanted = {variable: sep.join(settings[name]) for name, variable, sep in TRANSLATED if settings.get(name)}
    wanted |= FIXED
    return [f"export {name}={shlex.quote(value)}" for name, value in wanted.items() if name not in environment]


def main() -> None:
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print("\n".join(exports(pip_settings(listing), dict(os.environ))))


if __name__ == "__main__":
    main()
