"""Whole checkpoints are found, torn ones are not gone on from, and only what is older than whole ones is removed."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from partial_rollout.errors import DataError
from partial_rollout.train import checkpoints
from partial_rollout.train.checkpoints import (
    MANIFEST,
    PARTS_WITH_QUEUE,
    TRACKER,
    CheckpointKeeper,
    choose_checkpoint,
    mark_whole,
    missing_parts,
    prune,
    require_whole,
)

if TYPE_CHECKING:
    from pathlib import Path

FILES = (
    "actor/model.pt",
    "actor/optim_world_size_1_rank_0.pt",
    "data.pt",
    "transfer_queue/state.pkl",
    "partial_rollout/queue.json",
)


def save(root: Path, step: int, *, whole: bool = True, without: str | None = None) -> Path:
    """A checkpoint as verl and this package write it; `whole`: with its manifest."""
    folder = root / f"global_step_{step}"
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} of step {step}")
    if without is not None:
        target = folder / without
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    if whole:
        mark_whole(folder)
    return folder


def track(root: Path, text: str) -> None:
    (root / TRACKER).write_text(text)


def tracked(root: Path) -> str:
    return (root / TRACKER).read_text()


def test_a_marked_checkpoint_is_whole_until_one_of_its_files_changes_or_goes(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    assert missing_parts(folder) == []
    (folder / "data.pt").write_text("cut")
    (folder / "actor/model.pt").unlink()
    assert missing_parts(folder) == ["actor/model.pt", "data.pt"]


@pytest.mark.parametrize("part", ["actor", "data.pt", "transfer_queue"])
def test_a_checkpoint_with_a_part_missing_is_not_marked(tmp_path: Path, part: str) -> None:
    with pytest.raises(DataError, match=part):
        save(tmp_path, 1, without=part)
    assert not (tmp_path / "global_step_1" / MANIFEST).exists()


def test_an_empty_part_is_a_missing_one(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, whole=False)
    (folder / "data.pt").write_text("")
    with pytest.raises(DataError, match=r"data\.pt is missing or empty"):
        mark_whole(folder)


def test_a_full_disk_while_the_manifest_is_written_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, 1, whole=False)

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        mark_whole(folder)
    assert not (folder / MANIFEST).exists()


def test_every_file_is_on_the_disk_before_the_manifest_vouches_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, 1, whole=False)
    written: list[tuple[int, bool]] = []
    sizes: dict[int, int] = {}
    real = os.fsync

    def fsync(number: int) -> None:
        found = os.fstat(number)
        written.append((found.st_ino, (folder / MANIFEST).exists()))
        sizes[found.st_ino] = found.st_size
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    mark_whole(folder)
    before = {inode for inode, has_manifest in written if not has_manifest}
    needed = [
        folder.parent,
        folder,
        folder / MANIFEST,
        *(folder / name for name in FILES),
        *(folder / name for name in PARTS_WITH_QUEUE),
    ]
    assert [path.name for path in needed if path.stat().st_ino not in before] == []
    assert ((folder / MANIFEST).parent.stat().st_ino, True) in written
    manifest = (folder / MANIFEST).stat()
    assert sizes[manifest.st_ino] == manifest.st_size


def test_a_manifest_whose_writing_was_cut_off_is_no_part_of_the_next_one(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, whole=False)
    (folder / f"{MANIFEST}.tmp").write_bytes(b"cut o")
    mark_whole(folder)
    assert missing_parts(folder) == []


def test_a_removed_file_that_nfs_keeps_is_not_missed_when_it_goes(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, whole=False)
    kept = folder / "actor/.nfs00000000016c2a9f00000003"
    kept.write_text("removed, and still open in another program")
    mark_whole(folder)
    assert missing_parts(folder) == []
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["bytes"]["actor/" + kept.name] = kept.stat().st_size  # as before such files were left out
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert missing_parts(folder) == []
    kept.unlink()
    assert missing_parts(folder) == []


def test_a_part_of_which_nfs_keeps_only_a_removed_file_is_missing(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, whole=False)
    shutil.rmtree(folder / "actor")
    (folder / "actor").mkdir()
    (folder / "actor/.nfs00000000016c2a9f00000003").write_text("removed")
    with pytest.raises(DataError, match="actor is missing or empty"):
        mark_whole(folder)


def test_a_checkpoint_of_0_1_has_no_manifest_and_is_whole_with_all_its_parts(tmp_path: Path) -> None:
    assert missing_parts(save(tmp_path, 1, whole=False)) == []
    assert missing_parts(save(tmp_path, 2, whole=False, without="transfer_queue")) == ["transfer_queue"]


def test_a_checkpoint_of_verls_sync_mode_is_whole_without_queue_and_transfer_queue(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, whole=False, without="transfer_queue")
    (folder / "partial_rollout/queue.json").unlink()
    assert missing_parts(folder) == []
    (folder / "data.pt").unlink()
    assert missing_parts(folder) == ["data.pt"]


@pytest.mark.parametrize("tracker", ["", "\x00", "seven", "3", "9", None])
def test_the_next_run_goes_on_from_the_newest_whole_checkpoint(
    tmp_path: Path, tracker: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a full disk or a killed run left in the tracker: nothing, a torn checkpoint, one without a folder."""
    caplog.set_level(logging.WARNING)  # a library may have raised the root logger's
    save(tmp_path, 1)
    save(tmp_path, 2)
    save(tmp_path, 3, whole=False, without="actor")
    if tracker is not None:
        track(tmp_path, tracker)
    assert choose_checkpoint(tmp_path) == 2
    assert tracked(tmp_path) == "2"
    assert len(caplog.records) == 1


