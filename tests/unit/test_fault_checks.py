"""The checks that all fault tests share (tests/faults/conftest.py), on folders and streams made by hand."""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec import structs

from partial_rollout.observability.events import (
    AnyEvent,
    BatchTaken,
    CheckpointSaved,
    EventWriter,
    GateMoved,
    PhaseBegan,
    ProcessFound,
    PromptDropped,
    QueueMoved,
    StepEnded,
    Warned,
)
from partial_rollout.types import FinishedGroup, PromptMeta, QueueSnapshot
from tests.faults.conftest import (
    GENERATING,
    MISSED,
    SAVING,
    SENDING,
    SHUT,
    TRAINING,
    Blow,
    Struck,
    _strike,
    check_same_texts,
    misplaced,
)
from tests.faults.measured import NEVER_S, unconserved
from tests.faults.test_at_random import PHASES, random_blows
from tests.preloaded import MARK

if TYPE_CHECKING:
    from pathlib import Path

BEYOND_ALL_PIDS = 1 << 22
"""The largest pid that Linux can be set to is one less."""
CALM = {("1+1=", False): {"2"}, ("2+2=", True): {"two and two is four"}}


def dump(folder: Path, *rows: tuple[str, str], end: str = "") -> None:
    (folder / "rollouts").mkdir()
    lines = [json.dumps({"input": prompt, "output": text}) for prompt, text in rows]
    (folder / "rollouts/1.jsonl").write_text("\n".join([*lines, end]))


def test_the_texts_of_an_undisturbed_run_pass(tmp_path: Path) -> None:
    dump(tmp_path, ("1+1=", "2"), ("1+1=", "2"), ("2+2=", "two and two is four"), end='{"input": "3')
    check_same_texts(tmp_path, CALM)


@pytest.mark.parametrize(
    "row", [("2+2=", "two and two is five"), ("2+2=", "two and two is four."), ("3+3=", "6"), ("1+1=", "3")]
)
def test_one_other_letter_or_prompt_does_not_pass(tmp_path: Path, row: tuple[str, str]) -> None:
    dump(tmp_path, ("1+1=", "2"), row)
    with pytest.raises(AssertionError):
        check_same_texts(tmp_path, CALM)


def test_a_job_without_texts_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(AssertionError):
        check_same_texts(tmp_path, CALM)


@pytest.mark.parametrize(
    "charge",
    [
        PromptDropped(uid="a", source_index="3", reason="max_attempts"),
        Warned(level="WARNING", text="attempt 1 of prompt a failed (agent_loop_failed)"),
        StepEnded(step=1, total=4, metrics={"partial_rollout/queue/failed_attempts": 1}),
    ],
)
def test_a_job_that_charged_a_prompt_does_not_pass(tmp_path: Path, charge: AnyEvent) -> None:
    dump(tmp_path, ("1+1=", "2"))
    events = EventWriter(tmp_path / "events", "prompt_manager")
    events.write(Warned(level="WARNING", text="attempt 1 of prompt a is on its way"))
    events.write(StepEnded(step=1, total=4, metrics={"partial_rollout/queue/failed_attempts": 0}))
    check_same_texts(tmp_path, CALM)
    events.write(charge)
    with pytest.raises(AssertionError):
        check_same_texts(tmp_path, CALM)


def test_moments_at_which_prompts_do_not_add_up_are_found() -> None:
    sound = QueueMoved(step=1, pending=1, ongoing=2, deferred=3, done=4, taken=5, admitted=21, dropped=6)
    lost, twice = (structs.replace(sound, pending=pending) for pending in (0, 2))
    assert unconserved([sound, lost, twice]) == [lost, twice]


def batch(t: float, step: int, *uids: str) -> BatchTaken:
    return BatchTaken(t=t, step=step, uids=list(uids), source_index=[], deferrals=[], interruptions=[])


def prompts(*uids: str) -> tuple[PromptMeta, ...]:
    return tuple(PromptMeta(uid=uid, source_index="", num_trajectories=1, global_step=1) for uid in uids)


QUEUE = QueueSnapshot(
    pending=prompts("pending"),
    ongoing=prompts("ongoing"),
    deferred=prompts("deferred"),
    done=(FinishedGroup(uid="done", global_step=1, source_index="", trajectories=()),),
)
HISTORY: list[AnyEvent] = [
    *(PhaseBegan(t=1, uid=uid, session=0, phase="agent") for uid in ("first", "second", "dropped", "ongoing", "done")),
    *(batch(2, 1, "first"), batch(3, 2, "second")),
    *(PromptDropped(t=t, uid="dropped", source_index="", reason="agent_loop_failed") for t in (3, 4)),
    *(batch(4, 1, "first"), batch(5, 2, "second")),  # trained again by a new start, and dropped again
    CheckpointSaved(t=6, step=2, seconds=0.1),
    *(PhaseBegan(t=7, uid="later", session=0, phase="agent"), batch(8, 3, "done")),
]


def test_a_run_that_has_each_prompt_in_one_place_passes() -> None:
    assert misplaced(HISTORY, QUEUE) == {}


