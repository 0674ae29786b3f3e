"""A trajectory that dies with its run goes on from its logged tokens, and its text is that of an undisturbed run."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

pytest.importorskip("verl")

from partial_rollout.agent_loop import worker as worker_module
from partial_rollout.agent_loop.log_reading import Left, read_left, read_tokens
from partial_rollout.agent_loop.rollout_log import LogFolder, WorkerLog
from partial_rollout.agent_loop.trajectory import Saved, Trajectories, Trajectory
from partial_rollout.core.interrupt import FRESH, Context
from partial_rollout.core.resume import ABORTED, STOPPED, ResumableGeneration, Segment
from partial_rollout.core.rollout_log import Finished, FrameReader, GivenUp, Taken, decode, encode
from partial_rollout.runtime.log_writer import LogWriter
from partial_rollout.train.rollout_log import read_history
from partial_rollout.types import Claim
from tests.fake_worker import make_claim
from tests.unit.agent_loop.test_worker_log import LONG_S, folder, output, worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.core.replay import History, Place

__all__ = ["worker"]
NUM_TURNS, BUDGET, END, MAX_VERSION = 3, 12, 0, 200
PROMPT = [5, 3]


class Died(Exception):
    """The run dies."""


def write_trainers_file(folder: LogFolder) -> None:
    """The trainer has trained with all weights that there were."""
    trainer = LogWriter("trainer")
    trainer.open(folder.file("trainer"))
    trainer.append(folder.opened("trainer", holds_through=MAX_VERSION))
    for step in range(folder.base_step + 1, MAX_VERSION):
        trainer.append(encode(Taken(step=step, groups=[])))
    trainer.close(LONG_S)


def next_token(context: Sequence[int]) -> int:
    """Greedy decoding: what follows depends on all that was before, and on nothing else."""
    return sum((place + 1) * token for place, token in enumerate(context)) % 11


@dataclass
class Life:
    """A start of training, until its death."""

    num_segments: int
    """After so many segments it dies, at the next interruption of a response that has tokens."""
    sizes: tuple[int, ...]
    """Tokens of each segment, again and again."""
    checkpoint_at: int | None = None
    """A checkpoint is saved after so many segments; None: in this start there is none."""
    lost: float = 0.0
    """Share of the worker's file that was not on the disk."""
    wrong: float | None = None
    """Where in the file, from 0 to 1, a bit is another one than was written."""

    def damage(self, path: Path) -> None:
        """What the disk makes of the worker's file."""
        content = bytearray(path.read_bytes())
        if self.wrong is not None:
            content[round(self.wrong * (len(content) - 1))] ^= 1
        path.write_bytes(content[: round(len(content) * (1 - self.lost))])


@dataclass
class World:
    """A run's disk, and what its engines have generated."""

    folder: Path
    base: int = 0
    saved: Saved = field(default_factory=dict)
    """Tokens in the checkpoint."""
    version: int = 0
    num_generated: int = 0
    file: Path = Path()
    """The worker's."""

    def live(self, life: Life) -> list[int] | None:
        """The trajectory's text, or None if the run dies before its end."""
        trajectories, log = Trajectories(), WorkerLog("worker_0", LONG_S)
        history = self._begin_folder(log, trajectories)
        plan = history.plan(self.base, first=0, unfinished=["a"], done=[])
        trajectories.restore(self.saved | read_tokens(plan.unfinished))
        trajectory = trajectories.start(Claim("a", 1, "worker_0", 1, 1, 1, goes_on=bool(self.saved)), 0)
        try:
            return self._agent_loop(life, trajectories, trajectory, log)
        except Died:
            return None
        finally:
            log.close(LONG_S)
            life.damage(self.file)

    def _begin_folder(self, log: WorkerLog, trajectories: Trajectories) -> History:
        """Returns what was in it."""
        root = self.folder / f"after_step_{self.base}"
        history, number, _ = read_history(root, self.base, {})
        place = LogFolder(str(root), number, self.base)
        write_trainers_file(place)
        log.begin(place, trajectories.records())
        self.file = place.file("worker_0")
        return history

    def _agent_loop(self, life: Life, trajectories: Trajectories, trajectory: Trajectory, log: WorkerLog) -> list[int]:
        prompt, num_segments = list(PROMPT), 0
        for turn in range(NUM_TURNS):
            generation = ResumableGeneration(prompt, BUDGET, stop_token_ids=frozenset({END}))
            trajectories.record(trajectory, generation)
            while not generation.finished:
                log.write_interrupted(trajectory)
                if num_segments == life.checkpoint_at:
                    self.saved, self.base = trajectories.states(), self.version
                    self._begin_folder(log, trajectories)
                if num_segments >= life.num_segments and generation.token_ids:
                    raise Died
                self._segment(generation, life.sizes[num_segments % len(life.sizes)])
                num_segments += 1
            prompt = [*prompt, *generation.token_ids, 7 + turn]
        return prompt

    def _segment(self, generation: ResumableGeneration, most: int) -> None:
        tokens: list[int] = []
        context, remaining = generation.prompt_ids + generation.token_ids, generation.remaining
        while len(tokens) < min(most, remaining) and END not in tokens:
            tokens.append(next_token(context + tokens))
        self.num_generated += len(tokens)
        self.version += 1
        end = STOPPED if END in tokens or len(tokens) == remaining else ABORTED
        context = Context(self.version, FRESH)
        generation.add(Segment(tokens, [-0.5] * len(tokens), end, self.version, self.version, context))