def test_a_tracker_that_names_a_whole_checkpoint_is_the_users_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    track(tmp_path, "1\n")
    assert choose_checkpoint(tmp_path) == 1
    assert tracked(tmp_path) == "1\n"
    assert caplog.records == []


def test_without_a_checkpoint_a_run_begins_afresh(tmp_path: Path) -> None:
    assert choose_checkpoint(tmp_path / "nowhere") is None
    (tmp_path / "global_step_x").mkdir()
    assert choose_checkpoint(tmp_path) is None


def test_a_checkpoint_that_was_named_is_not_silently_passed_over_when_none_is_whole(tmp_path: Path) -> None:
    save(tmp_path, 4, whole=False, without="actor")
    track(tmp_path, "4")
    with pytest.raises(DataError, match=r"global_step_4 lacks actor"):
        choose_checkpoint(tmp_path)


@pytest.mark.parametrize("tracker", [None, ""])
def test_a_run_that_was_killed_in_its_first_save_begins_afresh(
    tmp_path: Path, tracker: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The tracker goes: verl would end on one without a number."""
    caplog.set_level(logging.WARNING)
    save(tmp_path, 4, whole=False, without="data.pt")
    if tracker is not None:
        track(tmp_path, tracker)
    assert choose_checkpoint(tmp_path) is None
    assert not (tmp_path / TRACKER).exists()
    assert "global_step_4" in caplog.text


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_user_took_out_of_a_finished_checkpoint_is_not_missed(tmp_path: Path, whole: bool) -> None:
    """verl starts without the data loader's state, and without the optimizer's if it is told to."""
    folder = save(tmp_path, 1, whole=whole)
    (folder / "data.pt").unlink()
    (folder / "actor/optim_world_size_1_rank_0.pt").unlink()
    track(tmp_path, "1")
    assert choose_checkpoint(tmp_path) == 1
    require_whole(folder)
    shutil.rmtree(folder / "transfer_queue")
    with pytest.raises(DataError, match="lacks transfer_queue"):
        require_whole(folder)


def test_a_checkpoint_chosen_by_hand_must_be_whole(tmp_path: Path) -> None:
    require_whole(save(tmp_path, 1))
    with pytest.raises(DataError, match=r"lacks transfer_queue"):
        require_whole(save(tmp_path, 2, whole=False, without="transfer_queue"))


def test_a_broken_manifest_is_not_taken_for_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    for content in ("", "[]", json.dumps({"format": 1})):
        (folder / MANIFEST).write_text(content)
        assert missing_parts(folder) == [MANIFEST]


@pytest.mark.parametrize(("keep", "left"), [(1, [4, 5]), (2, [3, 4, 5]), (3, [1, 2, 3, 4, 5]), (9, None), (None, None)])
def test_only_what_is_older_than_the_whole_ones_kept_is_removed(
    tmp_path: Path, keep: int | None, left: list[int] | None
) -> None:
    """Steps 1, 3 and 4 are whole; 2 is torn, 5 is being written."""
    for step in (1, 3, 4):
        save(tmp_path, step)
    for step in (2, 5):
        save(tmp_path, step, whole=False, without="data.pt")
    removed = prune(tmp_path, keep, among=range(1, 6))
    kept = sorted(int(path.name.removeprefix("global_step_")) for path in tmp_path.iterdir())
    assert kept == (left or [1, 2, 3, 4, 5])
    assert [path.name for path in removed] == [f"global_step_{step}" for step in range(1, 6) if step not in kept]
    assert missing_parts(tmp_path / "global_step_4") == []


def config(root: Path, *, estimator: str = "grpo", async_save: bool = False, **trainer: object) -> DictConfig:
    return OmegaConf.create({
        "algorithm": {"adv_estimator": estimator},
        "actor_rollout_ref": {"actor": {"checkpoint": {"async_save": async_save}}},
        "trainer": {"default_local_dir": str(root), "nnodes": 1, "resume_mode": "auto", **trainer},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"max_actor_ckpt_to_keep": 1}, [3]),
        ({"max_actor_ckpt_to_keep": 2}, [2, 3]),
        ({"remove_previous_ckpt_in_save": True}, [3]),
        ({"max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": 2, "estimator": "gae"}, [2, 3]),
        ({"max_actor_ckpt_to_keep": 1, "estimator": "gae"}, [1, 2, 3]),
        ({}, [1, 2, 3]),
        ({"max_actor_ckpt_to_keep": 0}, [1, 2, 3]),
        ({"max_actor_ckpt_to_keep": 1, "nnodes": 2}, [3]),
        ({"max_actor_ckpt_to_keep": 1, "async_save": True}, [1, 2, 3]),
    ],
)
def test_old_checkpoints_go_when_a_new_one_is_whole_and_verl_removes_none(
    tmp_path: Path, changes: dict, left: list[int]
) -> None:
    """Over a restart, too: a keeper knows what the run has saved before."""
    settings = config(tmp_path, **changes)
    elsewhere: list[str] = []
    keeper = CheckpointKeeper(settings, lambda folders: elsewhere.extend(folder.name for folder in folders))
    assert settings.trainer.get("max_actor_ckpt_to_keep") == (1 if "async_save" in changes else None)
    for step in (1, 2):
        save(tmp_path, step)
    keeper.before_load()
    save(tmp_path, 3, whole=False)
    keeper.after_save(3)
    assert (elsewhere, steps_in(tmp_path)) == ([], [1, 2, 3])  # first the run notes that it has saved
    keeper.remove_old()
    kept = sorted(int(path.name.removeprefix("global_step_")) for path in tmp_path.glob("global_step_*"))
    assert kept == left
    assert elsewhere == [f"global_step_{step}" for step in (1, 2, 3) if step not in left]
    assert (tmp_path / "global_step_3" / MANIFEST).exists() is not changes.get("async_save", False)


def save_async(root: Path, step: int, *, is_over: bool) -> Path:
    """A checkpoint of verl's Megatron engine with `async_save`, which may still write when verl's call has returned."""
    folder = save(root, step, whole=False)
    for name in ("model", "optimizer", "extra"):
        (folder / "actor" / name / "dist_ckpt").mkdir(parents=True)
        (folder / "actor" / name / "dist_ckpt/__0_0.distcp").write_text("perhaps half of it")
    if is_over:
        (folder / "actor/ckpt_contents.json").write_text("{}")
    return folder


@pytest.mark.parametrize("tracker", ["", "\x00"])
def test_with_async_save_too_a_tracker_without_a_number_leads_to_the_newest_whole_checkpoint(
    tmp_path: Path, tracker: str
) -> None:
    """verl ends at the next start on such a tracker, which a full disk leaves. Step 3 was still being written."""
    for step, is_over in ((1, True), (2, True), (3, False)):
        save_async(tmp_path, step, is_over=is_over)
    track(tmp_path, tracker)
    CheckpointKeeper(config(tmp_path, async_save=True)).before_load()
    assert tracked(tmp_path) == "2"


def test_with_async_save_a_run_whose_first_save_did_not_end_begins_afresh(tmp_path: Path) -> None:
    save_async(tmp_path, 1, is_over=False)
    track(tmp_path, "")
    CheckpointKeeper(config(tmp_path, async_save=True)).before_load()
    assert not (tmp_path / TRACKER).exists()


def test_with_async_save_nothing_is_chosen_before_verl_has_named_a_checkpoint(tmp_path: Path) -> None:
    """An engine that saves at once would never write the tracker again: each start would go back to this step."""
    save(tmp_path, 1, whole=False)
    CheckpointKeeper(config(tmp_path, async_save=True)).before_load()
    assert not (tmp_path / TRACKER).exists()


def test_a_checkpoint_that_verl_or_a_user_names_needs_no_manifest_of_verls_megatron_engine(tmp_path: Path) -> None:
    folder = save_async(tmp_path, 1, is_over=False)
    require_whole(folder)
    track(tmp_path, "1")
    assert choose_checkpoint(tmp_path) == 1
    assert missing_parts(folder) == ["actor/ckpt_contents.json"]


def test_a_run_is_led_to_a_whole_checkpoint_before_verl_looks_for_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    torn = save(tmp_path, 2, whole=False, without="actor")
    track(tmp_path, "")
    CheckpointKeeper(config(tmp_path, resume_mode="disable")).before_load()
    assert tracked(tmp_path) == ""
    CheckpointKeeper(config(tmp_path)).before_load()
    assert tracked(tmp_path) == "1"
    with pytest.raises(DataError, match="lacks actor"):
        CheckpointKeeper(config(tmp_path, resume_mode="resume_path", resume_from_path=str(torn))).before_load()


@pytest.mark.parametrize("mode", ["disable", "auto", "resume_path"])
def test_checkpoints_that_are_not_this_runs_stay(tmp_path: Path, mode: str) -> None:
    """Such checkpoints are of a run that this one does not go on from, or were left by going back to step 2."""
    for step in (2, 8, 9):
        save(tmp_path, step)
    track(tmp_path, "2")
    path = str(tmp_path / "global_step_2")
    keeper = CheckpointKeeper(config(tmp_path, resume_mode=mode, resume_from_path=path, max_actor_ckpt_to_keep=1))
    keeper.before_load()
    for step in (3, 4):
        save(tmp_path, step, whole=False)
        keeper.after_save(step)
        keeper.remove_old()
    left = sorted(int(path.name.removeprefix("global_step_")) for path in tmp_path.glob("global_step_*"))
    assert left == ([2, 4, 8, 9] if mode == "disable" else [4, 8, 9])


def test_a_run_that_goes_on_from_another_folder_leaves_what_it_finds_in_its_own(tmp_path: Path) -> None:
    own = tmp_path / "own"
    save(own, 2)
    path = str(save(tmp_path / "other", 9))
    settings = config(own, resume_mode="resume_path", resume_from_path=path, max_actor_ckpt_to_keep=1)
    keeper = CheckpointKeeper(settings)
    keeper.before_load()
    for step in (10, 11):
        save_by(keeper, own, step)
    assert steps_in(own) == [2, 11]


def test_a_folder_that_is_written_over_is_not_whole_until_it_is_saved(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(config(tmp_path))
    folder = save(tmp_path, 1)
    keeper.before_save(1)
    assert not (folder / MANIFEST).exists()
    keeper.before_save(2)


def test_a_folder_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def busy(folder: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(checkpoints.shutil, "rmtree", busy)
    for step in (1, 2):
        save(tmp_path, step)
    assert prune(tmp_path, 1, among={1, 2}) == []
    assert "global_step_1 could not be removed" in caplog.text


# ---- checkpoints that nobody asked for ----


def by_time(root: Path, **keys: Any) -> DictConfig:
    settings = config(root, **keys)
    OmegaConf.update(settings, "trainer.save_freq", -1, force_add=True)
    OmegaConf.update(settings, "partial_rollout.save_minutes", 20.0, force_add=True)
    OmegaConf.update(settings, "actor_rollout_ref.model.path", str(root / "nowhere"), force_add=True)
    return settings


def save_by(keeper: CheckpointKeeper, root: Path, step: int, *, whole: bool = True) -> None:
    keeper.before_save(step)
    save(root, step, whole=False)
    if whole:
        keeper.after_save(step)
        keeper.remove_old()


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in root.glob("global_step_*"))


def test_of_what_is_saved_by_time_the_newest_stays_and_what_was_asked_for_stays_too(tmp_path: Path) -> None:
    before = CheckpointKeeper(config(tmp_path))
    for step in (5, 10):  # with trainer.save_freq=5
        save_by(before, tmp_path, step)
    track(tmp_path, "10")
    keeper = CheckpointKeeper(by_time(tmp_path))
    keeper.before_load()
    for step in (11, 14):
        save_by(keeper, tmp_path, step)
    assert steps_in(tmp_path) == [5, 10, 14]


def test_a_torn_checkpoint_of_before_goes_when_a_newer_one_is_whole(tmp_path: Path) -> None:
    first = CheckpointKeeper(by_time(tmp_path))
    first.before_load()
    save_by(first, tmp_path, 3)
    track(tmp_path, "3")
    save_by(first, tmp_path, 7, whole=False)  # killed
    (tmp_path / "global_step_7/data.pt").unlink()
    again = CheckpointKeeper(by_time(tmp_path))
    again.before_load()
    save_by(again, tmp_path, 6)
    assert steps_in(tmp_path) == [6, 7]
    save_by(again, tmp_path, 9)
    assert steps_in(tmp_path) == [9]


def test_a_limit_of_the_user_holds_for_what_is_saved_by_time(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(by_time(tmp_path, max_actor_ckpt_to_keep=2))
    keeper.before_load()
    for step in (1, 2, 3):
        save_by(keeper, tmp_path, step)
    assert steps_in(tmp_path) == [2, 3]


def test_there_must_be_room_for_a_checkpoint_as_large_as_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "free_host_memory", lambda: 1 << 40)
    root = tmp_path / "not yet there"
    keeper = CheckpointKeeper(by_time(root))
    keeper.before_load()
    assert keeper.lack_of_room() == ""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _folder: usage._replace(free=20))
    assert keeper.lack_of_room() == ""  # nothing is known of the model
    save_by(keeper, root, 1)
    assert "and the disk has 0.0 GiB free" in keeper.lack_of_room()
    monkeypatch.undo()
    assert keeper.lack_of_room() == ""


def test_a_torch_file_without_its_end_is_no_part_of_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, whole=False)
    model = folder / "actor/model.pt"
    torch.save({"weight": torch.zeros(64)}, model)
    mark_whole(folder)
    content = model.read_bytes()
    model.write_bytes(content[: len(content) // 2])
    (folder / MANIFEST).unlink()
    with pytest.raises(DataError, match=r"actor/model\.pt was not saved whole"):
        mark_whole(folder)
    assert not (folder / MANIFEST).exists()
    # A checkpoint that verl has named before anybody looked is no better.
    save(tmp_path, 0)
    track(tmp_path, "1")
    assert missing_parts(folder, was_finished=True) == ["actor/model.pt"]
    assert choose_checkpoint(tmp_path) == 0


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"PK\x03\x04"])
def test_a_torch_file_that_was_emptied_is_torn_and_what_is_no_file_is_none(tmp_path: Path, content: bytes) -> None:
    folder = save(tmp_path, 1, whole=False)
    (folder / "actor/gone.pt").symlink_to(tmp_path / "gone")
    (folder / "actor/folder.pt").mkdir()
    assert missing_parts(folder) == []
    (folder / "actor/model_world_size_2_rank_1.pt").write_bytes(content)
    assert missing_parts(folder) == ["actor/model_world_size_2_rank_1.pt"]
    with pytest.raises(DataError, match="rank_1"):
        mark_whole(folder)
