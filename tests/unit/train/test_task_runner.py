"""Before anything is made, the task runner asks whose the Ray cluster is, and what is free and installed on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

from partial_rollout.rollout import replica
from partial_rollout.train import task_runner
from partial_rollout.train.task_runner import TaskRunner

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = OmegaConf.create(
    {"partial_rollout": {"timeouts": {"resources_s": 7.0}}, "trainer": {"default_local_dir": "checkpoints"}}
)


def test_another_run_on_the_cluster_is_looked_for_before_and_after_the_wait_for_resources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(task_runner, "configure_logging", lambda: None)
    monkeypatch.setattr(task_runner, "require_own_transfer_queue", lambda timeout_s: asked.append(timeout_s))
    monkeypatch.setattr(task_runner, "require_resources", lambda config, timeout_s: asked.append("resources"))
    monkeypatch.setattr(task_runner, "require_equal_nodes", lambda folders, timeout_s: asked.append("nodes") or set())

    def nothing_more(**options: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(replica, "register_replicas", nothing_more)
    runner_class = getattr(TaskRunner, "__ray_actor_class__", TaskRunner)
    with pytest.raises(InterruptedError):
        runner_class.run(object.__new__(runner_class), CONFIG)
    assert asked == [7.0, "resources", 0.0, "nodes"]


@pytest.mark.parametrize(
    ("unseen", "save_freq", "minutes"), [("checkpoints", -1, None), ("checkpoints", 5, 20), ("events", -1, 20)]
)
def test_nothing_is_saved_by_time_where_no_node_would_have_a_whole_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unseen: str, save_freq: int, minutes: int | None
) -> None:
    def nothing_more(**options: Any) -> None:
        raise InterruptedError

    for name in ("configure_logging", "require_own_transfer_queue", "require_resources"):
        monkeypatch.setattr(task_runner, name, lambda *_: None)
    monkeypatch.setattr(task_runner, "require_equal_nodes", lambda folders, timeout_s: {folders[unseen]})
    monkeypatch.setattr(replica, "register_replicas", nothing_more)
    block = {"save_minutes": 20, "events": str(tmp_path / "events")}
    config = OmegaConf.create(
        {"partial_rollout": block, "trainer": {"default_local_dir": str(tmp_path / "saved"), "save_freq": save_freq}}
    )
    runner_class = getattr(TaskRunner, "__ray_actor_class__", TaskRunner)
    with pytest.raises(InterruptedError):
        runner_class.run(object.__new__(runner_class), config)
    assert config.partial_rollout.save_minutes == minutes
