"""Processes that are frozen: each is named within its time, killed, and the run goes the way of a killed one."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability.events import StepEnded
from partial_rollout.runtime import processes
from partial_rollout.runtime.run_watch import POLL_S
from tests.e2e.conftest import is_conserved
from tests.faults.conftest import (
    GENERATING,
    RAYLET,
    SHUT,
    TRAINING,
    Blow,
    check_nothing_lost,
    check_same_texts,
    options,
    strike,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

LIMIT_S = 1200.0
"""Limit of a job that starts four times again."""
CLAIM_S = CALL_S = 10.0
TRAIN_S = 15.0
"""A first phase may take four times as long, which is enough for a step of the job beside others."""
MARGIN_S = 15.0
"""Killing it, and saying so, beside other jobs."""
RAYLET_S = 120.0
"""Ray asks a raylet every few seconds, and gives its node up after five answers that did not come."""
FIRST = 2
"""The step in which the first process freezes; the others follow in a step each."""
BLOWS = {
    "short": [(processes.TASK_RUNNER, TRAINING)],
    "for the trainer": [
        (processes.TRAINING_RANK, TRAINING),
        (processes.PROMPT_MANAGER, GENERATING),
        (processes.TRANSFER_QUEUE_CONTROLLER, TRAINING),
        (processes.TASK_RUNNER, GENERATING),
    ],
    "for the workers": [
        (processes.ENGINE_SERVER, GENERATING),
        (processes.REWARD_WORKER, GENERATING),
        (processes.LOAD_BALANCER, GENERATING),
        (processes.WITNESS, GENERATING),
    ],
    "for both": [
        (processes.TRANSFER_QUEUE_CONTROLLER, GENERATING),
        (processes.TRANSFER_QUEUE_STORAGE, GENERATING),
    ],
}


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("case", BLOWS)
def test_a_run_survives_the_silence_of_its_processes(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any], case: str
) -> None:
    struck_kinds = BLOWS[case]
    num_steps = FIRST + len(struck_kinds)
    blows = [
        Blow(kind.role, FIRST + number, phase, signal.SIGSTOP) for number, (kind, phase) in enumerate(struck_kinds)
    ]
    steps = [
        f"trainer.total_training_steps={num_steps}", "trainer.save_freq=1", "partial_rollout.prefetch_factor=1",
        f"partial_rollout.timeouts.claim_s={CLAIM_S}", f"partial_rollout.timeouts.call_s={CALL_S}",
    ]  # fmt: skip
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows, limit_s=LIMIT_S)
    job, faults = struck.job, struck.faults
    report |= {"roles": [kind.role for kind, _ in struck_kinds], "while": [phase for _, phase in struck_kinds]}
    report |= {
        "code": job.code,
        "known_s": [round(fault.t - at_s, 1) for fault, at_s in zip(faults, struck.at_s, strict=False)],
    }
    report |= {"faults": [(fault.role, fault.action) for fault in faults]}
    ended = [event for event in job.stream if isinstance(event, StepEnded)]
    report |= {"step_done_s": struck.step_done_s}
    assert job.code == 0, job.output[-4000:]
    # The witness is no fault of the run: the driver warns.
    assert [fault.role for fault in faults] == [kind.role for kind, _ in struck_kinds if kind is not processes.WITNESS]
    assert all("no sign of life" in fault.text or "not answered in time" in fault.text for fault in faults)
    assert all(fault.pid for fault in faults)
    assert [event.step for event in ended] == list(range(1, num_steps + 1))
    for fault, at_s in zip(faults, struck.at_s, strict=False):
        limit_s = POLL_S + CALL_S if fault.role == processes.PROMPT_MANAGER.role else CLAIM_S
        assert fault.t - at_s < limit_s + MARGIN_S
    check_nothing_lost(job, tmp_path, calm)


@pytest.mark.parametrize("others", [[], [processes.PROMPT_MANAGER.role]], ids=["alone", "with the prompt manager"])
def test_a_frozen_engine_server_that_the_trainer_asks_is_replaced_when_the_call_has_run_out(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any], others: list[str]
) -> None:
    """The trainer asks engines for their load all the time; a call runs out before `claim_s`, as by default.

    The prompt manager, which knows who is silent, may be frozen too, and is replaced first.
    """
    role = processes.ENGINE_SERVER.role
    steps = [
        "trainer.total_training_steps=4",
        f"partial_rollout.timeouts.call_s={CALL_S}", f"partial_rollout.timeouts.claim_s={6 * CALL_S}",
        "partial_rollout.slots.adaptive=true", "partial_rollout.slots.interval_s=1",
        "actor_rollout_ref.rollout.max_num_seqs=128",
    ]  # fmt: skip
    blows = [Blow(each, 2, GENERATING, signal.SIGSTOP) for each in (role, *others)]
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows)
    job, faults = struck.job, struck.faults
    report |= {"code": job.code, "faults": [(fault.role, fault.text[:300], fault.action) for fault in faults]}
    assert job.code == 0, job.output[-4000:]
    assert [fault.role for fault in faults] == [*others, role]
    # A new prompt manager may find it killed and started again before it has told why.
    assert others or "when a wait ran out" in faults[-1].text
    assert "was started again" in faults[-1].action
    assert struck.seconds_to_notice() < CALL_S + MARGIN_S + (POLL_S + CALL_S if others else 0) + processes.REPLACED_S
    assert [event.step for event in job.stream if isinstance(event, StepEnded)] == [1, 2, 3, 4]
    check_same_texts(tmp_path, calm)
    assert job.survivors == []


def test_a_step_that_waits_for_a_frozen_prompt_manager_is_not_given_up(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    """The trainer asks it for the queue when it saves, and waits for longer than a phase of a step may take."""
    role, num_steps = processes.PROMPT_MANAGER.role, 3
    steps = [
        f"trainer.total_training_steps={num_steps}", "trainer.save_freq=1", "partial_rollout.prefetch_factor=1",
        f"partial_rollout.timeouts.train_s={TRAIN_S}", f"partial_rollout.timeouts.call_s={2 * TRAIN_S}",
    ]  # fmt: skip
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=[Blow(role, FIRST, SHUT, signal.SIGSTOP)])
    job, faults = struck.job, struck.faults
    report |= {"code": job.code, "faults": [(fault.role, fault.text[:300], fault.action) for fault in faults]}
    assert job.code == 0, job.output[-4000:]
    assert [fault.role for fault in faults] == [role]
    assert "was started again with its queue" in faults[0].action
    assert struck.seconds_to_notice() > 2 * TRAIN_S
    assert [event.step for event in job.stream if isinstance(event, StepEnded)] == list(range(1, num_steps + 1))
    check_nothing_lost(job, tmp_path, calm)


def test_a_run_survives_the_silence_of_its_raylet(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    """Ray gives the node up, and with it all actors there; the command starts training again on a Ray of its own."""
    steps = ["trainer.total_training_steps=3", "trainer.save_freq=1", "partial_rollout.prefetch_factor=1"]
    blow = Blow(RAYLET, FIRST, GENERATING, signal.SIGSTOP)
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=[blow])
    job, at_s = struck.job, struck.at_s[0]
    ended = [event for event in job.stream if isinstance(event, StepEnded)]
    report |= {"roles": [RAYLET], "while": GENERATING, "code": job.code, "steps": [event.step for event in ended]}
    report |= {"known_s": [round(fault.t - at_s, 1) for fault in struck.faults]}
    report |= {"faults": [(fault.role, fault.text[:200], fault.action) for fault in struck.faults]}
    assert job.code == 0, job.output[-4000:]
    assert {event.step for event in ended} == {1, 2, 3}
    assert struck.seconds_to_notice() < RAYLET_S
    assert all(is_conserved(event.metrics) for event in ended)
    assert job.survivors == []
    check_same_texts(tmp_path, calm)
