"""How many requests a job's engines run at a moment, read from vLLM's own metrics page."""

from __future__ import annotations

import urllib.request
from http.client import HTTPException
from typing import TYPE_CHECKING

import psutil
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterable

RUNNING = "vllm:num_requests_running"
READ_TIMEOUT_S = 2.0


class RunningRequests:
    """Samples of the gauge over a job's engines; needs `rollout.disable_log_stats=False`."""

    def __init__(self) -> None:
        self._pages: set[str] = set()
        self.samples: list[float] = []

    def find(self, processes: Iterable[psutil.Process]) -> None:
        """Look for engine servers among `processes` until there is one."""
        if not self._pages:
            self._pages = {page for process in processes for page in _pages(process) if _read(page) is not None}

    def sample(self) -> float | None:
        """Append the present sum over engines, and return it; nothing while none answers."""
        running = [value for value in map(_read, self._pages) if value is not None]
        if not running:
            return None
        self.samples.append(sum(running))
        return self.samples[-1]

    def utilisation(self, num_slots: int) -> float | None:
        """Share of slots in use, over the moments at which any is."""
        return utilisation(self.samples, num_slots)


def utilisation(samples: Iterable[float], num_slots: int) -> float | None:
    """Mean share of slots in use, over the samples in which any is."""
    busy = [running for running in samples if running > 0]
    return sum(busy) / (len(busy) * num_slots) if busy else None


def _pages(process: psutil.Process) -> set[str]:
    try:
        if "Server" not in " ".join(process.cmdline()):
            return set()
        sockets = process.net_connections("tcp")
    except psutil.Error:
        return set()
    addresses = [socket.laddr for socket in sockets if socket.status == psutil.CONN_LISTEN]
    hosts = [("127.0.0.1" if a.ip in ("0.0.0.0", "::") else a.ip.removeprefix("::ffff:"), a.port) for a in addresses]
    return {f"http://{host}:{port}/metrics" for host, port in hosts}


def _read(page: str) -> float | None:
    """The gauge; None if this is no metrics page (an engine server has other ports, too)."""
    try:
        with urllib.request.urlopen(page, timeout=READ_TIMEOUT_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            gauges = [sample.value for family in families for sample in family.samples if sample.name == RUNNING]
    except (OSError, HTTPException, ValueError):
        return None
    return sum(gauges) if gauges else None
