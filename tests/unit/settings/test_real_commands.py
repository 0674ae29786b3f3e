"""Command lines of verl's example scripts: what doctor says is what the start does, and nothing changes in silence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import validate_config

from partial_rollout.doctor import Report, describe, diagnose
from partial_rollout.errors import UserError
from partial_rollout.settings.by_hand import ByHand, override_key, verl_defaults
from partial_rollout.settings.compose import CommandLine, compose_line, resolve
from partial_rollout.settings.flag import enable
from partial_rollout.settings.prepare import prepare
from scripts.real_commands import BEGIN, END, PAGE, WORKS, commands, row, verdict
from tests.e2e.cases import CASES
from tests.unit.settings.support import unlisted, values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parents[3]
ANY_VALUE = {
    *("data.train_files", "data.val_files", "data.train_batch_size", "data.max_prompt_length", "data.truncation"),
    *("data.max_response_length", "data.filter_overlong_prompts", "algorithm.kl_ctrl.kl_coef"),
    *("actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    *("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "actor_rollout_ref.actor.kl_loss_coef"),
    *("actor_rollout_ref.rollout.gpu_memory_utilization", "actor_rollout_ref.rollout.n"),
    *("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", "trainer.total_epochs"),
    *("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "trainer.save_freq", "trainer.test_freq"),
}
"""Sizes, numbers and places, none of which is a part of its own."""
QWEN3, MATRIX = "benchmarks/results/gpu/jobs_4b_h200.json", "benchmarks/results/matrix.json"
SMALL = ("actor_rollout_ref.model.path=Qwen/Qwen3-4B", "trainer.n_gpus_per_node=2")
"""What ran at the most; verl's examples are for larger models or more GPUs."""
SHOWN_BY = {
    "algorithm.adv_estimator": {"grpo": QWEN3, "rloo": MATRIX, "reinforce_plus_plus": MATRIX},
    "algorithm.use_kl_in_reward": {"True": MATRIX},
    "algorithm.rollout_correction.bypass_mode": {"True": "benchmarks/results/gpu/smollm2_bypass_h200.json"},
    "actor_rollout_ref.model.path": {"Qwen/Qwen3-4B": QWEN3},
    "trainer.n_gpus_per_node": {
        "1": QWEN3,
        "2": "benchmarks/results/gpu/recipes_tensor_parallel_h200.json",
    },
    "actor_rollout_ref.model.use_remove_padding": {"True": "benchmarks/jobs.py"},
    "actor_rollout_ref.actor.use_dynamic_bsz": {"True": "configs/recipe/grpo.yaml"},
    "actor_rollout_ref.actor.use_kl_loss": {"True": MATRIX},
    "actor_rollout_ref.rollout.name": {"vllm": QWEN3},
    "actor_rollout_ref.rollout.tensor_model_parallel_size": {
        "2": "benchmarks/results/gpu/recipes_tensor_parallel_h200.json"
    },
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": {"True": "configs/recipe/grpo.yaml"},
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": {"True": "configs/recipe/grpo.yaml"},
    # The reference model only computes log-probs, and sends its weights nowhere.
    "actor_rollout_ref.ref.fsdp_config.param_offload": {"True": MATRIX},
}
"""Values other than verl's default that a command that works may have, and what ran with each."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the files that commands name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("DATA", "FILE"):
        (tmp_path / name).touch()
    return tmp_path


def refused_by_verl(config: DictConfig) -> str:
    """What verl's own check of a configuration, with which its start begins, says against it; empty if nothing.

    Without that of a critic, for which verl loads the files of the critic's model.
    """
    try:
        validate_config(copy.deepcopy(config), need_reference_policy(config), use_critic=False)
    except (AssertionError, ValueError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:provider=hydra.searchpath:UserWarning")
@pytest.mark.parametrize("source", commands(Path()))
def test_doctor_and_start_agree_on_a_command_of_verls_examples(source: str, folder: Path):
    report, line = Report(), CommandLine.parse(commands(folder)[source])
    try:
        config = compose_line(resolve(line))
        enable(config)
    except UserError as error:
        report.block(error)
    else:
        before, given = values(config), ByHand.read(line.overrides)
        started = copy.deepcopy(config)
        describe(report, config, line.overrides)
        if report.is_blocked:
            with pytest.raises(UserError):
                prepare(started, given)
        else:
            made = prepare(started, given).changes
            assert refused_by_verl(started) == ""
            assert unlisted(before, values(started), made) == []
            assert not [change for change in made if given.has(change.key)]
    page = PAGE.read_text(encoding="utf-8")
    assert row(source, verdict(report)) in page.splitlines(), "run `python -m scripts.real_commands --write`"

    if verdict(report).startswith(WORKS):
        assert not_shown(line.overrides) == []


def not_shown(overrides: Sequence[str]) -> list[str]:
    """Overrides with which nothing ran, so that a command that has one cannot be said to work."""
    defaults = verl_defaults()
    found = []
    for override in overrides:
        key, value = override_key(override), override.partition("=")[2]
        is_default = key in defaults and value.casefold() == str(defaults[key]).casefold()
        is_default &= key != "algorithm.adv_estimator"  # verl's is GAE, with a critic
        if key not in ANY_VALUE and not is_default and value not in SHOWN_BY.get(key, {}):
            found.append(override)
    return found


def test_what_shows_a_value_is_there():
    assert [name for values in SHOWN_BY.values() for name in values.values() if not (ROOT / name).exists()] == []
    assert {"rloo", "reinforce_plus_plus", "reference"} <= set(CASES)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "actor_rollout_ref.model.path=microsoft/phi-4",
        "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B",
        "actor_rollout_ref.model.path=deepseek-ai/DeepSeek-V3",
        "actor_rollout_ref.model.path=mistralai/Mixtral-8x7B-v0.1",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct",
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction={bypass_mode: true, rollout_rs: token_k1}",
        "algorithm.rollout_correction.rollout_is_batch_normalize=True",
        "algorithm.adv_estimator=gae",
        "algorithm.adv_estimator=rloo_vectorized",
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
        "algorithm.adv_estimator=grpo_passk",
        "algorithm.norm_adv_by_std_in_grpo=False",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.model.lora_rank=8",
        "trainer.nnodes=2",
        "trainer.val_only=True",
    ],
)
def test_a_command_with_something_that_nobody_ran_on_a_gpu_does_not_work(override: str, folder: Path):
    words = small(folder, "grpo_trainer/run_qwen3_8b_fsdp.sh")
    assert verdict(diagnose([*words, override])).startswith("can start; not tried: ")
    assert not_shown([override]) == [override]


def small(folder: Path, script: str) -> list[str]:
    """The words of an example with what ran at the most."""
    (words,) = (words for source, words in commands(folder).items() if source.endswith(script))
    return [*words, *SMALL]


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce_plus_plus"])
def test_an_example_works_with_a_model_and_gpus_of_which_jobs_are_stored(algorithm: str, folder: Path):
    words = small(folder, f"{algorithm}_trainer/run_qwen3_8b_fsdp.sh")
    assert verdict(diagnose(words)).startswith(WORKS)
    last = {override_key(word): word for word in CommandLine.parse(words).overrides}
    assert not_shown(list(last.values())) == []


def test_the_page_has_one_row_for_each_command():
    shown = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].split("|---|---|")[1]
    assert len(shown.strip().splitlines()) == len(commands(Path())) >= 40
