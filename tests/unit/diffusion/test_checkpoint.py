"""A checkpoint of an image job is whole or is not gone on from, and fits the run that goes on."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.diffusion.checkpoint import FOLDER, Checkpoints
from partial_rollout.diffusion.config import DiffusionConfig
from partial_rollout.errors import ConfigError, DataError
from tests.unit.diffusion.fake_actor import FakeActor

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = ["a", "b"]
NOT_LATE = threading.Event()


def checkpoints(folder: Path, *, prompts: list[str] = PROMPTS, **blocks: dict[str, Any]) -> Checkpoints:
    given: dict[str, dict[str, Any]] = {
        "model": {"path": "m", "lora_rank": 4},
        "data": {"prompts": "p"},
        "trainer": {"output_dir": str(folder), "reward": "a.b", "train_batch_size": 2},
    }
    for name, block in blocks.items():
        given[name] = given.get(name, {}) | block
    return Checkpoints(DiffusionConfig.from_mapping(given), prompts)


def mapping(step: int) -> dict[str, Any]:
    return {"step": step, "next_group": 2 * step + 1, "untrained": [2 * step]}


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / FOLDER).glob("global_step_*"))


def test_a_run_goes_on_from_the_newest_and_older_ones_are_removed(tmp_path: Path):
    first, actor = checkpoints(tmp_path), FakeActor()
    assert (first.found, first.books.version) == (None, 0)
    for step in (1, 2, 3):
        actor.num_updates = step
        assert first.save(mapping(step), actor, NOT_LATE) > 0
    assert saved(tmp_path) == ["global_step_3"]
    again, loaded = checkpoints(tmp_path), FakeActor()
    again.restore(loaded)
    assert (again.books.as_mapping(), loaded.num_updates) == (mapping(3), 3)


def test_more_stay_if_the_user_says_so(tmp_path: Path):
    run = checkpoints(tmp_path, trainer={"max_actor_ckpt_to_keep": 2})
    for step in (1, 2, 3):
        run.save(mapping(step), FakeActor(), NOT_LATE)
    assert saved(tmp_path) == ["global_step_2", "global_step_3"]


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "no space left"), DataError("cannot be read")])
def test_one_that_is_not_whole_is_not_gone_on_from(tmp_path: Path, failure: Exception):
    """The disk is full while it is written, or it is not read back as it was: the one before it stays."""
    run, actor = checkpoints(tmp_path), FakeActor()
    run.save(mapping(1), actor, NOT_LATE)
    actor.failure = failure
    with pytest.raises(DataError, match="no space left.*is the disk full|cannot be read"):
        run.save(mapping(2), actor, NOT_LATE)
    assert checkpoints(tmp_path).books.as_mapping() == mapping(1)
    actor.failure = None
    run.save(mapping(2), actor, NOT_LATE)
    assert checkpoints(tmp_path).books.as_mapping() == mapping(2)
    assert saved(tmp_path) == ["global_step_2"]


def test_one_that_lost_a_file_is_not_gone_on_from(tmp_path: Path):
    run = checkpoints(tmp_path, trainer={"max_actor_ckpt_to_keep": 2})
    for step in (1, 2):
        run.save(mapping(step), FakeActor(), NOT_LATE)
    (tmp_path / FOLDER / "global_step_2" / "actor" / "weights").unlink()
    assert checkpoints(tmp_path).books.version == 1
    (tmp_path / FOLDER / "global_step_1" / "job.json").unlink()
    with pytest.raises(DataError, match=r"no checkpoint in .* is whole: .*trainer\.output_dir"):
        checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("key", "blocks"),
    [
        ("model.lora_rank", {"model": {"lora_rank": 8}}),
        ("trainer.train_batch_size", {"trainer": {"train_batch_size": 4}}),
        ("trainer.seed", {"trainer": {"seed": 1}}),
        ("rollout.n", {"rollout": {"n": 4}}),
        ("algorithm.name", {"algorithm": {"name": "mix_grpo"}}),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(tmp_path: Path, key: str, blocks: dict[str, dict[str, Any]]):
    checkpoints(tmp_path).save(mapping(1), FakeActor(), NOT_LATE)
    with pytest.raises(ConfigError, match=rf"^{key}=.* is not allowed: .*global_step_1 was made with .*resume_mode"):
        checkpoints(tmp_path, **blocks)


def test_a_window_that_moves_otherwise_is_refused(tmp_path: Path):
    moving = {"name": "mix_grpo", "sde_window_interval": 25}
    checkpoints(tmp_path, algorithm=moving).save(mapping(1), FakeActor(), NOT_LATE)
    assert checkpoints(tmp_path, algorithm=moving).found is not None
    with pytest.raises(ConfigError, match=r"^algorithm.sde_window_interval=5 is not allowed: .*made with 25"):
        checkpoints(tmp_path, algorithm=moving | {"sde_window_interval": 5})


def test_other_prompts_are_refused(tmp_path: Path):
    checkpoints(tmp_path).save(mapping(1), FakeActor(), NOT_LATE)
    with pytest.raises(ConfigError, match=r"data.prompts='3 prompts, .*made with '2 prompts"):
        checkpoints(tmp_path, prompts=["a", "b", "c"])


def test_settings_of_speed_may_change(tmp_path: Path):
    checkpoints(tmp_path).save(mapping(1), FakeActor(), NOT_LATE)
    blocks = {"rollout": {"num_servers": 3}, "actor": {"lr": 1e-5}, "trainer": {"total_training_steps": 7}}
    assert checkpoints(tmp_path, **blocks).books.version == 1


def test_a_fresh_beginning_removes_no_checkpoint_of_the_run_that_was_left(tmp_path: Path):
    old = checkpoints(tmp_path)
    old.save(mapping(8), FakeActor(), NOT_LATE)
    fresh = checkpoints(tmp_path, trainer={"resume_mode": "disable"})
    assert fresh.found is None
    for step in (1, 2):
        fresh.save(mapping(step), FakeActor(), NOT_LATE)
    assert saved(tmp_path) == ["global_step_2", "global_step_8"]
    assert checkpoints(tmp_path).books.version == 2


def test_a_late_checkpoint_is_dropped(tmp_path: Path):
    """The model may have changed while it was written."""
    run, late = checkpoints(tmp_path), threading.Event()
    run.save(mapping(1), FakeActor(), NOT_LATE)
    late.set()
    with pytest.raises(DataError, match="step 2 is late and is dropped"):
        run.save(mapping(2), FakeActor(), late)
    assert checkpoints(tmp_path).books.version == 1