UNDISTURBED = Life(1000, (BUDGET,))
LIVES = st.builds(
    Life,
    num_segments=st.integers(0, 12),
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any).map(tuple),
    checkpoint_at=st.none() | st.integers(0, 8),
    lost=st.just(0.0) | st.floats(0, 1),
    wrong=st.none() | st.floats(0, 1),
)


def lived(*lives: Life) -> tuple[list[int], int]:
    """The text after all lives, and how many tokens were generated for it."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for life in lives:
            if (text := world.live(life)) is not None:
                break
        else:
            text = world.live(UNDISTURBED)
        assert text is not None
        return text, world.num_generated


@settings(deadline=None, max_examples=60)
@given(st.lists(LIVES, max_size=4))
def test_whatever_is_left_of_the_log_with_the_checkpoint_leads_to_the_text_of_an_undisturbed_run(
    lives: list[Life],
) -> None:
    text, num_tokens = lived(UNDISTURBED)
    found, num_generated = lived(*lives)
    assert found == text
    if all(life.lost == 0 and life.wrong is None for life in lives):
        # Each death is at an interruption, so nothing is generated twice.
        assert num_generated == num_tokens


def records(path: Path) -> list[Any]:
    """Records of a worker's file, without the first one."""
    with path.open("rb") as file:
        return [decode(payload) for _, payload in FrameReader(file)][1:]


def interrupt(call: ResumableGeneration, *tokens: int, version: int = 3) -> None:
    log_probs = [-0.5] * len(tokens)
    call.add(Segment(list(tokens), log_probs, ABORTED, version, version, Context(version, FRESH)))


async def generate(worker: Any, claim: Claim, *segments: list[int]) -> list[int] | None:
    """The tokens of a response that is interrupted after each of these segments; None: no agent loop has asked."""
    call, has_run = ResumableGeneration(PROMPT, BUDGET), False

    async def agent_loop(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        has_run = True
        client = worker.llm_client
        client.on_generation(call)
        await client.before_segment()
        for number, segment in enumerate(segments, 4):
            interrupt(call, *segment, version=number)
            await client.before_segment()
        return [output()]

    async def store(*args: Any, **kwargs: Any) -> None:
        """TransferQueue has it."""

    worker._run_agent_loop = agent_loop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module.AgentLoopWorkerTQBase, "_agent_loop_postprocess", store)
        await worker.generate(claim, {"index": 3, "raw_prompt": "p", "uid": "a", "global_steps": 5}, 0)
    return call.token_ids if has_run else None


def unfinished(folder: LogFolder) -> dict[str, tuple[Place, ...]]:
    """What a new start is told of the folder."""
    write_trainers_file(folder)
    history, _, _ = read_history(Path(folder.path), folder.base_step, {})
    return history.plan(folder.base_step, first=0, unfinished=["a"], done=[]).unfinished


def interrupted_trajectory(claim: Claim, session: int = 0) -> Trajectory:
    """A trajectory that was interrupted after two tokens."""
    trajectory, call = Trajectory(claim, session), ResumableGeneration(PROMPT, BUDGET)
    trajectory.record(call)
    interrupt(call, 8, 9)
    return trajectory


def earlier_start(path: Path, claim: Claim) -> dict[str, tuple[Place, ...]]:
    """A start that has died after an interruption; returns what a new start is told."""
    log = WorkerLog("worker-0", LONG_S)
    log.begin(folder(path), [])
    log.write_interrupted(interrupted_trajectory(claim))
    log.close(LONG_S)
    return unfinished(folder(path))


