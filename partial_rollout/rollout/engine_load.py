"""What vLLM's own statistics say of the engine in this process."""

from __future__ import annotations

from collections import defaultdict

from vllm.v1.metrics.reader import Counter, Gauge, get_metrics_snapshot

from partial_rollout.core.slots import EngineLoad


def engine_load(num_tokens: int) -> EngineLoad:
    """The engine's load as of its last step, with the tokens it has generated.

    Nothing else but zeros unless `rollout.disable_log_stats` is false.
    """
    totals: defaultdict[str, float] = defaultdict(float)
    for metric in get_metrics_snapshot():
        if isinstance(metric, Gauge | Counter):
            totals[metric.name] += metric.value
    return EngineLoad(
        running=int(totals["vllm:num_requests_running"]),
        waiting=int(totals["vllm:num_requests_waiting"]),
        kv_usage=totals["vllm:kv_cache_usage_perc"],
        num_preemptions=int(totals["vllm:num_preemptions"]),
        num_tokens=num_tokens,
    )
