"""Staleness is counted from the weights that sampled a token, not from when the prompt was queued."""

import dataclasses

import numpy as np
import torch

from partial_rollout.train.metrics import group_metrics, numbers
from partial_rollout.types import ContextSpan, FinishedGroup, TrajectorySummary, VersionSpan


def _trajectory(key: str, *spans: VersionSpan, interruptions: int = 0, reprefilled: int = 0) -> TrajectorySummary:
    versions = [span.version for span in spans]
    return TrajectorySummary(
        key=key,
        prompt_len=4,
        response_len=sum(span.num_tokens for span in spans),
        min_version=min(versions),
        max_version=max(versions),
        num_interruptions=interruptions,
        num_reprefilled_tokens=reprefilled,
        version_spans=spans,
    )


def test_counts_stale_tokens_and_resumed_trajectories() -> None:
    fresh = _trajectory("a_0_0", VersionSpan(7, 10))
    resumed = _trajectory("a_1_0", VersionSpan(5, 20), VersionSpan(7, 10), interruptions=2, reprefilled=55)
    group = FinishedGroup(uid="a", global_step=1, source_index="0", trajectories=(fresh, resumed))
    metrics = group_metrics([group], trained_version=7)
    histogram = {key[-2:]: value for key, value in metrics.items() if "staleness_tokens" in key}
    assert histogram == {"/0": 20, "/1": 0, "/2": 20, "/3": 0, "/4": 0, "5+": 0}
    assert group_metrics([group], trained_version=70)["partial_rollout/staleness_tokens/5+"] == 40
    newer = {key: value for key, value in group_metrics([group], trained_version=4).items() if "staleness_" in key}
    assert (newer["partial_rollout/staleness_tokens/0"], newer["partial_rollout/staleness_steps/max"]) == (40, 0)
    deferred = dataclasses.replace(group, num_deferrals=3)
    assert group_metrics([group, deferred], trained_version=7)["partial_rollout/deferrals/mean"] == 1.5
    assert metrics["partial_rollout/deferrals/max"] == 0
    assert metrics["partial_rollout/resumed_share"] == 0.5
    assert metrics["partial_rollout/interruptions"] == 2
    assert metrics["partial_rollout/reprefilled_tokens"] == 55
    assert metrics["partial_rollout/staleness_steps/mean"] == 1.0
    assert metrics["partial_rollout/staleness_steps/max"] == 2
    assert metrics["partial_rollout/stale_tokens"] == 20
    assert metrics["partial_rollout/stale_token_share"] == 0.5


def test_counts_tokens_that_were_sampled_on_older_kv() -> None:
    kept = _trajectory("a_0_0", VersionSpan(5, 20), VersionSpan(7, 10))
    contexts = (ContextSpan(5, "fresh", 20), ContextSpan(5, "keep_kv", 10))
    group = FinishedGroup("a", 1, "0", (dataclasses.replace(kept, context_spans=contexts), kept))
    metrics = group_metrics([group], trained_version=7)
    assert metrics["partial_rollout/old_kv_token_share"] == 10 / 60
    assert metrics["partial_rollout/old_kv_steps/max"] == 2
    unknown = group_metrics([FinishedGroup("b", 1, "0", (kept,))], trained_version=7)
    assert unknown["partial_rollout/old_kv_steps/max"] == 0


def test_only_numbers_of_a_step_are_told_and_they_are_pythons_own() -> None:
    found = numbers(
        {
            "h": True,
            "a": 1,
            "b": np.float32(0.5),
            "c": "text",
            "d": np.zeros(3),
            "e": np.int64(2),
            "f": None,
            "g": torch.tensor(3),
        }
    )
    assert found == {"h": 1, "a": 1, "b": 0.5, "e": 2, "g": 3}
    assert [type(value) for value in found.values()] == [int, int, float, int, int]
