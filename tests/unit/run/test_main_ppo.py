"""The entry point, as far as it gets without Ray."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir

from partial_rollout import main_ppo
from partial_rollout.errors import ConfigError


@pytest.mark.parametrize("flag", [[], ["+async_training.partial_rollout=True"]])
def test_a_mistake_in_our_block_is_no_fault_of_ray(monkeypatch: pytest.MonkeyPatch, flag: list[str]) -> None:
    monkeypatch.setattr(main_ppo, "check_inputs", lambda _config: None)
    paths = [f"{key}=x" for key in ("data.train_files", "data.val_files", "actor_rollout_ref.model.path")]
    with initialize_config_dir(main_ppo.CONFIG_DIR, version_base=None):
        config = compose("quickstart_cpu", overrides=[*paths, "partial_rollout.num_slots=-3", *flag])
    with pytest.raises(ConfigError, match="num_slots"):
        main_ppo.run(config)
