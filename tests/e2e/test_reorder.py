"""Reorder rollout on real verl, vLLM and Ray: short rounds, a restart, and a long round of what they left behind.

Advantages are those of GAE, so a critic is trained, saved and restored as well.
"""

from __future__ import annotations

import json
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.rollout.http_server import KEY_FILE
from partial_rollout.runtime.termination import INTERRUPTED_CODE
from tests.e2e.conftest import FLAG, Job, is_conserved, run_job, run_job_and_signal, saved_step, traced, with_critic

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = 80
EVERY = 5
"""Every so manieth row has long responses: two of the ten groups that a short round starts."""
LONG_ROWS = list(range(EVERY - 1, 40, EVERY))
"""Long rows of the first four rounds: as many as a batch."""
LEARNING_RATE = 8.0e-5
pytestmark = pytest.mark.e2e


def _kinds(steps: list[dict[str, Any]]) -> list[str]:
    return [next(key.split("/")[2] for key in step if key.startswith("partial_rollout/round/")) for step in steps]


def _check(job: Job, steps: range) -> None:
    assert job.code == 0, job.output[-4000:]
    assert job.survivors == []
    _check_steps(job.steps, steps)


def _check_steps(found: list[dict[str, Any]], steps: range) -> None:
    assert [step["training/global_step"] for step in found] == list(steps)
    assert all(is_conserved(step) for step in found)
    # The schedule rises by one part of eight a step, whatever the kind of round.
    rates = [LEARNING_RATE * step / 8 for step in steps]
    assert [step["actor/lr"] for step in found] == pytest.approx(rates)


@pytest.fixture(scope="module")
def options(task: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of all jobs: same rows, same schedule."""
    return [
        FLAG, "partial_rollout.tail.policy=reorder", *with_critic(task),
        *traced(task, tmp_path_factory.mktemp("rows"), num_rows=NUM_ROWS, every=EVERY),
        "trainer.save_freq=4", "trainer.test_freq=3",
        f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}", "actor_rollout_ref.actor.optim.lr_warmup_steps=8",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def short_rounds(task: Path, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    """Four rounds and their checkpoint, which leave a batch of deferred groups behind."""
    folder = tmp_path_factory.mktemp("short")
    job = run_job(task, folder, *options, "trainer.total_training_steps=4")
    assert job.code == 0, job.output[-4000:]
    return folder, job


def _continued(short_rounds: tuple[Path, Job], folder: Path) -> tuple[Job, dict[str, Any]]:
    """The job, with its checkpoint in another folder, and the queue in it."""
    shutil.copytree(short_rounds[0], folder, dirs_exist_ok=True)
    queue = json.loads((folder / "checkpoints/global_step_4/partial_rollout/queue.json").read_text())
    return short_rounds[1], queue


def test_deferred_groups_are_trained_together_with_the_tokens_they_had(
    task: Path, options: list[str], short_rounds: tuple[Path, Job], tmp_path: Path
) -> None:
    first, queue = _continued(short_rounds, tmp_path)
    _check(first, range(1, 5))
    assert _kinds(first.steps) == ["short"] * 4
    assert [step["partial_rollout/queue/deferred"] for step in first.steps] == [2, 4, 6, 8]
    assert sorted(int(prompt["source_index"]) for prompt in queue["deferred"]) == LONG_ROWS

    second = run_job(task, tmp_path, *options, "trainer.total_training_steps=8")
    _check(second, range(5, 9))
    assert _kinds(second.steps) == ["long", "short", "short", "short"]
    assert any(key.startswith("val-core/") for key in second.steps[1])
    assert "32 unfinished trajectories have tokens in the checkpoint" in second.output
    # The oldest tokens are of the first weights, those of the first round: nothing was generated again.
    assert second.steps[0]["partial_rollout/staleness_steps/max"] == 4
    assert second.steps[0]["partial_rollout/resumed_trajectories"] == 32
    assert all("critic/vf_loss" in step for step in second.steps)
    long_round = second.events[4]
    assert sorted(map(int, long_round["source_index"])) == LONG_ROWS
    assert [prompt["uid"] for prompt in queue["deferred"]] == long_round["uids"]
    assert long_round["deferrals"] == [4, 4, 3, 3, 2, 2, 1, 1]
    assert [event["step"] for event in second.events] == list(range(1, 9))
    uids = [uid for event in second.events for uid in event["uids"]]
    assert len(uids) == len(set(uids)) == 64


def test_a_few_deferred_groups_join_each_round_until_ctrl_c_which_saves_all_steps_and_leaves_no_process(
    task: Path, options: list[str], short_rounds: tuple[Path, Job], tmp_path: Path
) -> None:
    """Ten groups a round, four of them deferred, of which a batch takes what the fresh short ones leave room for."""
    _continued(short_rounds, tmp_path)
    few = [*options, "partial_rollout.tail.max_deferred_per_round=4", "trainer.total_training_steps=40"]
    driver = {"process": "partial_rollout.main_ppo", "number": signal.SIGINT}
    job = run_job_and_signal(task, tmp_path, *few, after="step:6 ", **driver)
    _check_steps(job.steps[:2], range(5, 7))
    assert _kinds(job.steps[:2]) == ["mixed"] * 2
    batches = [list(map(int, event["source_index"])) for event in job.events[4:6]]
    assert all(2 <= sum(row % EVERY == EVERY - 1 for row in batch) <= 5 for batch in batches)
    trained = set(LONG_ROWS) & {row for batch in batches for row in batch}
    assert len(trained) >= 2

    assert job.code == INTERRUPTED_CODE
    assert "error: stopped by Ctrl-C or SIGTERM" in job.output
    assert saved_step(tmp_path) == job.steps[-1]["training/global_step"] >= 6
    assert (tmp_path / "events" / KEY_FILE).read_text().strip() not in job.output
    assert job.survivors == []