@pytest.mark.parametrize(
    ("events", "queue", "wrong"),
    [
        ([PhaseBegan(t=1, uid="lost", session=0, phase="agent")], QUEUE, {"lost": 0}),
        ([batch(5.5, 2, "first", "second")], QUEUE, {"first": 2}),
        ([batch(5.5, 2, "second", "pending")], QUEUE, {"pending": 2}),
        ([PromptDropped(t=5, uid="ongoing", source_index="", reason="")], QUEUE, {"ongoing": 2}),
        ([], replace(QUEUE, pending=prompts("pending", "second")), {"second": 2}),
        ([], replace(QUEUE, pending=prompts("pending", "done")), {"done": 2}),
        ([], replace(QUEUE, ongoing=()), {"ongoing": 0}),
    ],
    ids=["lost", "trained twice", "trained, pending", "dropped, ongoing", "trained, queued", "done, pending", "gone"],
)
def test_a_prompt_in_two_places_or_in_none_is_found(
    events: list[AnyEvent], queue: QueueSnapshot, wrong: dict[str, int]
) -> None:
    assert misplaced([*HISTORY, *events], queue) == wrong


def test_a_blow_while_a_checkpoint_is_saved_is_due_with_its_first_file_and_late_when_it_is_whole(
    tmp_path: Path,
) -> None:
    blow = Blow("engine", 2, SAVING)
    (tmp_path / "checkpoints/global_step_1/actor").mkdir(parents=True)
    assert not blow.is_due([], tmp_path)
    (tmp_path / "checkpoints/global_step_2/actor").mkdir(parents=True)
    assert blow.is_due([], tmp_path)
    whole = [CheckpointSaved(t=10.0, step=2, seconds=0.1)]
    assert not blow.is_late(whole, 9.9)
    assert blow.is_late(whole, 10.1)


def test_a_blow_while_weights_travel_is_due_after_the_checkpoint_and_late_when_gates_are_open(tmp_path: Path) -> None:
    blow = Blow("engine", 2, SENDING)
    events: list[AnyEvent] = [CheckpointSaved(t=1.0, step=1, seconds=0.1)]
    assert not blow.is_due(events, tmp_path)
    events += [CheckpointSaved(t=10.0, step=2, seconds=0.1), GateMoved(t=11.0, step=2, version=2, is_open=True)]
    assert blow.is_due(events, tmp_path)
    assert not blow.is_late(events, 10.9)
    assert blow.is_late(events, 11.1)


def test_a_blow_to_shut_gates_is_due_when_those_of_the_batch_are_shut(tmp_path: Path) -> None:
    blow = Blow("engine server", 2, SHUT)
    taken = BatchTaken(t=10.0, step=2, uids=[], source_index=[], deferrals=[], interruptions=[])
    # An engine that died while it generated has shut the gates before.
    events: list[AnyEvent] = [GateMoved(t=9.0, step=2, version=1, is_open=False), taken]
    assert not blow.is_due(events, tmp_path)
    assert blow.is_due([*events, GateMoved(t=10.1, step=2, version=1, is_open=False)], tmp_path)


@pytest.mark.parametrize(("phase", "step_done_s"), [(GENERATING, 1.0), (TRAINING, 1.0), (SAVING, 7.0), (SENDING, 7.0)])
def test_a_blow_after_the_training_of_its_step_is_measured_to_the_end_of_the_step_after(
    tmp_path: Path, phase: str, step_done_s: float
) -> None:
    writer = EventWriter(tmp_path / "events", "trainer")
    for t, step in ((21.0, 2), (27.0, 3)):
        writer.write(StepEnded(t=t, step=step, total=9, metrics={}))
    struck = Struck(cast("Any", None), (Blow("x", 2, phase),), at_s=(20.0,), pids=(1,), ended_s=30.0, folder=tmp_path)
    assert struck.measured(NEVER_S)[0]["step_done_s"] == step_done_s


OTHERS = "is no process of the job: it has another mark"


@pytest.mark.parametrize("pid", [0, BEYOND_ALL_PIDS, OTHERS], ids=["not known", "gone", "another's"])
def test_a_blow_to_a_process_that_is_not_the_job_s_fails_unless_it_may_miss(pid: int | str) -> None:
    with subprocess.Popen(["sleep", "60"], text=True) as other:
        found = [ProcessFound(role="engine", name="replica 0", pid=other.pid if pid == OTHERS else int(pid))]
        blow = Blow("engine", step=1, number=signal.SIGCONT)
        with pytest.raises(ProcessLookupError):
            _strike(blow, other, "mark", found)
        assert _strike(replace(blow, may_miss=True), other, "mark", found) == MISSED
        assert other.poll() is None
        other.kill()


def test_a_blow_to_a_role_that_no_process_had_fails_though_it_may_miss() -> None:
    with subprocess.Popen(["true"], text=True) as job, pytest.raises(LookupError, match="found no engine"):
        _strike(Blow("engine", step=1, may_miss=True), job, "mark", [])


def test_a_blow_hits_the_process_with_the_mark_of_its_job() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(["cat"], text=True, bufsize=1, stdin=pipe, stdout=pipe, env={MARK: "mark"}) as job:
        assert job.stdin
        assert job.stdout
        print("runs", file=job.stdin)
        assert job.stdout.readline() == "runs\n"  # Linux tells a process's environment a moment after its start
        found = [ProcessFound(role="engine", name="replica 0", pid=job.pid)]
        assert _strike(Blow("engine", step=1), job, "mark", found) == job.pid
        assert job.wait() == -signal.SIGKILL


def test_random_blows_are_those_of_their_seed_and_in_the_order_in_which_they_are_due() -> None:
    blows = random_blows(0)
    assert blows == random_blows(0) != random_blows(1)
    due = [(blow.step, PHASES.index(blow.phase)) for blow in blows]
    assert due == sorted(due)
    assert {blow.number for seed in range(9) for blow in random_blows(seed)} == {signal.SIGKILL, signal.SIGSTOP}
