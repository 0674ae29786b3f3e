"""The quickstart as a user types it: a process is killed or frozen in its third step, or every kind is killed twice."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability import stages
from partial_rollout.observability.events import BatchTaken, StageBegan, StepEnded
from partial_rollout.runtime import processes
from tests.e2e.conftest import ROOT, is_conserved, times_trained
from tests.faults.conftest import blow_at, check_all_told, strike_command, twice_each
from tests.faults.measured import charges

if TYPE_CHECKING:
    from pathlib import Path

NUM_STEPS, STRUCK_IN = 6, 3
LIMIT_S = 1200.0
LONG_LIMIT_S = 7200.0
"""Limit of a run that starts training twelve times again, each time from its last checkpoint."""
TO_NAME_S = 60.0
"""Who takes the place of a dead process is a new interpreter here: it was there after 20 s beside other jobs."""
COMMAND = ["bash", str(ROOT / "partial_rollout/run/run_quickstart_cpu.sh")]
SETTINGS = {"SKIP_SETUP": "1", "VENV": sys.prefix, "BASELINE_STEPS": "0"}
"""The environment is there, and the steps without the flag, which follow the run, are left out."""
FAULTS = [
    (processes.AGENT_LOOP_WORKER, signal.SIGKILL),
    (processes.PROMPT_MANAGER, signal.SIGKILL),
    (processes.TRAINING_RANK, signal.SIGKILL),
    (processes.ENGINE, signal.SIGKILL),
    (processes.REWARD_WORKER, signal.SIGKILL),
    (processes.ENGINE, signal.SIGSTOP),
    (processes.TRANSFER_QUEUE_CONTROLLER, signal.SIGKILL),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the quickstart keeps its task, which the first run makes."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.timeout(LIMIT_S + 300)
@pytest.mark.parametrize(("kind", "number"), FAULTS, ids=[f"{kind.role} {number.name}" for kind, number in FAULTS])
def test_the_quickstart_ends_though_a_process_is_killed_or_frozen(
    home: Path, tmp_path: Path, report: dict[str, Any], kind: processes.Kind, number: signal.Signals
) -> None:
    settings = SETTINGS | {"PARTIAL_ROLLOUT_HOME": str(home), "RUN": str(tmp_path)}
    struck = strike_command(
        [*COMMAND, f"trainer.total_training_steps={NUM_STEPS}"],
        tmp_path,
        blows=[replace(blow_at(kind, STRUCK_IN), number=number)],
        limit_s=LIMIT_S,
        **settings,
    )
    job, (at_s,) = struck.job, struck.at_s
    steps = [event for event in job.stream if isinstance(event, StepEnded)]
    starts = [event for event in job.stream if isinstance(event, StageBegan) and event.name == stages.RAY]
    taken = [event for event in job.stream if isinstance(event, BatchTaken)]
    report |= {"code": job.code, "seconds": round(struck.ended_s - job.stream[0].t), "starts": len(starts)}
    report |= {"faults": [(fault.role, fault.pid, fault.text[:200], fault.action) for fault in struck.faults]}
    assert job.code == 0, job.output[-4000:]
    assert [event.step for event in taken if event.t < at_s] == [1, 2]  # the blow came while the third step generated
    assert len(starts) == (2 if kind.then is processes.Then.STARTS_AGAIN else 1)
    assert [event.step for event in steps if event.t > starts[-1].t] == list(range(1, NUM_STEPS + 1))
    assert [(fault.role, fault.pid) for fault in struck.faults] == [(kind.role, struck.pids[0])]
    assert struck.seconds_to_notice() < TO_NAME_S
    assert all(is_conserved(event.metrics) for event in steps)
    assert charges(job.stream) == []
    assert len({(event.step, *event.uids) for event in taken}) == NUM_STEPS  # a new start trains the same batches again
    assert set(times_trained(job.stream).values()) == {1}
    assert job.survivors == []


@pytest.mark.timeout(LONG_LIMIT_S + 300)
def test_the_quickstart_ends_with_all_its_steps_though_every_kind_of_process_dies_twice(
    home: Path, tmp_path: Path, report: dict[str, Any]
) -> None:
    settings = SETTINGS | {"PARTIAL_ROLLOUT_HOME": str(home), "RUN": str(tmp_path)}
    struck = strike_command(COMMAND, tmp_path, blows=twice_each(2), limit_s=LONG_LIMIT_S, **settings)
    job = struck.job
    ended = [event for event in job.stream if isinstance(event, StepEnded)]
    starts = [event for event in job.stream if isinstance(event, StageBegan) and event.name == stages.RAY]
    report |= {"code": job.code, "seconds": round(struck.ended_s - job.stream[0].t), "starts": len(starts)}
    report |= {"roles": [blow.role for blow in struck.blows], "step_done_s": struck.step_done_s}
    report |= {"faults": [(fault.role, fault.action) for fault in struck.faults]}
    assert job.code == 0, job.output[-4000:]
    assert len({event.step for event in ended}) == ended[-1].step == ended[-1].total
    assert all(is_conserved(event.metrics) for event in ended)
    assert len(starts) == 1 + 2 * sum(kind.then is processes.Then.STARTS_AGAIN for kind in processes.SURVIVED)
    check_all_told(struck)
    assert charges(job.stream) == []
    assert set(times_trained(job.stream).values()) == {1}
    assert job.survivors == []
