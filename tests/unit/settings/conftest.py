"""Configurations of the quickstart with changes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from tests.unit.settings.support import Composed

CONFIGS = str(Path(__file__).resolve().parents[3] / "configs")


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The quickstart's configuration but for its planner and its engines' bound, composed once; its paths exist."""
    folder = tmp_path_factory.mktemp("task")
    paths = {"data.train_files": "train.parquet", "data.val_files": "val.parquet"}
    paths["actor_rollout_ref.model.path"] = "model"
    for name in paths.values():
        (folder / name).touch()
    sizes = ["critic.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1"]
    sizes += ["partial_rollout.packing.planner=auto", "actor_rollout_ref.rollout.max_num_seqs=256"]
    with initialize_config_dir(CONFIGS, version_base=None):
        overrides = [*sizes, *(f"{key}={folder / name}" for key, name in paths.items())]
        return pickle.dumps(compose("quickstart_cpu", overrides=overrides))


@pytest.fixture
def composed(quickstart: bytes) -> Composed:
    """A copy of it with values set by their dotted keys, whether these exist or not."""

    def compose_with(changes: dict[str, Any]) -> DictConfig:
        config: DictConfig = pickle.loads(quickstart)
        for key, value in changes.items():
            OmegaConf.update(config, key, value, force_add=True)
        return config

    return compose_with
