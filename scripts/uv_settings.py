"""Prints pip's settings as `export` lines for uv, which reads none of pip's files and variables.

python scripts/uv_settings.py        of the interpreter that runs it; what is set of uv's variables stays

Exit code 1 when pip has a setting that uv does not know: then only pip installs what the user means.
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
    ("constraint", "UV_CONSTRAINT", " "),
    ("cert", "SSL_CERT_FILE", " "),
    ("timeout", "UV_HTTP_TIMEOUT", " "),
    ("default-timeout", "UV_HTTP_TIMEOUT", " "),
    ("proxy", "ALL_PROXY", " "),
)
# What changes nothing about which packages are installed, or is said on pip's command line anyway.
WITHOUT_EFFECT = {
    "cache-dir", "config-file", "disable-pip-version-check", "no-cache-dir", "no-color", "no-input",
    "no-warn-script-location", "prefer-binary", "progress-bar", "quiet", "require-virtualenv", "retries",
    "root-user-action", "verbose",
}  # fmt: skip
SECTIONS = {":env:", "global", "install"}
# pip takes the best version of all indices, uv by default the first index that has the name.
FIXED = {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def pip_settings(listing: str) -> dict[str, list[str]]:
    """Parse `pip config list` (`global.find-links='/a /b'`); a variable overrides a file, as with pip."""
    settings: dict[str, list[str]] = {}
    from_variable: set[str] = set()
    for line in listing.splitlines():
        full_name, _, value = line.partition("=")
        source, _, name = full_name.rpartition(".")
        if source not in SECTIONS or name in from_variable:
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


def unknown_to_uv(settings: dict[str, list[str]]) -> list[str]:
    """Names of settings that only pip would follow."""
    translated = {name for name, _, _ in TRANSLATED}
    return sorted(name for name, value in settings.items() if value and name not in translated | WITHOUT_EFFECT)


def main() -> None:
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    settings = pip_settings(listing)
    if unknown := unknown_to_uv(settings):
        sys.exit(f"uv does not know pip's {', '.join(unknown)}")
    print("\n".join(exports(settings, dict(os.environ))))


if __name__ == "__main__":
    main()