async def test_a_worker_logs_each_interruption_and_goes_on_from_what_an_earlier_start_has_logged(
    worker: Any, tmp_path: Path
) -> None:
    places = earlier_start(tmp_path, make_claim("a"))
    await worker.begin_log(folder(tmp_path, number=2))
    await worker.restore_tokens(read_tokens(places))
    assert await generate(worker, make_claim("a"), [1, 2], [3]) == [8, 9, 1, 2, 3]
    assert await generate(worker, make_claim("a")) == []  # once
    worker._log.close(LONG_S)
    *of_response, ended, _ = records(folder(tmp_path, number=2).file("worker-0"))
    # The first record has what the earlier start has logged too: this file needs no other one.
    assert [each.num_tokens for each in of_response] == [2, 2, 1]
    assert isinstance(ended, Finished)


async def test_a_further_attempt_begins_afresh_and_says_that_earlier_ones_are_void(worker: Any, tmp_path: Path) -> None:
    claim = make_claim("a")
    places = earlier_start(tmp_path, claim)
    await worker.begin_log(folder(tmp_path, number=2))
    await worker.restore_tokens(read_tokens(places))
    assert await generate(worker, replace(claim, attempt=2)) == []
    worker._log.close(LONG_S)
    void, _ = records(folder(tmp_path, number=2).file("worker-0"))
    assert void == GivenUp(uid="a", claim_id=claim.claim_id - 1)


