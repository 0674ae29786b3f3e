"""What the trainer logs, and what a run that was started again is told to replay."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from partial_rollout.core.rollout_log import encode, stamped
from partial_rollout.runtime.log_writer import LogWriter
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.train import rollout_log
from partial_rollout.train import trainer as trainer_module
from partial_rollout.train.rollout_log import RunLog, logs_rollouts
from partial_rollout.types import FinishedGroup, PromptMeta, QueueSnapshot
from tests.unit.core.test_rollout_log import finished, interrupted
from tests.unit.train.support import bare_trainer

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from omegaconf import DictConfig

    from partial_rollout.agent_loop.rollout_log import LogFolder
    from partial_rollout.core.replay import Place

LONG_S = 60.0
STEP = 4


def config(path: Path, **more: Any) -> DictConfig:
    reward = path / "reward.py"
    if not reward.exists():
        reward.write_text("def compute_score(): return 1.0")
    given = {
        "trainer.default_local_dir": str(path / "checkpoints"), "trainer.resume_mode": "auto", "trainer.save_freq": 4,
        "data.train_files": "a.parquet", "data.train_batch_size": 2, "data.max_prompt_length": 8,
        "data.max_response_length": 8, "data.seed": 1, "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.model.path": "m", "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
        "algorithm.adv_estimator": "grpo", "reward.custom_reward_function.path": str(reward),
    }  # fmt: skip
    made = OmegaConf.create({})
    for key, value in (given | more).items():
        OmegaConf.update(made, key, value, force_add=True)
    return made


@dataclass
class Start:
    """One start of training: its trainer's log, and a worker that writes what the test says."""

    config: DictConfig
    step: int = STEP
    snapshot: QueueSnapshot | None = field(default_factory=lambda: QueueSnapshot(admitted=10, taken=10))
    saved: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The checkpoint's tokens."""
    replayed: Mapping[str, Place] = field(default_factory=dict[str, "Place"])

    def __post_init__(self) -> None:
        self.worker = LogWriter("agent_loop_worker_0")
        self.log = RunLog(self.config, cast("Any", self))
        self.goes_on = {**self.saved, **self.log.begin(self.step, self.snapshot, dict(self.saved))}

    def begin_log(self, folder: LogFolder) -> None:
        self.worker.close(LONG_S)  # a thread that is behind would make a folder again that the trainer has removed
        self.worker = LogWriter("agent_loop_worker_0")
        self.worker.open(folder.file("agent_loop_worker_0"))
        self.worker.append(folder.opened("agent_loop_worker_0"))

    def replay(self, places: Mapping[str, Place]) -> None:
        self.replayed = places

    def go_back(self, keys: Collection[str], before: Mapping[str, Any]) -> None:
        self.goes_on = {key: calls for key, calls in self.goes_on.items() if key not in keys} | dict(before)

    def save(self, step: int, queue: QueueSnapshot) -> None:
        """A checkpoint, and the end of its step."""
        self.log.before_save(step)
        self.log.carry(step, queue)
        self.log.after_save(step)
        self.log.forget_claimed()

    def train(self, step: int, *uids: str, log: bool = True) -> int:
        groups = [FinishedGroup(uid, 1, "", tuple(self._end(uid, log=log))) for uid in uids]
        return self.log.taken(step, groups)

    def _end(self, uid: str, *, log: bool) -> list[Any]:
        found: list[Any] = []
        for session in range(2):
            payload = encode(finished(uid, session))
            if log:
                self.worker.append(payload)
            found += stamped(finished(uid, session).summaries, payload)
        return found

    def die(self) -> None:
        self.log.end(is_complete=False, timeout_s=LONG_S)
        self.worker.close(LONG_S)


def admit(start: Start, *prompts: str, fresh: str = "new") -> list[str]:
    return start.log.name_prompts([f"{fresh}_{prompt}" for prompt in prompts], list(prompts))


