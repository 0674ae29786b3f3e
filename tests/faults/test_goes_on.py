"""Processes that others replace: the run goes on, trains every step, and no prompt pays for it."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.core.queue.ledger import WORKER_LOST
from partial_rollout.core.queue.lifecycle import MAX_LOSSES
from partial_rollout.observability.events import BatchTaken, Fault, PromptDropped
from partial_rollout.rollout.progress_watch import ROLE as ENGINE
from partial_rollout.runtime import processes
from tests.e2e.conftest import FLAG, is_conserved, run_job, times_trained, with_lengths
from tests.faults.conftest import (
    CORE,
    GENERATING,
    SHUT,
    TRAINING,
    WORKER,
    Blow,
    check_all_trained_once,
    check_same_texts,
    options,
    strike,
)
from tests.faults.measured import NEVER_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

FROZEN_TO_NOTICE_S = 60.0
AMIDST_S = 0.7
"""Seconds after the beginning of a step. On a fast machine its batch may be complete by then."""
CLAIM_S = 10.0
LOGGED_S = 0.4
"""Within which a worker has written down the responses that shut gates have interrupted; training takes longer."""
BLOWS = [
    Blow(processes.REWARD_WORKER.role, 2),
    Blow(processes.AGENT_LOOP_WORKER.role, 3),
    Blow(processes.REWARD_WORKER.role, 4, TRAINING),
    Blow(processes.AGENT_LOOP_WORKER.role, 5, SHUT, delay_s=LOGGED_S),
]
NUM_STEPS = 6
MORE_STEPS = 10
"""With batches in flight that have an engine already, the last steps ask no load balancer."""
KILLER, SHORT, LONG = 5, 8, 60
"""Row of the data set whose agent loop crashes, and lengths of responses."""
SECOND_WORKER = f"{WORKER}_TP1"
"""Part of vLLM's title of the process."""


