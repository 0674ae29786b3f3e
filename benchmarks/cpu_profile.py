"""What the processes of a job use of the CPU."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import psutil


class CpuProfile:
    """Cores used by each kind of process of a job, over the measured steps."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._first: dict[int, float] = {}
        self._last: dict[int, tuple[str, float]] = {}
        self._since = self._until = time.monotonic()

    def sample(self, *, measuring: bool) -> None:
        """Read the CPU seconds of every living process of the job."""
        now = {}
        for process in self.processes():
            try:
                times = process.cpu_times()
                now[process.pid] = (_title(process.cmdline()), times.user + times.system)
            except psutil.Error:
                continue
        if not measuring:
            self._first, self._since = {pid: seconds for pid, (_, seconds) in now.items()}, time.monotonic()
        elif now:
            self._last |= now
            self._until = time.monotonic()

    def processes(self) -> list[psutil.Process]:
        """The job's living processes."""
        return self._root.children(recursive=True) if self._root.is_running() else []

    def shares(self) -> dict[str, float]:
        """Cores by process title, largest first."""
        cores: Any = Counter()  # of seconds, where its annotation knows integers only
        for pid, (title, seconds) in self._last.items():
            cores[title] += (seconds - self._first.get(pid, 0.0)) / max(self._until - self._since, 1e-9)
        return {title: round(share, 3) for title, share in cores.most_common(8)}


def _title(command: list[str]) -> str:
    return (command[0] if command else "?").split(".")[0].rsplit("/", 1)[-1][:40]