def first_start(path: Path) -> None:
    """Two steps after the checkpoint of step 4, then the end."""
    start = Start(config(path))
    assert admit(start, "p", "q", "r", fresh="old") == ["old_p", "old_q", "old_r"]
    assert [start.train(5, "old_q", "old_p"), start.log.wanted(5), start.replayed] == [0, (), {}]
    start.train(6, "old_r", "kept")
    start.die()


def snapshot(*done: str, **more: Any) -> QueueSnapshot:
    groups = tuple(FinishedGroup(uid, 1, "", ()) for uid in done)
    return QueueSnapshot(done=groups, admitted=10, taken=10 - len(groups), **more)


def test_a_second_start_admits_the_same_names_and_takes_the_same_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first_start(tmp_path)
    start = Start(config(tmp_path), snapshot=snapshot("kept"))
    assert "steps 5 to 6 are trained from logged responses (6 responses, 18 tokens not generated again)" in caplog.text
    assert sorted(start.replayed) == [f"old_{p}_{n}" for p in "pqr" for n in range(2)]
    assert start.log.wanted(5) == ("old_q", "old_p")
    assert start.log.wanted(6) == ()
    assert admit(start, "p", "q") == ["old_p", "old_q"]
    assert start.train(5, "old_q", "old_p") == 4
    assert start.log.has_replayed
    assert start.log.wanted(6) == ("old_r", "kept")
    assert admit(start, "r", "s") == ["old_r", "new_s"]
    assert start.train(6, "old_r", "kept") == 2
    assert start.train(7, "new_s", "new_t") == 0
    assert not start.log.has_replayed
    start.die()


def test_a_response_that_a_lost_worker_had_claimed_is_not_counted_as_replayed(tmp_path: Path) -> None:
    first_start(tmp_path)
    start = Start(config(tmp_path), snapshot=snapshot("kept"))
    (group,) = [FinishedGroup("old_q", 1, "", tuple(start._end("old_q", log=True)))]
    again = replace(group.trajectories[0], log_checksum=group.trajectories[0].log_checksum ^ 1)
    assert start.log.taken(5, [replace(group, trajectories=(again, *group.trajectories[1:]))]) == 1
    start.die()


def interrupted_start(path: Path) -> None:
    """Two responses were interrupted when the batch of step 5 was taken, and the run has died in its training."""
    start = Start(config(path))
    admit(start, "p", "q", "r", fresh="old")
    start.train(5, "old_p")
    for uid in ("old_q", "old_r"):
        start.worker.append(encode(interrupted(uid)))
    start.die()


def test_a_second_start_goes_on_from_the_tokens_of_interrupted_responses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted_start(tmp_path)
    start = Start(config(tmp_path), snapshot=snapshot(pending=(PromptMeta("old_x", 2, 1),)))
    said = "(2 responses, 6 tokens not generated again; 2 unfinished responses go on from 6 tokens)"
    assert f"step 5 is trained from logged responses {said}" in caplog.text
    assert (sorted(start.replayed), sorted(start.goes_on)) == (["old_p_0", "old_p_1"], ["old_q_0", "old_r_0"])
    admit(start, "p", "q", "another")
    assert "prompt 13 of the run is another one than before" in caplog.text
    assert (start.replayed, start.goes_on) == ({}, {})
    start.die()


