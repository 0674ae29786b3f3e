"""The engine's processes as their server sees them: how they are ended, their load, and what the server reports."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.reader import Counter, Gauge, get_metrics_snapshot

from partial_rollout.core.slots import EngineLoad
from partial_rollout.runtime.run_restarts import runs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from partial_rollout.core.engine_meter import EngineSpeed
    from partial_rollout.core.gate import GateStatistics

KILLED_S = 20.0
"""The kernel has freed what a killed engine held within this time."""
LOOK_S = 1.0
"""Between two looks at killed processes: nothing tells of the end of one that is another's child."""
TITLE = "VLLM::"
"""vLLM's engine core and workers have this in their command lines."""
GENERATED = "vllm:generation_tokens"
KV_USAGE = "vllm:kv_cache_usage_perc"
"""A share from 0 to 1, despite its name."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """One of the engine's processes, by what no other process of its node has."""

    pid: int
    created_s: float


def end_orphans(engines: Iterable[EngineProcess]) -> list[int]:
    """Kill what is left of an engine whose server has died, and wait for its end; returns the process ids."""
    found: list[psutil.Process] = []
    for each in engines:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(each.pid)
            if process.create_time() == each.created_s:
                found += [process, *process.children(recursive=True)]
    end_processes(found, grace_s=0.0)
    return [process.pid for process in found]


class NoEngine:
    """Stands where the engine will be, in a server that Ray has started again: as an engine that has died.

    >>> NoEngine().errored
    True
    """

    errored = True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the engine."""

        async def dead(*_given: Any, **_named: Any) -> None:
            raise EngineDeadError

        return dead


def engine_processes() -> list[psutil.Process]:
    """The engine core and its workers, as descendants of this process."""
    return [child for child in psutil.Process().children(recursive=True) if _is_engine(child)]


def _is_engine(process: psutil.Process) -> bool:
    try:
        return any(TITLE in word for word in process.cmdline())
    except psutil.Error:
        return False  # ended meanwhile


def title_of(process: psutil.Process) -> str:
    """Which of the engine's processes it is, by vLLM's own title."""
    try:
        return next((word for word in process.cmdline() if TITLE in word), "")
    except psutil.Error:
        return ""  # ended meanwhile


def end_processes(processes: Collection[psutil.Process], *, grace_s: float) -> None:
    """Wait for processes to end by themselves; kill those that do not, and wait for their end.

    One that has ended and that its parent does not wait for, as the first process of a container may not, has ended.
    """
    _, left = psutil.wait_procs(processes, timeout=grace_s)
    killed: list[psutil.Process] = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile, and its id may be another's
            process.kill()
            killed.append(process)
    deadline_s = time.monotonic() + KILLED_S
    while killed and (left_s := deadline_s - time.monotonic()) > 0:
        _, killed = psutil.wait_procs(killed, timeout=min(LOOK_S, left_s))
        killed = [process for process in killed if runs(process)]  # psutil takes a zombie for alive


def engine_load(num_tokens: int) -> EngineLoad:
    """The load at the last step, summed over this process' data-parallel engines; they have generated `num_tokens`.

    vLLM counts only with `rollout.disable_log_stats=false`; otherwise all but `num_tokens` is 0.
    """
    totals: defaultdict[str, float] = defaultdict(float)
    fullest = 0.0
    for metric in get_metrics_snapshot():
        if isinstance(metric, Gauge | Counter):
            totals[metric.name] += metric.value
        if isinstance(metric, Gauge) and metric.name == KV_USAGE:
            fullest = max(fullest, metric.value)
    return EngineLoad(
        running=int(totals["vllm:num_requests_running"]),
        waiting=int(totals["vllm:num_requests_waiting"]),
        kv_usage=fullest,
        num_preemptions=int(totals["vllm:num_preemptions"]),
        num_tokens=num_tokens,
    )


def counted_tokens() -> int:
    """Tokens that this process' engines have generated in all, as vLLM counts them, handed over or not."""
    counts = (metric for metric in get_metrics_snapshot() if isinstance(metric, Counter))
    return sum(int(metric.value) for metric in counts if metric.name == GENERATED)


@dataclass(frozen=True, slots=True)
class RolloutStatistics:
    """What one server reports about itself at one moment; tokens are counted from its start on."""

    replica_rank: int
    gate: GateStatistics
    version: int
    """Weight version the engine holds."""
    kept: int
    """Interrupted requests that have stayed in the paused engine."""
    mean_running: float
    """Time-weighted mean of `gate.in_flight` from the gate's last opening until now, or until it closed."""
    num_generated_tokens: int
    """Tokens streamed by the engine; lags by up to `stream_interval` for each running request."""
    num_reprefilled_tokens: int
    """Prompt and response tokens computed again for resumed requests (prefix-cache hits are not counted)."""
    load: EngineLoad
    """What vLLM's own statistics say; zeros where they are off."""
    speed: EngineSpeed
    """How fast the engine decodes, measured by the tokens that it hands over."""
