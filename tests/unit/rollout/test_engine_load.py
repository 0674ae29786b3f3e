"""vLLM's statistics of the engines in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.v1.metrics.reader import Counter, Gauge

from partial_rollout.core.slots import EngineLoad
from partial_rollout.rollout import engine_process as module


def test_requests_of_data_parallel_engines_add_up_and_the_fullest_cache_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = [
        metric
        for engine, kv_usage in (("0", 0.6), ("1", 0.7))
        for metric in (
            Gauge("vllm:num_requests_running", {"engine": engine}, 3.0),
            Gauge("vllm:num_requests_waiting", {"engine": engine}, 1.0),
            Gauge("vllm:kv_cache_usage_perc", {"engine": engine}, kv_usage),
            Counter("vllm:num_preemptions", {"engine": engine}, 2),
        )
    ]
    monkeypatch.setattr(module, "get_metrics_snapshot", lambda: snapshot)
    assert module.counted_tokens() == 0
    expected = EngineLoad(running=6, waiting=2, kv_usage=0.7, num_preemptions=4, num_tokens=9)
    assert module.engine_load(9) == expected


def test_tokens_of_data_parallel_engines_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [("vllm:generation_tokens", 7), ("vllm:generation_tokens", 5), ("vllm:prompt_tokens", 100)]
    snapshot = [Counter(name, {"engine": str(number)}, count) for number, (name, count) in enumerate(counts)]
    monkeypatch.setattr(module, "get_metrics_snapshot", lambda: snapshot)
    assert module.counted_tokens() == 12
