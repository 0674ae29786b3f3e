"""Processes that training cannot go on without: the same command starts training again from the last checkpoint."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability.events import BatchTaken, StepEnded
from partial_rollout.runtime import processes
from tests.e2e.conftest import is_conserved
from tests.faults.conftest import GENERATING, TRAINING, Blow, options, strike

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 1800.0
"""Limit of a job that starts four times again."""
FIRST = 2
"""The step in which the first process dies; the others follow in a step each."""
SHARED = [kind for kind in processes.KINDS if kind is not processes.ENGINE_PLACE]  # no job here has one
ROLES = [kind.role for kind in SHARED if kind.then is processes.Then.STARTS_AGAIN]


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("phase", [GENERATING, TRAINING])
@pytest.mark.parametrize("roles", [ROLES[0::2], ROLES[1::2]], ids=["some", "others"])
def test_a_run_starts_again_after_the_death_of_any_process_that_it_needs(
    task: Path, tmp_path: Path, report: dict[str, Any], phase: str, roles: list[str]
) -> None:
    num_steps = FIRST + len(roles)
    blows = [Blow(role, FIRST + number, phase) for number, role in enumerate(roles)]
    steps = [f"trainer.total_training_steps={num_steps}", "trainer.save_freq=1", "partial_rollout.prefetch_factor=1"]
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows, limit_s=LIMIT_S)
    job, faults = struck.job, struck.faults
    ended = [event for event in job.stream if isinstance(event, StepEnded)]
    assert job.code == 0, job.output[-4000:]
    # The first fault of the blow's role: processes that end with Ray's own may be told of as well.
    known_s = [
        round(next(fault.t for fault in faults if fault.role == role and fault.t > at_s) - at_s, 1)
        for role, at_s in zip(roles, struck.at_s, strict=True)
    ]
    went_on_s = [round(next(e.t for e in ended if e.t > at_s) - at_s, 1) for at_s in struck.at_s]
    report |= {"roles": roles, "while": phase, "known_s": known_s, "step_done_s": went_on_s}
    assert max(known_s) < processes.NOTICED_S
    assert [event.step for event in ended] == list(range(1, num_steps + 1))
    assert all(is_conserved(event.metrics) for event in ended)
    assert ended[-1].metrics["partial_rollout/queue/num_dropped"] == 0
    # A batch whose training was cut off is trained again, with the weights of before.
    batches = {event.step: event for event in job.stream if isinstance(event, BatchTaken)}
    assert set(Counter(uid for batch in batches.values() for uid in batch.uids).values()) == {1}
    assert job.survivors == []