def test_a_run_that_has_died_before_its_first_batch_goes_on_from_the_tokens_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine had died before, and so all engines were interrupted."""
    start = Start(config(tmp_path), snapshot=snapshot(pending=(PromptMeta("x", 2, 1),)))
    start.worker.append(encode(interrupted("x")))
    start.die()
    again = Start(config(tmp_path), snapshot=snapshot(pending=(PromptMeta("x", 2, 1),)))
    assert (again.replayed, sorted(again.goes_on)) == ({}, ["x_0"])
    assert "used for step 5 on (0 responses, 0 tokens not generated again; 1 unfinished" in caplog.text
    again.save(8, snapshot(pending=(PromptMeta("x", 2, 1),)))  # the checkpoint has its tokens
    again.save(12, snapshot())
    again.die()
    assert folders(tmp_path) == {"after_step_12"}


def test_a_third_start_has_the_steps_of_both(tmp_path: Path) -> None:
    first_start(tmp_path)
    second = Start(config(tmp_path), snapshot=snapshot("kept"))
    admit(second, "p", "q", "r", "s")
    second.train(5, "old_q", "old_p")
    second.train(6, "old_r", "kept")
    second.train(7, "new_s")
    second.die()
    third = Start(config(tmp_path), snapshot=snapshot("kept"))
    assert [step for step, _ in third.log._waiting] == [5, 6, 7]
    assert admit(third, "p", "q", "r", "s", fresh="newer") == ["old_p", "old_q", "old_r", "new_s"]
    third.die()


def test_another_prompt_than_before_ends_the_replay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first_start(tmp_path)
    start = Start(config(tmp_path), snapshot=snapshot("kept"))
    assert admit(start, "p", "another", "r") == ["old_p", "new_another", "new_r"]
    assert "ends before step 5: prompt 12 of the run is another one than before" in caplog.text
    assert (start.log.wanted(5), start.replayed) == ((), {})
    start.train(5, "new_r")
    start.die()
    third = Start(config(tmp_path), snapshot=snapshot("kept"))
    assert [step for step, _ in third.log._waiting] == [5]
    assert third.log.wanted(5) == ("new_r",)
    third.die()


def test_names_that_a_start_has_not_given_end_with_its_replay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first_start(tmp_path)
    second = Start(config(tmp_path), snapshot=snapshot("kept"))
    assert admit(second, "p", "another") == ["old_p", "new_another"]  # r has its old name in the first start's file
    second.die()
    caplog.clear()
    third = Start(config(tmp_path), snapshot=snapshot("kept"))
    assert admit(third, "p", "another", "one more", fresh="newer") == ["old_p", "new_another", "newer_one more"]
    assert "the replay of logged responses ends" not in caplog.text
    third.die()


def test_where_a_replay_ends_responses_go_on_from_the_tokens_of_the_checkpoint(tmp_path: Path) -> None:
    queue = snapshot(pending=(PromptMeta("x", 2, 1), PromptMeta("y", 2, 1)))
    start = Start(config(tmp_path), snapshot=queue)
    admit(start, "p", fresh="old")
    for uid in ("x", "y"):
        start.worker.append(encode(interrupted(uid)))
    start.die()
    saved = {"x_0": ["of the checkpoint"], "z_0": ["of the checkpoint"]}
    again = Start(config(tmp_path), snapshot=queue, saved=saved)
    assert sorted(again.goes_on) == ["x_0", "y_0", "z_0"]
    assert again.goes_on["x_0"] != saved["x_0"]
    admit(again, "another")
    assert again.goes_on == saved
    again.die()


def test_a_wanted_prompt_that_has_left_the_queue_ends_the_replay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first_start(tmp_path)
    start = Start(config(tmp_path), snapshot=snapshot("kept"))
    admit(start, "p")
    start.log.require_coming(5)  # q is still to be admitted
    assert start.log.wanted(5)
    admit(start, "q")
    start.log.require_coming(5)
    assert (start.log.wanted(5), start.replayed) == ((), {})
    assert "ends before step 5: a prompt of the batch of step 5 has left the queue" in caplog.text
    start.die()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.seed", 2), ("actor_rollout_ref.rollout.n", 4), ("data.train_files", "b.parquet"),
        ("data.max_response_length", 9), ("actor_rollout_ref.actor.optim.lr", 1e-3),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "gspo"), ("algorithm.adv_estimator", "rloo"),
    ],
)  # fmt: skip
def test_a_log_of_other_settings_is_not_used(
    tmp_path: Path, key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first_start(tmp_path)
    start = Start(config(tmp_path, **{key: value}), snapshot=snapshot("kept"))
    assert (start.log.wanted(5), start.replayed) == ((), {})
    (warning,) = [record for record in caplog.records if "generated again" in record.message]
    assert f"{key}=" in warning.message
    start.train(5, "x")
    start.die()
    # The start before has left the history of the first one.
    again = Start(config(tmp_path), snapshot=snapshot("kept"))
    assert again.log.wanted(5) == ()
    again.die()


def test_a_log_of_another_reward_function_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first_start(tmp_path)
    (tmp_path / "reward.py").write_text("def compute_score(): return 2.0")
    start = Start(config(tmp_path), snapshot=snapshot("kept"))
    assert start.log.wanted(5) == ()
    assert "the reward function's file" in caplog.text
    start.die()


def test_a_run_that_begins_afresh_replays_nothing(tmp_path: Path) -> None:
    first = Start(config(tmp_path), step=0, snapshot=None)
    admit(first, "p", fresh="old")
    first.train(1, "old_p")
    first.die()
    again = Start(config(tmp_path), step=0, snapshot=None)
    assert again.log.wanted(1) == ("old_p",)
    again.die()
    for _ in range(2):
        afresh = Start(config(tmp_path, **{"trainer.resume_mode": "disable"}), step=0, snapshot=None)
        assert afresh.log.wanted(1) == ()
        admit(afresh, "p", fresh="old")
        afresh.train(1, "old_p")
        afresh.die()


def test_a_checkpoint_begins_a_folder_and_takes_the_place_of_those_before_when_it_is_whole(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints" / rollout_log.FOLDER
    start = Start(config(tmp_path))
    start.train(5, "a")
    stale = root / "after_step_8"
    stale.mkdir()
    (stale / "0001-trainer.log").write_bytes(b"of a run that was left")
    start.log.before_save(8)
    start.train(9, "b")
    assert (root / "after_step_4").is_dir()
    start.log.after_save(8)
    start.die()
    assert folders(tmp_path) == {"after_step_8"}
    again = Start(config(tmp_path), step=8, snapshot=snapshot(pending=(PromptMeta("b", 2, 1),)))
    assert again.log.wanted(9) == ("b",)
    again.die()


def test_a_checkpoint_of_a_log_that_is_off_leaves_no_log_of_another_history(tmp_path: Path) -> None:
    first_start(tmp_path)
    off = RunLog(config(tmp_path), object())  # pyright: ignore[reportArgumentType] - not begun, as after a full disk
    off.before_save(4)
    off.after_save(4)
    again = Start(config(tmp_path), snapshot=snapshot("kept"))
    assert (again.log.wanted(5), again.replayed) == ((), {})
    again.die()


def replayed_start(path: Path) -> Start:
    """A second start that has trained both logged batches, while nobody has claimed the last response of `old_x`."""
    first = Start(config(path))
    admit(first, "p", "q", "r", "x", "y", fresh="old")
    first.train(5, "old_q", "old_p")
    first.train(6, "old_r", "kept")
    for uid in ("old_x", "old_y"):
        first._end(uid, log=True)
    first.worker.append(encode(interrupted("old_z")))
    first.log.name_prompts(["old_z"], ["z"])
    first.die()
    start = Start(config(path), snapshot=snapshot("kept"))
    admit(start, "p", "q", "r", "x")
    start.train(5, "old_q", "old_p")
    start.train(6, "old_r", "kept")
    return start


def folders(path: Path) -> set[str]:
    return {each.name for each in (path / "checkpoints" / rollout_log.FOLDER).iterdir()}


def test_a_checkpoint_has_the_logged_responses_that_nobody_has_claimed(tmp_path: Path) -> None:
    start = replayed_start(tmp_path)
    assert sorted(start.goes_on) == ["old_z_0"]
    start.save(8, QueueSnapshot(pending=(PromptMeta("old_x", 2, 1),), admitted=14, taken=13))
    assert folders(tmp_path) >= {"after_step_4", "after_step_8"}  # workers read it when they claim
    start.die()
    third = Start(
        config(tmp_path), step=8, snapshot=QueueSnapshot(pending=(PromptMeta("old_x", 2, 1),), admitted=14, taken=13)
    )
    assert sorted(third.replayed) == ["old_x_0", "old_x_1", "old_y_0", "old_y_1"]
    assert {place.path for place in third.replayed.values()} == {
        str(tmp_path / "checkpoints" / rollout_log.FOLDER / "after_step_8" / "0000-carried.log")
    }
    assert admit(third, "y", "z", fresh="newer") == ["old_y", "old_z"]
    assert sorted(third.goes_on) == ["old_z_0"]
    assert third.goes_on["old_z_0"] == start.goes_on["old_z_0"]
    third.die()


def test_a_checkpoint_has_no_logged_response_of_a_prompt_whose_attempt_has_failed_since(tmp_path: Path) -> None:
    for failed in ({"failures": {"old_x": 1}}, {"restarts": {"old_x": 1}}):
        path = tmp_path / next(iter(failed))
        path.mkdir()
        start = replayed_start(path)
        queue = QueueSnapshot(pending=(PromptMeta("old_x", 2, 1),), admitted=14, taken=13, **failed)
        start.save(8, queue)
        start.die()
        third = Start(config(path), step=8, snapshot=queue)
        assert sorted(third.replayed) == ["old_y_0", "old_y_1"]
        third.die()


def test_a_folder_that_is_replayed_goes_when_a_checkpoint_has_found_all_of_it_claimed(tmp_path: Path) -> None:
    start = replayed_start(tmp_path)
    start.save(8, QueueSnapshot(pending=(PromptMeta("old_x", 2, 1),), admitted=14, taken=13))
    assert start.replayed
    admit(start, "y", "z")
    start.save(12, QueueSnapshot(admitted=16, taken=16))
    # Workers and trainer keep no place in a folder that is to go.
    assert (start.replayed, start.log._plan.places, start.log._plan.names) == ({}, {}, {})
    start.save(16, QueueSnapshot(admitted=16, taken=16))
    start.die()
    assert folders(tmp_path) == {"after_step_16"}


def test_the_last_checkpoint_of_a_run_asks_no_worker(tmp_path: Path) -> None:
    start = replayed_start(tmp_path)
    admit(start, "y", "z")
    start.log.before_save(8)
    start.log.carry(8, QueueSnapshot(admitted=16, taken=16))
    start.log.after_save(8)
    assert start.replayed
    start.log.forget_claimed()  # only in a step that goes on
    assert start.replayed == {}
    start.die()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_logged_response_that_was_damaged_is_not_copied_and_costs_the_others_nothing(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    start = replayed_start(tmp_path)
    place = start.replayed["old_x_0"]
    path = Path(place.path)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[place.offset + place.num_bytes // 2] ^= 1
        path.write_bytes(content)
    else:
        (tmp_path / "cut").write_bytes(content[place.offset :][: place.num_bytes - 1])
        lost = str(tmp_path / "cut") if damage == "cut" else "gone"
        start.log._plan.places["old_x_0"] = replace(place, path=lost, offset=0)
    queue = QueueSnapshot(pending=(PromptMeta("old_x", 2, 1),), admitted=14, taken=13)
    start.save(8, queue)
    assert "1 logged responses are generated again if the run dies before they are in a batch" in caplog.text
    start.die()
    third = Start(config(tmp_path), step=8, snapshot=queue)
    assert sorted(third.replayed) == ["old_x_1", "old_y_0", "old_y_1"]
    admit(third, "y", "z")
    third.save(12, QueueSnapshot(pending=(PromptMeta("old_x", 2, 1),), admitted=16, taken=15))  # a copy of the copy
    third.die()
    fourth = Start(config(tmp_path), step=12, snapshot=queue)
    assert sorted(fourth.replayed) == ["old_x_1"]
    fourth.die()


def test_another_prompt_after_a_checkpoint_leaves_what_that_checkpoint_has(tmp_path: Path) -> None:
    start = replayed_start(tmp_path)
    queue = QueueSnapshot(pending=(PromptMeta("old_x", 2, 1),), admitted=14, taken=13)
    start.save(8, queue)
    start.train(9, "b")
    assert admit(start, "another") == ["new_another"]
    assert (start.replayed, start.goes_on) == ({}, {})
    start.train(10, "c")
    start.die()
    third = Start(config(tmp_path), step=8, snapshot=replace(queue, pending=(*queue.pending, PromptMeta("b", 2, 1))))
    assert third.log.wanted(9) == ("b",)
    third.die()


def test_logged_responses_that_cannot_be_copied_cost_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = replayed_start(tmp_path)
    for path in (tmp_path / "checkpoints" / rollout_log.FOLDER / "after_step_4").iterdir():
        path.unlink()
    start.save(8, QueueSnapshot(pending=(PromptMeta("old_x", 2, 1),), admitted=14, taken=13))
    assert "5 logged responses are generated again if the run dies" in caplog.text
    start.die()


@pytest.mark.parametrize("is_replaying", [True, False])
def test_no_checkpoint_is_saved_by_time_within_a_replay(is_replaying: bool) -> None:
    trainer = bare_trainer(global_steps=5, total_training_steps=9)
    looked: list[str] = []
    trainer._cadence = SimpleNamespace(is_due=lambda step, is_last: True, put_off=lambda: looked.append("put off"))
    trainer._checkpoints = SimpleNamespace(lack_of_room=lambda: "no room")
    trainer._log = SimpleNamespace(is_replaying=is_replaying)
    trainer._save_by_time()
    assert looked == ([] if is_replaying else ["put off"])


def test_the_tokens_of_the_log_are_restored_in_place_of_the_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that were dropped while the checkpoint was written are asked for in neither."""
    saved = {"a_0": "older", "b_0": "only", "c_0": "nobody's"}
    monkeypatch.setattr(trainer_module, "load_queue", lambda *_: "abc")
    monkeypatch.setattr(trainer_module, "restore_queue", lambda *_: ("ab", 2))
    monkeypatch.setattr(
        trainer_module, "load_tokens", lambda queue, *_: {key: saved[key] for key in saved if key[0] in queue}
    )
    restored: list[dict[str, str]] = []
    trainer = bare_trainer(global_steps=5, config=None, manager=None, _ask=None)
    trainer.agent_loop_manager = SimpleNamespace(restore_tokens=restored.append)
    told: list[str] = []

    def begin(step: int, snapshot: str, saved: dict[str, str]) -> dict[str, str]:
        told.append(snapshot)
        return {"a_0": "newer"}

    trainer._log = SimpleNamespace(begin=begin)
    assert trainer._reissue_inflight_prompts() == 2
    assert (restored, told) == ([{"a_0": "newer", "b_0": "only"}], ["ab"])