@pytest.mark.parametrize("is_failed", [True, False], ids=["failed", "the run has ended"])
async def test_only_an_attempt_that_has_failed_is_void(worker: Any, tmp_path: Path, is_failed: bool) -> None:
    claim = make_claim("a")
    await worker.begin_log(folder(tmp_path))
    worker._log.write_interrupted(interrupted_trajectory(claim))
    (worker.give_up if is_failed else worker.forget)(claim)
    worker._log.close(LONG_S)
    assert sorted(unfinished(folder(tmp_path))) == ([] if is_failed else ["a_0"])


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
async def test_tokens_that_cannot_be_read_are_generated_again(
    worker: Any, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    places = earlier_start(tmp_path, make_claim("a"))
    path, (place,) = folder(tmp_path).file("worker-0"), places["a_0"]
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[place.offset + place.num_bytes // 2] ^= 1
    path.write_bytes(content[: place.offset + place.num_bytes - (damage == "cut")])
    if damage == "gone":
        path.unlink()
    await worker.restore_tokens(read_tokens(places))
    assert await generate(worker, make_claim("a"), [1]) == [1]
    assert "cannot be read, and are generated again; first: trajectory a_0" in caplog.text


def test_records_whose_calls_do_not_follow_each_other_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (place,) = earlier_start(tmp_path, claim := make_claim("a"))["a_0"]
    (whole,) = records(Path(place.path))
    (call,) = whole.calls
    log = WorkerLog("worker-1", LONG_S)
    log.begin(folder(tmp_path), [encode(structs.replace(whole, calls=[structs.replace(call, num_shared=9)]))])
    log.close(LONG_S)
    assert read_left([folder(tmp_path).file("worker-1")], [claim]).tokens == {}
    assert "first: trajectory a_0" in caplog.text


AFTER_A_LOSS = {"attempt": 2, "goes_on": True}


async def test_what_a_dead_worker_has_logged_is_taken_over_by_another_one(worker: Any, tmp_path: Path) -> None:
    dead, path = WorkerLog("dead", LONG_S), folder(tmp_path).file("dead")
    dead.begin(folder(tmp_path), [])
    a, b, c = (make_claim(uid) for uid in "abc")
    dead.write_interrupted(interrupted_trajectory(a))
    dead.write(Trajectory(b, 0), [output()], [])
    dead.write_interrupted(interrupted_trajectory(c))
    dead.write(Trajectory(c, 1), [output()], [])
    dead.write_interrupted(interrupted_trajectory(make_claim("d")))
    dead.close(LONG_S)
    # The file has an earlier attempt of the third prompt only, which has failed, whether or not it says so.
    left = read_left([path.with_name("is not there"), path], [a, b, make_claim("c", attempt=2)])
    assert (sorted(left.tokens), sorted(left.places), left.going_on) == (["a_0"], ["b_0"], ["a", "b"])
    await worker.restore_tokens({"e_0": interrupted_trajectory(make_claim("e")).states()})
    await worker.replay({"f_0": left.places["b_0"]})
    await worker.take_over(left)
    assert await generate(worker, replace(make_claim("a"), **AFTER_A_LOSS), [1]) == [8, 9, 1]
    assert await generate(worker, replace(make_claim("b"), **AFTER_A_LOSS)) is None  # no agent loop ran
    assert await generate(worker, replace(make_claim("c"), attempt=2), [1]) == [1]
    assert await generate(worker, make_claim("e"), [1]) == [8, 9, 1]
    assert list(worker._log._places) == ["f_0"]


async def test_nothing_older_is_taken_over_of_a_dead_workers_prompts(worker: Any, tmp_path: Path) -> None:
    """Another worker had lost the first attempt, which the dead one had given up, before it began the next."""
    await worker.take_over(
        Left(frozenset("a"), {"a_1": cast("Any", "place")}, {"a_0": interrupted_trajectory(make_claim("a")).states()})
    )
    await worker.take_over(Left(frozenset("a"), {}, {"a_2": interrupted_trajectory(make_claim("a"), 2).states()}))
    assert worker._log._places == {}
    assert await generate(worker, replace(make_claim("a"), **AFTER_A_LOSS), [1]) == [1]


@pytest.mark.parametrize("is_between_calls", [True, False])
async def test_a_new_file_has_the_tokens_of_what_still_runs(
    worker: Any, tmp_path: Path, is_between_calls: bool
) -> None:
    running = worker._trajectories.start(claim := make_claim("a"), 0)
    worker._trajectories.record(running, call := ResumableGeneration(PROMPT, BUDGET))
    call.add(Segment([8], [-0.5], STOPPED if is_between_calls else ABORTED, 3, 3, Context(3, FRESH)))
    await worker.begin_log(folder(tmp_path))
    worker._log.close(LONG_S)
    left = read_left([folder(tmp_path).file("worker-0")], [claim])
    assert [state.token_ids for state in left.tokens["a_0"]] == [[8]]


def test_a_new_file_needs_no_record_of_the_file_before(tmp_path: Path) -> None:
    log, trajectory = WorkerLog("worker-0", LONG_S), interrupted_trajectory(claim := make_claim("a"))
    files = folder(tmp_path), LogFolder(str(tmp_path / "after_step_8"), 1, 8)
    for each in files:
        log.begin(each, [])
        log.write_interrupted(trajectory)
    log.close(LONG_S)
    for each in files:
        left = read_left([each.file("worker-0")], [claim])
        assert [state.token_ids for state in left.tokens["a_0"]] == [[8, 9]]


@settings(deadline=None, max_examples=60)
@given(LIVES, st.floats(0, 1), st.floats(0, 1) | st.none())
def test_whatever_is_left_of_a_dead_workers_file_leads_to_the_text_of_an_undisturbed_run(
    life: Life, lost: float, wrong: float | None
) -> None:
    text, _ = lived(UNDISTURBED)
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        if world.live(replace(life, lost=lost, wrong=wrong, checkpoint_at=None)) is None:
            world.saved = read_left([world.file], [Claim("a", 1, "worker_0", 1, 1, 1)]).tokens
            assert world.live(UNDISTURBED) == text


async def test_the_tokens_of_the_log_are_newer_than_those_of_the_checkpoint(worker: Any, tmp_path: Path) -> None:
    saved = interrupted_trajectory(make_claim("a")).states()
    (older,) = (replace(state, token_ids=[8], log_probs=[-0.5]) for state in saved)
    claim = replace(make_claim("a", attempt=2), goes_on=True)  # it had failed once before the checkpoint
    places = earlier_start(tmp_path, claim)
    for told, expected in ((places, [8, 9]), ({}, [8])):
        await worker.restore_tokens({"a_0": [older]} | read_tokens(told))
        assert await generate(worker, claim) == expected


def test_while_saved_calls_are_ahead_nothing_is_logged(tmp_path: Path) -> None:
    log, state = WorkerLog("worker-0", LONG_S), interrupted_trajectory(make_claim("a")).states()[0]
    trajectory, first = Trajectory(make_claim("a"), 0, [state, state]), ResumableGeneration(PROMPT, BUDGET)
    log.begin(folder(tmp_path), [])
    trajectory.record(first)
    log.write_interrupted(trajectory)
    trajectory.record(ResumableGeneration(PROMPT, BUDGET))
    log.write_interrupted(trajectory)
    log.close(LONG_S)
    (record,) = records(folder(tmp_path).file("worker-0"))
    assert [call.number for call in record.calls] == [0, 1]


def test_a_token_that_no_record_can_hold_costs_its_record_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, trajectory = WorkerLog("worker-0", LONG_S), interrupted_trajectory(make_claim("a"))
    trajectory.generations[0].token_ids[0] = 1 << 40
    log.begin(folder(tmp_path), [])
    for _ in range(2):
        log.write_interrupted(trajectory)
    log.close(LONG_S)
    assert records(folder(tmp_path).file("worker-0")) == []
    (warning,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert "tokens of prompt a are not in the log of rollouts" in warning.message
