"""Jobs of a benchmark at the same time, each on cores or GPUs of its own, so that none waits for another."""

from __future__ import annotations

import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CORES_EACH = 2
"""What the quickstart is made for."""


@dataclass(frozen=True)
class Lane:
    """The cores and the GPUs of one job; none: those of the benchmark itself."""

    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    ended: threading.Event = field(default_factory=threading.Event, compare=False)
    """Set when the benchmark ends: a job that still runs is to end, too."""

    def pinned(self, command: list[str]) -> list[str]:
        """The command, on these cores only."""
        return ["taskset", "--cpu-list", ",".join(map(str, self.cores)), *command] if self.cores else command

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its jobs: its GPUs, and that Ray starts no process for each core of the machine beforehand.

        Pinned to two cores these would never get ready.
        """
        switches = ("RAY_prestart_worker_first_driver", "RAY_enable_worker_prestart")
        own = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))} if self.gpus else {}
        return own | (dict.fromkeys(switches, "0") if self.cores else {})


def make_lanes(number: int) -> list[Lane]:
    """Lanes of CORES_EACH cores; a single one has whatever there is.

    Raises:
        SystemExit: there are too few cores.
    """
    if number == 1:
        return [Lane()]
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= number <= len(cores) // CORES_EACH:
        most = max(1, len(cores) // CORES_EACH)
        raise SystemExit(f"--at-once {number}: {len(cores)} cores are enough for 1 to {most}, {CORES_EACH} each")
    return [Lane(tuple(cores[start : start + CORES_EACH])) for start in range(0, number * CORES_EACH, CORES_EACH)]


def run_all(jobs: Sequence[Callable[[Lane], None]], lanes: Sequence[Lane]) -> None:
    """Run jobs, which keep what they find themselves; each takes the first lane that is free.

    When an error or an interruption ends this early, jobs that have not started never do, and the others' lanes say
    that they have ended.

    Raises:
        SystemExit: some commands have failed; the other jobs have ended first.
    """
    free: SimpleQueue[Lane] = SimpleQueue()
    for lane in lanes:
        free.put(lane)

    def in_a_lane(job: Callable[[Lane], None]) -> None:
        lane = free.get_nowait()  # as many threads as lanes
        try:
            job(lane)
        finally:
            free.put(lane)

    failed: list[str] = []
    with ThreadPoolExecutor(len(lanes)) as pool:
        futures = [pool.submit(in_a_lane, job) for job in jobs]
        try:
            for future in as_completed(futures):
                try:
                    future.result()
                except subprocess.CalledProcessError as error:
                    print(error, flush=True)
                    failed.append(str(error))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for lane in lanes:
                lane.ended.set()
            raise
    if failed:
        raise SystemExit("\n".join(failed))