@pytest.mark.parametrize(("step", "is_replaying", "saves"), [(5, True, False), (5, False, True), (9, True, True)])
def test_nothing_is_saved_within_a_replay_before_the_last_step(step: int, is_replaying: bool, saves: bool) -> None:
    class Saves(Exception):
        """The checkpoint begins."""

    def save(_: int) -> None:
        raise Saves

    trainer = bare_trainer(global_steps=step, total_training_steps=9)
    trainer._phase = SimpleNamespace(begin=lambda *_: None)
    trainer._checkpoints = SimpleNamespace(before_save=save)
    trainer._log = SimpleNamespace(is_replaying=is_replaying)
    with pytest.raises(Saves) if saves else nullcontext():
        trainer._save_checkpoint()


def test_a_run_that_ends_within_a_replay_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    trainer = bare_trainer(global_steps=6, total_training_steps=9)
    trainer._phase = SimpleNamespace(begin=lambda *_: None)
    trainer.watch = SimpleNamespace(has_lost=lambda *_: False)
    trainer._last_checkpoint = SimpleNamespace(is_due=True)  # `save` would be missed
    trainer._log = SimpleNamespace(is_replaying=True)
    with caplog.at_level(logging.INFO):
        trainer._save_last_checkpoint()
    assert "the run ends in a replay" in caplog.text


