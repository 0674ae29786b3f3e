"""What only the cluster knows is decided there, and reaches the servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from omegaconf import OmegaConf

from partial_rollout.settings.auto import MODE_KEY, SLOTS_KEY
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.settings.memory import GIB, Machine
from partial_rollout.train import start_choices
from partial_rollout.train.start_choices import choose_on_cluster, container_free

if TYPE_CHECKING:
    from pathlib import Path

    from omegaconf import DictConfig


def configuration(tail: dict | None = None) -> DictConfig:
    """Of a GPU job whose engines release their memory; its model is on no disk."""
    block = PartialRolloutConfig.from_mapping({"tail": tail or {}}).to_mapping()
    rollout = {"free_cache_engine": True, "n": 4, "agent": {"num_workers": 1}, "custom": {"partial_rollout": block}}
    return OmegaConf.create(
        {
            "partial_rollout": block,
            "actor_rollout_ref": {"rollout": rollout, "model": {"path": "no/model"}},
            "data": {"train_batch_size": 8},
            "trainer": {"device": "cuda"},
        }
    )


def told(config: DictConfig) -> PartialRolloutConfig:
    return PartialRolloutConfig.from_rollout(config.actor_rollout_ref.rollout.custom)


def test_what_the_driver_left_open_is_decided_and_told_to_servers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start_choices, "look_at_nodes", lambda: Machine(host_bytes=512 * GIB))
    config = configuration()
    assert told(config).tail.interrupt_mode == "auto"
    mode, slots = choose_on_cluster(config)
    assert (mode.key, mode.value) == (MODE_KEY, "abort")
    assert (slots.key, slots.value) == (SLOTS_KEY, False)
    assert told(config).tail.interrupt_mode == "abort"
    assert config.partial_rollout.tail.interrupt_mode == "abort"


def test_nodes_are_not_looked_at_for_what_is_decided(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start_choices, "look_at_nodes", lambda: pytest.fail("nobody asked"))
    assert choose_on_cluster(configuration({"interrupt_mode": "abort"})) == []


@pytest.mark.parametrize(
    ("limit", "stat", "free"),
    [("1000", "anon 1\ninactive_file 200", 900), ("1000", "anon 1", 700), ("max", "anon 1", None), (None, "", None)],
)
def test_a_container_may_take_what_is_below_its_limit(tmp_path: Path, limit: str | None, stat: str, free: int | None):
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("300\n")
        (tmp_path / "memory.stat").write_text(stat)
    assert container_free(tmp_path, "memory.max", "memory.current", "inactive_file") == free
