"""The processes of the engine that a server runs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Collection

TITLE = "VLLM::"
"""vLLM's engine core and workers name themselves so."""


def engine_processes() -> list[psutil.Process]:
    """Engine core and workers below this process."""
    return [child for child in psutil.Process().children(recursive=True) if _is_engine(child)]


def _is_engine(process: psutil.Process) -> bool:
    try:
        return any(TITLE in word for word in process.cmdline())
    except psutil.Error:
        return False  # ended meanwhile


def end_processes(processes: Collection[psutil.Process], *, grace_s: float) -> None:
    """Wait for processes to end by themselves; kill those that do not, and wait for that."""
    _, left = psutil.wait_procs(processes, timeout=grace_s)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile, and its id may be another's
            process.kill()
    psutil.wait_procs(left, timeout=grace_s)
