"""What vLLM's own statistics say of the engine in this process."""

from __future__ import annotations

from collections import defaultdict

from vllm.v1.metrics.reader import Counter, Gauge, get_metrics_snapshot

from partial_rollout.core.slots import EngineLoad

KV_USAGE = "vllm:kv_cache_usage_perc"
"""A share, despite its name."""


def engine_load(num_tokens: int) -> EngineLoad:
    """The load as of the last step of this process' engines (data-parallel ones), with the tokens they have generated.

    Nothing else but zeros unless `rollout.disable_log_stats` is false.
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