def test_reward_workers_and_agent_loop_workers_are_replaced(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    struck = strike(task, tmp_path, *options(task, tmp_path), f"trainer.total_training_steps={NUM_STEPS}", blows=BLOWS)
    job = struck.job
    roles = [processes.REWARD_WORKER.role, processes.AGENT_LOOP_WORKER.role] * 2
    report |= {"roles": roles, "code": job.code, "steps": len(job.steps), "actions": [f.action for f in struck.faults]}
    report |= {
        "known_and_replaced_s": [round(f.t - at_s, 1) for f, at_s in zip(struck.faults, struck.at_s, strict=False)]
    }
    assert job.code == 0, job.output[-4000:]
    assert [fault.role for fault in struck.faults] == roles
    assert max(report["known_and_replaced_s"]) < processes.REPLACED_S
    # Responses of the last one had been interrupted, so the log has them: others go on from there.
    assert struck.measured(NEVER_S)[-1]["tokens_lost"] == 0
    check_all_trained_once(job, NUM_STEPS)
    check_same_texts(tmp_path, calm)
    assert "failed (" not in job.output  # no attempt was charged to a prompt


def test_a_prompt_that_kills_its_workers_is_dropped_and_no_other_one(
    task: Path, tmp_path: Path, report: dict[str, Any]
) -> None:
    role, lengths = processes.AGENT_LOOP_WORKER.role, [SHORT, SHORT, LONG] * 16
    rows = with_lengths(task, tmp_path, lengths, {"killing_agent": [KILLER]})
    steps = ["trainer.total_training_steps=4", "trainer.save_freq=1", "trainer.test_freq=-1"]
    job = run_job(task, tmp_path, FLAG, *rows, *steps)
    deaths = [event for event in job.stream if isinstance(event, Fault)]
    dropped = [event for event in job.stream if isinstance(event, PromptDropped)]
    report |= {"code": job.code, "faults": [(fault.role, fault.step, fault.action) for fault in deaths]}
    assert job.code == 0, job.output[-4000:]
    assert [fault.role for fault in deaths] == [role] * MAX_LOSSES
    assert [(event.source_index, event.reason) for event in dropped] == [(str(KILLER), WORKER_LOST)]
    told = f"(extra_info.index={KILLER}) is dropped: {MAX_LOSSES} agent-loop workers were lost while they generated it"
    assert told in job.output
    assert [step["training/global_step"] for step in job.steps] == [1, 2, 3, 4]
    assert all(is_conserved(step) for step in job.steps)
    assert job.steps[-1]["partial_rollout/queue/num_dropped"] == 1
    assert set(times_trained(job.stream).values()) == {1}
    trained = {int(row) for event in job.stream if isinstance(event, BatchTaken) for row in event.source_index}
    assert trained >= set(range(8)) - {KILLER}
    assert KILLER not in trained
    assert job.survivors == []


def test_an_agent_loop_worker_that_is_frozen_is_replaced(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    """Frozen while it generates, and while the model trains."""
    role = processes.AGENT_LOOP_WORKER.role
    blows = [Blow(role, 2, GENERATING, signal.SIGSTOP), Blow(role, 4, TRAINING, signal.SIGSTOP)]
    steps = [f"trainer.total_training_steps={NUM_STEPS}", f"partial_rollout.timeouts.claim_s={CLAIM_S}"]
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows)
    job = struck.job
    report |= {"role": role, "code": job.code, "steps": len(job.steps), "actions": [f.action for f in struck.faults]}
    report |= {
        "known_and_replaced_s": [round(f.t - at_s, 1) for f, at_s in zip(struck.faults, struck.at_s, strict=False)]
    }
    assert job.code == 0, job.output[-4000:]
    assert [fault.role for fault in struck.faults] == [role] * len(blows)
    assert all("no sign of life" in fault.text for fault in struck.faults)
    assert struck.seconds_to_notice(0) < CLAIM_S + processes.REPLACED_S
    check_all_trained_once(job, NUM_STEPS)
    check_same_texts(tmp_path, calm)
    assert "failed (" not in job.output  # no attempt was charged to a prompt


def test_an_engine_that_is_killed_or_frozen_is_started_again(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    """Killed while it generates and while the model trains, then frozen while it generates."""
    blows = [
        Blow(ENGINE, 2, GENERATING, name=CORE),
        Blow(ENGINE, 3, TRAINING, name=CORE),
        # Not in step 4: until its first tokens an engine may take ten times as long.
        Blow(ENGINE, 5, GENERATING, signal.SIGSTOP, name=CORE),
    ]
    # One batch in flight: it is never complete when an engine dies at its beginning.
    steps = [f"trainer.total_training_steps={NUM_STEPS}", "partial_rollout.prefetch_factor=1"]
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows)
    job = struck.job
    report |= {"role": ENGINE, "code": job.code, "steps": len(job.steps), "actions": [f.action for f in struck.faults]}
    report |= {"noticed_s": [round(struck.seconds_to_notice(blow), 1) for blow in (0, 2)]}
    assert job.code == 0, job.output[-4000:]
    assert {fault.role for fault in struck.faults} == {ENGINE}
    assert struck.seconds_to_notice(0) < processes.NOTICED_S
    assert struck.seconds_to_notice(2) < FROZEN_TO_NOTICE_S
    check_all_trained_once(job, NUM_STEPS)
    check_same_texts(tmp_path, calm)
    assert sum(step["partial_rollout/engine_relaunches"] for step in job.steps) == len(blows)


def test_a_worker_of_a_tensor_parallel_engine_that_is_killed_alone_costs_no_restart(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    """The other worker and the engine core live; vLLM ends them, and the run gives the server another engine."""
    blows = [Blow(ENGINE, 2, name=SECOND_WORKER), Blow(ENGINE, 3, TRAINING, name=SECOND_WORKER)]
    steps = [
        "trainer.total_training_steps=4", "partial_rollout.prefetch_factor=1",
        "trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ]  # fmt: skip
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows)
    job = struck.job
    report |= {"role": processes.ENGINE_WORKER.role, "code": job.code, "steps": len(job.steps)}
    report |= {"noticed_s": round(struck.seconds_to_notice(), 1), "actions": [f.action for f in struck.faults]}
    assert job.code == 0, job.output[-4000:]
    assert {fault.role for fault in struck.faults} == {ENGINE}
    assert struck.seconds_to_notice() < processes.ENGINE_WORKER_S
    check_all_trained_once(job, 4)
    check_same_texts(tmp_path, calm)
    assert sum(step["partial_rollout/engine_relaunches"] for step in job.steps) == len(blows)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_engine_server_that_is_killed_or_frozen_is_started_again(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any], num_replicas: int
) -> None:
    """With one replica all requests wait; with two those of the other one keep their tokens."""
    role = processes.ENGINE_SERVER.role
    blows = [Blow(role, 2, delay_s=AMIDST_S), Blow(role, 3, TRAINING), Blow(role, 4, SHUT)]
    blows += [Blow(role, 5, GENERATING, signal.SIGSTOP)]
    steps = [
        f"trainer.total_training_steps={NUM_STEPS}", f"partial_rollout.timeouts.claim_s={CLAIM_S}",
        f"trainer.n_gpus_per_node={num_replicas}", f"ray_kwargs.ray_init.num_gpus={num_replicas}",
    ]  # fmt: skip
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows)
    job = struck.job
    told = [fault for fault in struck.faults if fault.role == role]
    report |= {"role": role, "replicas": num_replicas, "code": job.code, "steps": len(job.steps)}
    report |= {"faults": [(fault.role, fault.text[:200], fault.action) for fault in struck.faults]}
    report |= {"known_and_started_s": [round(f.t - at_s, 1) for f, at_s in zip(told, struck.at_s, strict=False)]}
    report |= {"step_done_s": struck.step_done_s}
    assert job.code == 0, job.output[-4000:]
    assert len(told) == len(blows)
    assert max(report["known_and_started_s"][:3]) < processes.REPLACED_S
    check_all_trained_once(job, NUM_STEPS)
    check_same_texts(tmp_path, calm)
    assert sum(step["partial_rollout/engine_relaunches"] for step in job.steps) == len(blows)
    assert "failed (" not in job.output  # no attempt was charged to a prompt


