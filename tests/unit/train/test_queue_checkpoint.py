"""Restoring the prompt queue against a TransferQueue that was saved a moment later, or by another trainer."""

from __future__ import annotations

import dataclasses
import logging
import threading
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from fake_transfer_queue import FakeTransferQueue
from omegaconf import DictConfig, OmegaConf

from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.tail import Partial
from partial_rollout.core.resume import GenerationState
from partial_rollout.errors import ConfigError, DataError, WaitTimeout
from partial_rollout.train import queue_checkpoint
from partial_rollout.train.queue_checkpoint import (
    DROPPED_AFTER_SNAPSHOT,
    forget_validation,
    load_queue,
    load_tokens,
    restore_queue,
    save_queue,
    save_tokens,
)
from partial_rollout.types import PromptMeta, QueueSnapshot, QueueStatistics, TrajectorySummary, VersionSpan

if TYPE_CHECKING:
    from pathlib import Path

GROUP = 2
STEP = 5
PROMPT = {"is_prompt": True, "status": "running", "global_steps": 4}


class Manager:
    """The part of the manager's handle that a restore calls."""

    def __init__(self) -> None:
        self.restore = self
        self.queue: PromptQueue | None = None

    def remote(self, snapshot: QueueSnapshot) -> QueueStatistics:
        self.queue = PromptQueue.restore(snapshot, Partial(16), 2, lambda: 0.0)
        return self.queue.statistics()

    def statistics(self) -> QueueStatistics:
        if self.queue is None:
            raise LookupError("nothing was restored")
        return self.queue.statistics()


def restore(snapshot: QueueSnapshot, manager: Manager) -> int:
    kept, num_prompts = restore_queue(snapshot, lambda ref: cast("Any", ref), cast("Any", manager), "train")
    assert num_prompts == len(kept.unfinished) + len(kept.done)
    return num_prompts


def rows(*uids: str) -> dict[str, dict[str, Any]]:
    return {uid: dict(PROMPT) for uid in uids}


def trajectories(uid: str, n: int = GROUP) -> dict[str, dict[str, Any]]:
    return {f"{uid}_{session}_0": {"status": "success"} for session in range(n)}


def saved_queue(n: int = GROUP) -> QueueSnapshot:
    """`done` is done, `ongoing` is ongoing, `pending` is pending, `trained` was taken."""
    queue = PromptQueue(Partial(16), 2, lambda: 0.0)
    queue.admit([PromptMeta(uid, n, global_step=4) for uid in ("trained", "done", "ongoing", "pending")])
    for claim in queue.claim("w0", 3 * n)[:2]:
        queue.finish(claim, [TrajectorySummary(key, 3, 5, 0, 0) for key in trajectories(claim.uid, n)])
    queue.take(1)
    return queue.snapshot()


