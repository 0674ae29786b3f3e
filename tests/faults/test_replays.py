"""A run that is started again trains the steps since its checkpoint from logged responses, and is the same run."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.core.resume import ABORTED
from partial_rollout.observability import stages
from partial_rollout.observability.events import BatchTaken, SegmentEnded, StageBegan, StepEnded
from partial_rollout.observability.step_line import REPLAYED
from partial_rollout.runtime.processes import TRAINING_RANK
from tests.e2e.conftest import is_conserved, run_job
from tests.faults.conftest import EVERYTHING, TRAINING, Blow, check_same_texts, options, strike

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import Job
    from tests.faults.conftest import Texts

NUM_RESPONSES = 8 * 4
"""Responses of a step."""
BEFORE = "before"
"""Folder of the dumps that were written before the blow."""
LIMIT_S = 1200.0
"""Limit of a job that is struck, and of the next one."""
HANDED_OVER_S = 1.0
"""The thread of the log may have written nothing of what came less than this before the death of its process."""
SAVED, STRUCK, LAST = 3, 6, 7
"""Steps: of the checkpoint before the blow, of the blow, which comes before the next checkpoint, and of the end."""


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("role", [TRAINING_RANK.role, EVERYTHING])
def test_steps_since_the_checkpoint_are_trained_from_logged_responses(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any], role: str
) -> None:
    """With a learning rate of 0 and greedy decoding; the command starts again by itself, or is typed again."""
    job, struck_s = _run(task, tmp_path, Blow(role, STRUCK, TRAINING))
    assert job.code == 0, job.output[-4000:]
    assert f"steps {SAVED + 1} to {STRUCK} are trained from logged responses" in _text(tmp_path)

    taken = _by_step(job, BatchTaken)
    for step in range(SAVED + 1, STRUCK + 1):
        before, again = taken[step]
        assert (before.uids, before.source_index) == (again.uids, again.source_index)
    if role == EVERYTHING:  # else the same file is written over
        for step in range(SAVED + 1, STRUCK):
            assert _rows(tmp_path / BEFORE, step) == _rows(tmp_path / "rollouts", step) != []
    assert all(len(each) == 1 for step, each in taken.items() if not SAVED < step <= STRUCK)
    last = {step: events[-1] for step, events in taken.items()}
    assert sorted(last) == list(range(1, LAST + 1))
    assert set(Counter(uid for batch in last.values() for uid in batch.uids).values()) == {1}

    ended = {step: events[-1].metrics for step, events in _by_step(job, StepEnded).items()}
    replayed = {step: metrics.get(REPLAYED, 0) for step, metrics in ended.items()}
    report |= {"replayed": replayed}
    # Some groups of the first batches were in the checkpoint, whole; all of the last batch's were generated since.
    assert replayed[STRUCK] == max(replayed.values()) == NUM_RESPONSES
    assert [step for step in replayed if replayed[step] and not SAVED < step <= STRUCK] == []
    assert all(is_conserved(metrics) for metrics in ended.values())
    assert ended[LAST]["partial_rollout/queue/num_dropped"] == 0
    members = {uid for step in range(SAVED + 1, STRUCK + 1) for uid in last[step].uids}
    generated = [
        event for event in job.stream if isinstance(event, SegmentEnded) and event.uid in members and event.t > struck_s
    ]
    report |= {"tokens generated again": sum(event.tokens for event in generated)}
    assert generated == []
    known = _known_tokens(job, struck_s, members)
    report |= {"unfinished responses that go on": len(known), "their tokens": sum(known.values())}
    assert sum(known.values())
    assert not list((tmp_path / "checkpoints/rollout_log").glob("*"))
    assert job.survivors == []
    check_same_texts(tmp_path, calm)


def _known_tokens(job: Job, struck_s: float, members: set[str]) -> dict[tuple[str, int], int]:
    """By response that was interrupted before the blow: tokens of it that the new start has not generated again.

    It goes on where an interruption has ended a segment, and where the last one did unless that was at the blow.
    """
    again_s = [event.t for event in job.stream if isinstance(event, StageBegan) and event.name == stages.TRAINING][-1]
    segments: dict[tuple[str, int], list[SegmentEnded]] = {}
    for event in sorted((each for each in job.stream if isinstance(each, SegmentEnded)), key=lambda each: each.t):
        if event.uid not in members:
            segments.setdefault((event.uid, event.session), []).append(event)
    known: dict[tuple[str, int], int] = {}
    for key, events in segments.items():
        before, again = [each for each in events if each.t < again_s], [each for each in events if each.t > again_s]
        at_rest = [each for each in before if each.t < struck_s - HANDED_OVER_S and each.tokens]
        if again and before and before[-1].reason == ABORTED:
            ends = [before[0].prompt_tokens, *(each.prompt_tokens + each.tokens for each in before)]
            start = again[0].prompt_tokens
            assert start in ends, (key, events)
            assert not at_rest or start >= at_rest[-1].prompt_tokens + at_rest[-1].tokens, (key, events)
            known[key] = start - before[0].prompt_tokens
    return known


def _run(task: Path, folder: Path, blow: Blow) -> tuple[Job, float]:
    """The job that went to the end, and the time of the blow."""
    given = [
        *options(task, folder), f"trainer.total_training_steps={LAST}",
        f"trainer.save_freq={SAVED}", "partial_rollout.prefetch_factor=2",
    ]  # fmt: skip
    struck = strike(task, folder, *given, blows=[blow], limit_s=LIMIT_S)
    if blow.role != EVERYTHING:
        return struck.job, struck.at_s[0]
    shutil.copytree(folder / "rollouts", folder / BEFORE)
    return run_job(task, folder, *given), struck.at_s[0]


def _by_step(job: Job, kind: type) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    events: list[Any] = [event for event in job.stream if isinstance(event, kind)]
    for event in events:
        found.setdefault(event.step, []).append(event)
    return found


def _rows(folder: Path, step: int) -> list[dict[str, Any]]:
    """What verl has dumped of a step: texts, scores, and which weights sampled them."""
    return [json.loads(line) for line in (folder / f"{step}.jsonl").read_text().splitlines()]


def _text(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("log-*.txt"))
