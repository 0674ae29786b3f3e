"""Everything is killed at three moments and the command is typed again: the run is the one that nobody disturbed."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability.events import BatchTaken, StepEnded
from tests.e2e.conftest import is_conserved, run_job
from tests.faults.conftest import EVERYTHING, GENERATING, TRAINING, Blow, check_same_texts, options, strike, texts_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

LIMIT_S = 1200.0
"""Limit of four jobs."""
NUM_STEPS = 8
MOMENTS = [(3, GENERATING), (5, TRAINING), (7, GENERATING)]
DELAYS_S = (0.0, 2.0)
"""After these moments; a step takes a few seconds."""


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_run_that_is_killed_whole_and_typed_again_generates_what_an_undisturbed_one_does(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    """With a learning rate of 0 and greedy decoding the text of each prompt is the same, token for token."""
    seed = random.randrange(1000)
    print(f"seed {seed}")
    report |= {"seed": seed}
    rng = random.Random(seed)
    steps = f"trainer.total_training_steps={NUM_STEPS}"
    for step, phase in MOMENTS:
        blow = Blow(EVERYTHING, step, phase, delay_s=rng.uniform(*DELAYS_S))
        struck = strike(task, tmp_path, *options(task, tmp_path), steps, blows=[blow])
        assert struck.job.code != 0
    job = run_job(task, tmp_path, *options(task, tmp_path), steps)
    assert job.code == 0, job.output[-4000:]

    check_same_texts(tmp_path, calm)
    texts = texts_of(tmp_path)
    report |= {"prompts": len(texts), "characters": sum(len(text) for each in texts.values() for text in each)}
    assert len(texts) > 4 * NUM_STEPS  # of 8 prompts a step; which ones are in a batch is a matter of time
    # A batch whose training was cut off is trained again, with the weights of before.
    taken = [event for event in job.stream if isinstance(event, BatchTaken)]
    batches = {batch.step: batch for batch in taken}
    rows = Counter(row for batch in batches.values() for row in batch.source_index)
    assert set(rows.values()) == {1}
    assert sorted(batches) == list(range(1, NUM_STEPS + 1))
    ended = {event.step: event for event in job.stream if isinstance(event, StepEnded)}
    assert all(is_conserved(event.metrics) for event in ended.values())
    assert ended[NUM_STEPS].metrics["partial_rollout/queue/num_dropped"] == 0
    assert job.survivors == []