@pytest.mark.parametrize(
    ("kind", "limit"),
    [(processes.PROMPT_MANAGER, "call_s"), (processes.LOAD_BALANCER, "claim_s")],
    ids=["prompt manager", "load balancer"],
)
def test_what_ray_starts_again_goes_on_when_it_is_killed_or_frozen(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any], kind: processes.Kind, limit: str
) -> None:
    """Killed while it is asked and while the model trains, then frozen."""
    role = kind.role
    blows = [Blow(role, 2), Blow(role, 3, TRAINING), Blow(role, 5, GENERATING, signal.SIGSTOP)]
    steps = [f"trainer.total_training_steps={MORE_STEPS}", f"partial_rollout.timeouts.{limit}={CLAIM_S}"]
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows)
    job = struck.job
    report |= {"role": role, "code": job.code, "steps": len(job.steps)}
    report |= {"faults": [(fault.role, fault.text[:200], fault.action) for fault in struck.faults]}
    report |= {"known_s": [round(f.t - at_s, 1) for f, at_s in zip(struck.faults, struck.at_s, strict=False)]}
    report |= {"step_done_s": struck.step_done_s}
    assert job.code == 0, job.output[-4000:]
    assert [fault.role for fault in struck.faults] == [role] * len(blows)
    assert all("was started again" in fault.action for fault in struck.faults)
    assert max(report["known_s"][:2]) < processes.REPLACED_S
    assert re.search("no sign of life|not answered in time", struck.faults[-1].text)
    check_all_trained_once(job, MORE_STEPS)
    check_same_texts(tmp_path, calm)
    assert "failed (" not in job.output  # no attempt was charged to a prompt
