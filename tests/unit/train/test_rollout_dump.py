"""Dumps of trained rollouts: every so many steps, with the weight versions of each response; validation has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from verl.trainer.ppo.v1 import PPOTrainer

from tests.unit.train.support import bare_trainer


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    """What verl is asked to write: step and columns."""
    found: list[tuple[int, dict[str, Any]]] = []

    def log(self: Any, batch: list[str], timing_raw: dict[str, Any], rollout_data_dir: str) -> None:
        self._dump_generations(inputs=["x"] * len(batch), reward_extra_infos_dict={"uid": batch}, dump_path="d")

    def dump(self: Any, reward_extra_infos_dict: dict[str, Any], **texts: Any) -> None:
        found.append((self.global_steps, reward_extra_infos_dict))

    monkeypatch.setattr(PPOTrainer, "_log_rollout_data", log)
    monkeypatch.setattr(PPOTrainer, "_dump_generations", dump)
    return found


def test_every_third_step_is_written_with_versions_and_a_padding_row_has_none(written: list[Any]) -> None:
    trainer = bare_trainer(settings=SimpleNamespace(block=SimpleNamespace(dump_every=3)))
    trainer.replay_buffer = SimpleNamespace(version_spans={"a_0_0": [[2, 5], [3, 1]]})
    for trainer.global_steps in range(1, 7):
        trainer._log_rollout_data(["a_0_0", "pad"], {}, "d")
    row = {"uid": ["a_0_0", "pad"], "weight_versions": [[[2, 5], [3, 1]], []]}
    assert written == [(3, row), (6, row)]
    trainer._dump_generations(inputs=["x"], reward_extra_infos_dict={"uid": ["val"]}, dump_path="d")
    assert written[-1] == (6, {"uid": ["val"]})
