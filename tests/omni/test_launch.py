"""What a user got wrong is named before anything is started."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

from partial_rollout.diffusion import contract, launch
from partial_rollout.diffusion.config import DiffusionConfig
from partial_rollout.diffusion.contract import Adapter
from partial_rollout.diffusion.job import SAVE_SHARE, STILL_SHARE
from partial_rollout.diffusion.launch import END_SHARE, launched
from partial_rollout.diffusion.sde_window import window_of_request
from partial_rollout.errors import ActorLost, ConfigError, DataError
from partial_rollout.main_diffusion import main
from partial_rollout.observability.events import CommandEnded, EventReader

if TYPE_CHECKING:
    from pathlib import Path

REWARD = "partial_rollout.run.tiny_qwen_image.reward.redness"


@pytest.fixture
def folder(tmp_path: Path, tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint's VAE and some prompts; starting Ray is an error."""
    shutil.copytree(tiny_qwen_image / "vae", tmp_path / "model" / "vae")
    (tmp_path / "prompts").write_text("a red square\n", encoding="utf-8")
    (tmp_path / "empty").write_text("\n \n", encoding="utf-8")
    (tmp_path / "no_vae").mkdir()

    def started(**_: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(launch.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(launch.ray, "init", started)
    return tmp_path


def config(folder: Path, *, model: str = "model", prompts: str = "prompts", **given: Any) -> DiffusionConfig:
    return DiffusionConfig.from_mapping(
        {
            "model": {"path": str(folder / model)},
            "data": {"prompts": str(folder / prompts)},
            "trainer": {"output_dir": str(folder), "reward": given.pop("reward", REWARD)},
            "algorithm": {"name": given.pop("algorithm", "flow_grpo"), **given.pop("windows", {})},
            "rollout": given,
        }
    )


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        ({"reward": "no.such.function"}, ConfigError, r"trainer.reward='no.such.function' cannot be imported \(No"),
        ({"reward": f"{REWARD}_"}, ConfigError, "has no attribute 'redness_'"),
        ({"reward": "redness"}, ConfigError, "must be the import path of a function"),
        ({"prompts": "missing"}, DataError, "data.prompts=.*missing cannot be read"),
        ({"prompts": "empty"}, DataError, "data.prompts=.*empty has no prompt"),
        ({"model": "no_vae"}, ConfigError, "model.path=.*config.json cannot be read"),
        ({"algorithm": "dpo"}, ConfigError, "algorithm.name='dpo' is not registered .* flow_grpo, mix_grpo"),
        ({"height": 60}, ConfigError, "rollout.height=60 is not allowed: must be a multiple of 8"),
    ],
)
def test_it_is_named(folder: Path, given: dict[str, Any], error: type[Exception], reason: str):
    with pytest.raises(error, match=reason), launched(config(folder, **given)):
        pass


def test_nothing_is_wrong_with_the_rest(folder: Path):
    with pytest.raises(AssertionError, match="Ray was started"), launched(config(folder)):
        pass


@pytest.mark.parametrize("name", ["flow_grpo", "other"])
def test_a_window_that_moves_with_the_steps_needs_an_algorithm_of_which_all_requests_share_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setattr(contract, "_ADAPTERS", dict(contract._ADAPTERS))
    contract.register(contract.QWEN_IMAGE, "other", Adapter("other", "a.B", window_of_request, stepwise=False))
    given: dict[str, Any] = {"windows": {"sde_window_interval": 25}}
    reason = f"interval=25 .* null with algorithm.name={name}, which"
    with pytest.raises(ConfigError, match=reason), launched(config(folder, algorithm=name, **given)):
        pass
    with (
        pytest.raises(AssertionError, match="Ray was started"),
        launched(config(folder, algorithm="mix_grpo", **given)),
    ):
        pass


def test_why_a_run_ended_is_told_to_whoever_watches_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def lost(*_: Any) -> None:
        raise ActorLost("image server 0 died")

    monkeypatch.setattr(launch, "launched", lost)
    block = {"model": {"path": "m"}, "data": {"prompts": "p"}, "trainer": {"output_dir": str(folder), "reward": "a.b"}}
    with pytest.raises(ActorLost, match="image server 0 died"):
        main(OmegaConf.create(block))
    [ended] = [event for event in EventReader(folder / "events").read() if isinstance(event, CommandEnded)]
    assert (ended.code, ended.text) == (1, "image server 0 died")


def test_what_the_end_of_a_run_takes_one_after_the_other_has_room_in_its_time():
    assert STILL_SHARE + SAVE_SHARE + END_SHARE < 1.0