def config(folder: Path, n: int = GROUP) -> DictConfig:
    return OmegaConf.create({
        "trainer": {"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None},
        "actor_rollout_ref": {"rollout": {"n": n}},
    })  # fmt: skip


@pytest.fixture
def tq(monkeypatch: pytest.MonkeyPatch) -> FakeTransferQueue:
    """What belongs to `saved_queue`."""
    fake = FakeTransferQueue(train=rows("done", "ongoing", "pending") | trajectories("done"))
    monkeypatch.setattr(queue_checkpoint, "tq", fake)
    return fake


def test_a_saved_queue_is_loaded_as_it_was(tmp_path: Path, tq: FakeTransferQueue) -> None:
    save_queue(saved_queue(), config(tmp_path), STEP)
    assert load_queue(config(tmp_path), STEP) == saved_queue()
    assert load_queue(config(tmp_path), 0) is None


def test_only_a_run_that_was_given_a_folder_reads_the_queue_from_there(tmp_path: Path, tq: FakeTransferQueue) -> None:
    save_queue(saved_queue(), config(tmp_path / "before"), STEP)
    settings = config(tmp_path / "now")
    settings.trainer.resume_from_path = str(tmp_path / f"before/global_step_{STEP}")
    assert load_queue(settings, STEP) != saved_queue()
    settings.trainer.resume_mode = "resume_path"
    assert load_queue(settings, STEP) == saved_queue()


def test_a_checkpoint_that_fits_is_restored_without_clearing(tq: FakeTransferQueue) -> None:
    manager = Manager()
    assert restore(saved_queue(), manager) == 3
    assert tq.cleared == []
    assert manager.statistics().conserved


def test_orphaned_trajectories_are_cleared(tq: FakeTransferQueue) -> None:
    """Orphans are those of the trained batch, and siblings that had finished when their group was interrupted."""
    orphans = trajectories("trained") | trajectories("ongoing", 1)
    tq.partitions["train"] |= orphans
    restore(saved_queue(), Manager())
    assert tq.cleared == [("train", sorted(orphans))]
    assert set(tq.partitions["train"]) == saved_queue().owned_keys()


@pytest.mark.parametrize(("uid", "state"), [("pending", "pending"), ("ongoing", "ongoing"), ("ongoing", "deferred")])
def test_a_prompt_whose_row_is_gone_is_dropped_and_counted(
    uid: str, state: str, tq: FakeTransferQueue, caplog: pytest.LogCaptureFixture
) -> None:
    del tq.partitions["train"][uid]
    manager, saved = Manager(), saved_queue()
    if state == "deferred":
        saved = dataclasses.replace(saved, ongoing=(), deferred=saved.ongoing, deferrals={uid: 1})
    with caplog.at_level(logging.WARNING):
        assert restore(saved, manager) == 2
    now = manager.statistics()
    assert (now.admitted, now.dropped, now.pending, now.done) == (4, {DROPPED_AFTER_SNAPSHOT: 1}, 1, 1)
    assert f"['{uid}']" in caplog.text


def test_rows_of_a_validation_that_was_left_are_cleared(tq: FakeTransferQueue) -> None:
    forget_validation()
    assert tq.cleared == []
    tq.partitions["val"] = rows("asked") | trajectories("asked")
    forget_validation()
    assert tq.partitions["val"] == {}
    assert set(tq.partitions["train"]) == saved_queue().owned_keys()


def test_siblings_of_a_prompt_whose_row_is_gone_are_cleared(tq: FakeTransferQueue) -> None:
    del tq.partitions["train"]["ongoing"]
    tq.partitions["train"] |= trajectories("ongoing", 1)
    restore(saved_queue(), Manager())
    assert tq.cleared == [("train", ["ongoing_0_0"])]


@pytest.mark.parametrize("key", ["done", "done_1_0"])
def test_a_missing_key_of_a_done_group_is_an_error_and_nothing_is_restored(key: str, tq: FakeTransferQueue) -> None:
    del tq.partitions["train"][key]
    manager = Manager()
    with pytest.raises(DataError, match=rf"lacks 1 rows of finished prompts.*{key}; resume from"):
        restore(saved_queue(), manager)
    assert manager.queue is None
    assert tq.cleared == []


def test_prompts_of_another_modes_checkpoint_are_adopted(tmp_path: Path, tq: FakeTransferQueue) -> None:
    snapshot = load_queue(config(tmp_path, n=3), STEP)
    assert snapshot is not None
    manager = Manager()
    assert restore(snapshot, manager) == 3
    assert tq.cleared == [("train", ["done_0_0", "done_1_0"])]
    claims = manager.queue.claim("w0", 9) if manager.queue else []
    assert [(claim.uid, claim.num_trajectories, claim.global_step) for claim in claims] == [
        ("done", 3, 4), ("ongoing", 3, 4), ("pending", 3, 4)
    ]  # fmt: skip


@pytest.mark.parametrize("partitions", [{}, {"train": {}}, {"train": trajectories("trained")}])
def test_a_checkpoint_without_prompts_gives_no_queue(
    tmp_path: Path, partitions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_checkpoint, "tq", FakeTransferQueue(**partitions))
    assert load_queue(config(tmp_path), STEP) is None


@pytest.mark.parametrize("state", ["pending", "ongoing", "done"])
def test_groups_of_another_size_are_refused(tmp_path: Path, tq: FakeTransferQueue, state: str) -> None:
    whole = saved_queue()
    only = QueueSnapshot(**{state: getattr(whole, state)}, admitted=1)
    save_queue(only, config(tmp_path), STEP)
    assert load_queue(config(tmp_path), STEP) == only
    with pytest.raises(ConfigError, match=r"rollout\.n=8 is not allowed here.*groups of 2"):
        load_queue(config(tmp_path, n=8), STEP)


def test_a_prompt_with_more_outputs_than_samples_has_its_own_size(tmp_path: Path, tq: FakeTransferQueue) -> None:
    """An agent loop may return several trajectories for one sample: `{uid}_{session}_{index}`."""
    queue = PromptQueue(Partial(16), 2, lambda: 0.0)
    queue.admit([PromptMeta("a", GROUP, global_step=4)])
    keys = ("a_0_0", "a_0_1", "a_1_0")
    queue.finish(queue.claim("w0", GROUP)[0], [TrajectorySummary(key, 3, 5, 0, 0) for key in keys])
    save_queue(queue.snapshot(), config(tmp_path), STEP)
    assert load_queue(config(tmp_path), STEP) == queue.snapshot()


STATE = GenerationState([1], [5, 6], [-0.5, -1.0], [VersionSpan(3, 2)], None, 1, 3)


def test_tokens_of_unfinished_prompts_are_loaded_as_they_were(tmp_path: Path) -> None:
    """A group that was done a moment later is in the queue with its trajectories; its tokens are not needed."""
    assert load_tokens(saved_queue(), config(tmp_path), STEP) == {}
    save_tokens({"ongoing_0": [STATE], "ongoing_1": [], "done_0": [STATE]}, config(tmp_path), STEP)
    assert load_tokens(saved_queue(), config(tmp_path), STEP) == {"ongoing_0": [STATE], "ongoing_1": []}


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    state = GenerationState([np.int64(1)], [np.int64(5)], [np.float32(-0.5)], [], None, 0, 0)
    save_tokens({"ongoing_0": [state]}, config(tmp_path), STEP)
    assert load_tokens(saved_queue(), config(tmp_path), STEP) == {"ongoing_0": [state]}


def test_what_is_no_number_is_not_saved_as_a_token(tmp_path: Path) -> None:
    state = GenerationState([1], [cast("Any", object())], [-0.5], [], None, 0, 0)
    with pytest.raises(NotImplementedError, match="object, which cannot be saved"):
        save_tokens({"ongoing_0": [state]}, config(tmp_path), STEP)


def test_unreadable_tokens_are_told_with_their_path(tmp_path: Path) -> None:
    save_tokens({"ongoing_0": [STATE]}, config(tmp_path), STEP)
    path = queue_checkpoint.queue_path(config(tmp_path), STEP, queue_checkpoint.TOKENS_FILE)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=f"{path} is unreadable .*truncated.*; delete it .*, or resume from"):
        load_tokens(saved_queue(), config(tmp_path), STEP)


