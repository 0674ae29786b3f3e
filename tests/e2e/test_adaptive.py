"""Slots and prompts in flight that follow the load, and groups without spread: on real verl, vLLM and Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from partial_rollout.observability.events import Choice, PromptDropped
from tests.e2e.conftest import FLAG, Job, is_conserved, run_job, with_lengths
from tests.e2e.row_reward import FLAT_EVERY, FLAT_REWARD

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [60, 90, 120, 150] * 24
VLLM = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
BLOCK_SIZE, NUM_BLOCKS = 16, 160
"""Room for some twenty of these responses with their prompts; a batch has 32."""
FIRST, MOST = 8, 64
FILTERED = [
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.max_num_gen_batches=2",
    "reward.custom_reward_function.path=pkg://tests.e2e.row_reward",
]
"""Every fourth group has no spread."""
CLIPPING = ["clip_ratio_low=0.2", "clip_ratio_high=0.28", "clip_ratio_c=10.0", "loss_agg_mode=token-mean"]
"""Clipping as in the recipe `dapo`."""
WEIGHED = ("bypass_mode=True", "loss_type=reinforce")
"""No old log-probs are computed: a batch is one optimizer step."""
pytestmark = pytest.mark.e2e


def test_slots_rise_until_the_cache_is_full_and_groups_without_spread_are_replaced(task: Path, tmp_path: Path) -> None:
    job = run_job(
        task, tmp_path, FLAG, *with_lengths(task, tmp_path, LENGTHS), "trainer.total_training_steps=8",
        f"{VLLM}.block_size={BLOCK_SIZE}", f"{VLLM}.num_gpu_blocks_override={NUM_BLOCKS}",
        "partial_rollout.slots.adaptive=True", "partial_rollout.slots.interval_s=0.3",
        f"partial_rollout.num_slots={FIRST}", "partial_rollout.stream_interval=8", *FILTERED,
        *(f"actor_rollout_ref.actor.{each}" for each in CLIPPING),
        *(f"algorithm.rollout_correction.{each}" for each in WEIGHED),
    )  # fmt: skip
    assert job.code == 0, job.output[-4000:]
    assert job.survivors == []
    assert all("actor/rollout_corr/rollout_is_mean" in step and "actor/entropy" not in step for step in job.steps)
    assert any(step["actor/grad_norm"] for step in job.steps)
    assert all(is_conserved(step) for step in job.steps)

    changes = [event for event in job.stream if isinstance(event, Choice) and event.key == "partial_rollout.num_slots"]
    assert [change.before for change in changes] == [FIRST, *(change.after for change in changes[:-1])]
    assert all(4 <= change.after <= MOST and change.after % 4 == 0 for change in changes)
    lowered = [change for change in changes if change.after < change.before]
    assert lowered
    assert all("KV cache" in change.reason or "preempted" in change.reason for change in lowered)
    assert max(change.after for change in changes) > FIRST
    assert job.steps[-1]["partial_rollout/slots/num"] == changes[-1].after
    assert sum(step["partial_rollout/slots/lowered"] for step in job.steps) == len(lowered)
    _check_filtering(job)


def test_more_prompts_are_in_flight_after_five_steps_with_idle_slots(task: Path, tmp_path: Path) -> None:
    """Two batches fit into these slots, so that no prompt is pending, and short responses leave slots idle.

    The third batch comes at once, and does not fit as a whole.
    """
    lengths = [6, 60] * 48
    steps, slots = "trainer.total_training_steps=7", "partial_rollout.num_slots=64"
    job = run_job(task, tmp_path, FLAG, *with_lengths(task, tmp_path, lengths), steps, slots)
    assert job.code == 0, job.output[-4000:]
    assert job.survivors == []
    key = "partial_rollout.prefetch_factor"
    moves = [event for event in job.stream if isinstance(event, Choice) and event.key == key and event.step]
    assert [(move.step, move.before, move.after) for move in moves] == [(5, 2.0, 3.0)]
    assert "of the slots over 5 steps, no prompt pending, the trainer waited " in moves[0].reason
    states = ("pending", "ongoing", "deferred", "done")
    left = [sum(step[f"partial_rollout/queue/{state}"] for state in states) for step in job.steps]
    assert left == [8] * 5 + [16] * 2


def _check_filtering(job: Job) -> None:
    assert "algorithm.filter_groups.max_num_gen_batches=2 is ignored" in job.output
    trained = [int(row) for batch in job.events for row in batch["source_index"]]
    assert len(trained) == 8 * 8
    assert not any(row % FLAT_EVERY == 0 for row in trained)
    dropped = [event for event in job.stream if isinstance(event, PromptDropped)]
    assert {(event.reason, event.metric) for event in dropped} == {("no_spread", FLAT_REWARD)}
    assert all(int(event.source_index) % FLAT_EVERY == 0 for event in dropped)
    total = job.steps[-1]["partial_rollout/dropped/no_spread"]
    assert 8 <= total <= len(dropped)
    assert job.steps[-1]["partial_rollout/queue/num_dropped"] == total
    # What was dropped after the last batch had been taken is in no batch's count.
    counted = sum(step.get("training/filter_groups/evicted_samples", 0) for step in job.steps)
    assert 8 <= counted <= total
