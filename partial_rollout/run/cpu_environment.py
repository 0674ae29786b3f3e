"""The environment variables of `lib/cpu_environment.sh`, for Python code that imports verl, vLLM, torch and Ray."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).with_name("lib") / "cpu_environment.sh"


def cpu_environment() -> dict[str, str]:
    """Names and values that the script exports in an empty environment."""
    dump = 'source "$0" && env -0'
    clean = {"PATH": os.environ.get("PATH", os.defpath)}
    run = subprocess.run(["bash", "-c", dump, str(SCRIPT)], env=clean, capture_output=True, text=True, check=True)
    variables = dict(entry.split("=", 1) for entry in run.stdout.split("\0") if entry)
    return {name: variables[name] for name in sorted(variables) if name.isupper() and name not in SHELL_OWN}


SHELL_OWN = ("PATH", "PWD", "OLDPWD", "SHLVL")
"""Variables that a shell exports by itself."""


def apply_cpu_environment() -> None:
    """Set the variables that are not set yet; call it before any of these libraries is imported."""
    for name, value in cpu_environment().items():
        os.environ.setdefault(name, value)