def test_an_unreadable_queue_is_told_with_its_path(tmp_path: Path, tq: FakeTransferQueue) -> None:
    save_queue(saved_queue(), config(tmp_path), STEP)
    path = queue_checkpoint.queue_path(config(tmp_path), STEP)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=f"{path} is unreadable"):
        load_queue(config(tmp_path), STEP)


def test_a_dead_transfer_queue_is_told(tq: FakeTransferQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_checkpoint, "RESTORE_TIMEOUT_S", 0.01)
    never = threading.Event()
    monkeypatch.setattr(tq, "kv_list", lambda partition_id: never.wait())
    with pytest.raises(WaitTimeout, match="trainer waits for TransferQueue to list its rows"):
        restore(saved_queue(), Manager())
    never.set()


def test_a_checkpoint_without_transfer_queues_folder_is_refused_with_the_true_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the error, the checkpoint's prompts would be dropped as if that had happened while it was written."""
    monkeypatch.setattr(queue_checkpoint, "tq", FakeTransferQueue())
    with pytest.raises(DataError, match=r"2 unfinished prompts.* transfer_queue is missing or empty"):
        restore(saved_queue(), Manager())


def test_a_queue_in_which_nothing_is_left_needs_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_checkpoint, "tq", FakeTransferQueue())
    assert restore(QueueSnapshot(admitted=1, taken=1), Manager()) == 0
