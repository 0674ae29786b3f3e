"""Engines on devices of their own (`placement=separate`), on one node: a CPU with four logical GPUs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from partial_rollout.observability.events import BatchTaken, GateMoved, ProcessFound, SegmentEnded
from partial_rollout.runtime.processes import ENGINE_PLACE, TRAINING_RANK
from tests.e2e.conftest import FLAG, is_conserved, run_job, traced
from tests.e2e.greedy import SAME_WEIGHTS, check_responses

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import Job

BATCH, GROUP, STEPS = 8, 4, 5
RANKS, ENGINES = 2, (1, 2)
"""Training ranks, and engines of the first and the second job: a rank serves one of them, or none."""
SEPARATE = [
    FLAG,
    "partial_rollout.placement=separate",
    "ray_kwargs.ray_init.num_gpus=4",
    f"trainer.n_gpus_per_node={RANKS}",
]
pytestmark = pytest.mark.e2e


def test_engines_generate_while_the_model_trains_and_interruptions_change_no_token(task: Path, tmp_path: Path) -> None:
    """Every second prompt is long, so that steps end with requests in the engine; the second job goes on with two."""
    dumps = tmp_path / "dumps"
    options = [
        *SEPARATE,
        *SAME_WEIGHTS,
        *traced(task, tmp_path, num_rows=64, every=2),
        f"trainer.rollout_data_dir={dumps}",
        "trainer.save_freq=2",
        "trainer.test_freq=-1",
    ]
    engines = [f"actor_rollout_ref.rollout.n_gpus_per_node={number}" for number in ENGINES]
    first = run_job(task, tmp_path, *options, engines[0], f"trainer.total_training_steps={STEPS - 1}")
    assert (first.code, first.survivors) == (0, []), first.output[-4000:]
    second = run_job(task, tmp_path, *options, engines[1], f"trainer.total_training_steps={STEPS}")
    assert (second.code, second.survivors) == (0, []), second.output[-4000:]
    steps = first.steps + second.steps
    assert [step["training/global_step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(is_conserved(step) for step in steps)
    assert any(step["partial_rollout/interrupted"] for step in first.steps)
    assert max(step["partial_rollout/staleness_steps/max"] for step in steps) >= 1
    assert [step["partial_rollout/rollout_gpus"] for step in steps] == [*[ENGINES[0]] * (STEPS - 1), ENGINES[1]]
    uids = Counter(uid for batch in second.events for uid in batch["uids"])
    assert (len(uids), set(uids.values())) == (STEPS * BATCH, {1})
    _check_devices(first)
    _check_engines_generate_while_the_model_trains(first)
    check_responses(task / "model", dumps)


def _check_devices(job: Job) -> None:
    found = [event for event in job.stream if isinstance(event, ProcessFound)]
    kinds = (TRAINING_RANK, ENGINE_PLACE)
    pids = [{event.pid for event in found if event.role == kind.role} for kind in kinds]
    assert [len(each) for each in pids] == [RANKS, ENGINES[0]]


def _check_engines_generate_while_the_model_trains(job: Job) -> None:
    """Between the moment at which a batch is taken and the one at which gates close for the next weights."""
    began_s, during = None, []
    for event in sorted(job.stream, key=lambda each: each.t):
        if isinstance(event, BatchTaken):
            began_s = event.t
        elif isinstance(event, GateMoved) and not event.is_open:
            began_s = None
        elif isinstance(event, SegmentEnded) and began_s is not None and event.t - event.seconds > began_s:
            during.append(event)
    assert sum(event.tokens for event in during) > 0
