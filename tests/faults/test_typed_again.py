"""Everything is killed at three moments and the command is typed again: the run is the one that nobody disturbed."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability.events import BatchTaken, StepEnded
from tests.e2e.conftest import SHORT, is_conserved, run_job
from tests.faults.conftest import EVERYTHING, GENERATING, TRAINING, Blow, options, strike

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 1200.0
"""Limit of five jobs."""
NUM_STEPS = 8
MOMENTS = [(3, GENERATING), (5, TRAINING), (7, GENERATING)]
DELAYS_S = (0.0, 2.0)
"""After these moments; a step takes a few seconds."""


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_run_that_is_killed_whole_and_typed_again_generates_what_an_undisturbed_one_does(
    task: Path, tmp_path: Path, report: dict[str, Any]
) -> None:
    """With a learning rate of 0 and greedy decoding the text of each prompt is the same, token for token."""
    seed = random.randrange(1000)
    print(f"seed {seed}")
    report |= {"seed": seed}
    rng = random.Random(seed)
    (tmp_path / "calm").mkdir()
    (tmp_path / "struck").mkdir()
    calm = run_job(task, tmp_path / "calm", *_options(task, tmp_path / "calm"))
    assert calm.code == 0, calm.output[-4000:]
    folder = tmp_path / "struck"
    for step, phase in MOMENTS:
        blow = Blow(EVERYTHING, step, phase, delay_s=rng.uniform(*DELAYS_S))
        struck = strike(task, folder, *_options(task, folder), blows=[blow])
        assert struck.job.code != 0
    job = run_job(task, folder, *_options(task, folder))
    assert job.code == 0, job.output[-4000:]

    expected, texts = _texts(tmp_path / "calm"), _texts(folder)
    both = expected.keys() & texts.keys()
    report |= {"prompts": len(both), "characters": sum(len(text) for name in both for text in texts[name])}
    assert all(len(set(answers)) == 1 for answers in expected.values())  # greedy
    assert {name: texts[name] for name in both} == {name: expected[name] for name in both}
    assert len(both) > 4 * NUM_STEPS  # of 8 prompts a step; which ones are in a batch is a matter of time
    # A batch whose training was cut off is trained again, with the weights of before.
    batches = {event.step: event for event in job.stream if isinstance(event, BatchTaken)}
    rows = Counter(row for batch in batches.values() for row in batch.source_index)
    assert set(rows.values()) == {1}
    assert sorted(batches) == list(range(1, NUM_STEPS + 1))
    ended = {event.step: event for event in job.stream if isinstance(event, StepEnded)}
    assert all(is_conserved(event.metrics) for event in ended.values())
    assert ended[NUM_STEPS].metrics["partial_rollout/queue/num_dropped"] == 0
    assert job.survivors == []


def _options(task: Path, folder: Path) -> list[str]:
    return [
        *options(task, folder), f"trainer.total_training_steps={NUM_STEPS}", "actor_rollout_ref.actor.optim.lr=0",
        "actor_rollout_ref.rollout.top_k=1", f"trainer.rollout_data_dir={folder / 'rollouts'}",
    ]  # fmt: skip


def _texts(folder: Path) -> dict[tuple[str, bool], list[str]]:
    """Responses by trained prompt: its text, and whether the response is a long one. A text may come twice."""
    texts: dict[tuple[str, bool], list[str]] = {}
    for path in (folder / "rollouts").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # its writer was killed
                row = json.loads(line)
                texts.setdefault((row["input"], len(row["output"]) > SHORT), []).append(row["output"])
    return texts