def test_a_checkpoint_that_is_not_whole_leaves_the_log_of_the_one_before(tmp_path: Path) -> None:
    start = Start(config(tmp_path))
    admit(start, "p", fresh="old")
    start.train(5, "old_p")
    start.log.before_save(5)
    start.die()
    again = Start(config(tmp_path))
    assert again.log.wanted(5) == ("old_p",)
    again.die()


def test_a_run_that_has_ended_leaves_no_log(tmp_path: Path) -> None:
    start = Start(config(tmp_path))
    start.train(5, "a")
    start.worker.close(LONG_S)  # its thread may not have opened its file yet, which would make the folder again
    start.log.end(is_complete=True, timeout_s=LONG_S)
    assert not (tmp_path / "checkpoints" / rollout_log.FOLDER).exists()


def test_files_that_cannot_be_read_cost_what_they_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first_start(tmp_path)
    folder = tmp_path / "checkpoints" / rollout_log.FOLDER / f"after_step_{STEP}"
    worker = folder / "0001-agent_loop_worker_0.log"
    content = bytearray(worker.read_bytes())
    content[len(content) * 7 // 10] ^= 1  # in the last trajectory, of step 6
    worker.write_bytes(content)
    (folder / "0001-agent_loop_worker_1.log").write_bytes(b"noise that is no frame at all, long enough for a header")
    (folder / "0002-trainer.log").write_bytes(b"")
    start = Start(config(tmp_path), snapshot=snapshot("kept"))
    assert [step for step, _ in start.log._waiting] == [5]
    assert f"{worker} is damaged" in caplog.text
    assert start.log._number == 3
    start.die()


def test_a_disk_without_room_is_warned_of_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollout_log.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    made = config(tmp_path, **{"data.train_batch_size": 256, "data.max_response_length": 32_760})
    Start(made).die()
    assert "20 steps have up to 5.3 GiB, 1.0 GiB are free" in caplog.text


def test_a_folder_that_cannot_be_made_costs_the_log_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    start = Start(config(tmp_path))
    assert start.train(5, "a") == 0
    start.log.before_save(5)
    start.log.after_save(5)
    start.die()
    assert "the run goes on without it" in caplog.text


def test_a_disk_that_does_not_answer_costs_the_replay_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first_start(tmp_path)
    goes_on = threading.Event()

    def stands_still(*_: Any) -> Any:
        goes_on.wait(LONG_S)

    monkeypatch.setattr(rollout_log, "read_history", stands_still)
    monkeypatch.setattr(rollout_log, "READ_TIMEOUT_S", 0.01)
    start = Start(config(tmp_path), snapshot=snapshot("kept"))
    goes_on.set()
    assert (start.log.wanted(5), start.replayed) == ((), {})
    assert "there is no log of rollouts, the run goes on without it" in caplog.text
    assert start.train(5, "a") == 0
    start.die()


@pytest.mark.parametrize(
    ("settings", "more", "logs"),
    [
        ({}, {}, True),
        ({"rollout_log": False}, {}, False),
        ({}, {"trainer.save_freq": -1}, False),
        ({"save_minutes": 20.0}, {"trainer.save_freq": -1}, True),
        ({"tail": {"policy": "reorder"}}, {}, False),
        ({}, {"distillation.enabled": True}, False),
        ({}, {"actor_rollout_ref.rollout.enable_rollout_routing_replay": True}, False),
    ],
)
def test_where_there_is_a_log(tmp_path: Path, settings: dict[str, Any], more: dict[str, Any], logs: bool) -> None:
    assert logs_rollouts(config(tmp_path, **more), PartialRolloutConfig.from_mapping(settings)) == logs
