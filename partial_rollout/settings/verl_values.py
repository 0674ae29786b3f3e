"""Values that verl 0.9.1 refuses, most of them only when its first worker or engine runs.

The names are in tables here, which a test compares with verl's own; verl's import brings torch.
"""

from __future__ import annotations

import difflib
import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from partial_rollout.errors import Refusal
from partial_rollout.settings.derived import as_list, engine_block, needs_critic, num_engine_devices
from partial_rollout.settings.flag import ROLLOUT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from omegaconf import DictConfig

ACTOR = "actor_rollout_ref.actor"
LOSS_AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ESTIMATORS = (
    *("grpo", "gae", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "remax", "gpg", "gdpo"),
    *("grpo_passk", "grpo_vectorized", "rloo_vectorized", "optimal_token_baseline", "tir_optimal_token_baseline"),
)
POLICY_LOSSES = (
    *("vanilla", "gspo", "cispo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "dppo_tv", "dppo_kl"),
    "bypass_mode",
)
STRATEGIES = ("fsdp", "fsdp2", "fsdp_turbo", "megatron", "veomni", "torchtitan", "automodel")
"""Training engines."""
OPEN_NAMES = {
    "algorithm.adv_estimator": ESTIMATORS,
    f"{ACTOR}.policy_loss.loss_mode": POLICY_LOSSES,
    f"{ACTOR}.strategy": STRATEGIES,
}
"""Names to which a module that verl imports can add its own."""
EXTERNAL_CODE = ("actor_rollout_ref.model.external_lib", "data.custom_cls.path")
EXTERNAL_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
PLUGINS = "verl.plugins"
"""Entry points that verl imports."""
OURS = __name__.partition(".")[0]
LIKE = 0.6
"""At least this alike (difflib's ratio), a name is proposed for one that does not exist."""


def refusal(given: str, allowed: str, because: str = "") -> Refusal:
    """A value that a run cannot have, and what is allowed instead."""
    message = f"{given} is not allowed: must be {allowed}{': ' if because else ''}{because}"
    return Refusal(message, given, because=because, instead=f"must be {allowed}")


def refused_values(config: DictConfig) -> Iterator[Refusal]:
    """What verl refuses in every mode."""
    yield from _names(config)
    yield from _engine(config)
    yield from _batch(config)


def _names(config: DictConfig) -> Iterator[Refusal]:
    wanted = {f"{ACTOR}.loss_agg_mode": LOSS_AGGREGATIONS}
    if not runs_external_code(config):
        wanted |= OPEN_NAMES
    if needs_critic(config):
        wanted["critic.loss_agg_mode"] = LOSS_AGGREGATIONS
    for key, allowed in wanted.items():
        value = OmegaConf.select(config, key)
        if value is not None and value not in allowed:
            yield refusal(f"{key}={value}", one_of(str(value), allowed), "verl knows no other name")


def one_of(given: str, allowed: Collection[str]) -> str:
    """The names that are allowed, after the one that was perhaps meant.

    >>> one_of("token_mean", ("token-mean", "seq-mean-token-sum"))
    'one of token-mean, seq-mean-token-sum (did you mean token-mean?)'
    """
    plain = {name.casefold().replace("-", "_"): name for name in allowed}
    near = difflib.get_close_matches(given.casefold().replace("-", "_"), plain, 1, LIKE)
    return f"one of {', '.join(allowed)}" + (f" (did you mean {plain[near[0]]}?)" if near else "")


def runs_external_code(config: DictConfig) -> bool:
    """Whether verl imports code that is neither its own nor ours: it may add names, and agent loops."""
    given = (OmegaConf.select(config, key) for key in EXTERNAL_CODE)
    modules = [module for each in given if each for module in as_list(each)]
    modules += [plugin.value for plugin in entry_points(group=PLUGINS)]
    return bool(os.environ.get(EXTERNAL_VARIABLE)) or any(name.partition(".")[0] != OURS for name in modules)


def _engine(config: DictConfig) -> Iterator[Refusal]:
    mode = OmegaConf.select(config, f"{ROLLOUT}.mode")
    if mode not in (None, "async"):
        because = "verl 0.9.1 has no other, and mode=sync has been removed from it"
        yield refusal(f"{ROLLOUT}.mode={mode}", "async (or leave it out)", because)
    tensor, data, experts, stages, of_experts = (
        _size(config, name) for name in ("tensor_model", "data", "expert", "pipeline_model", "moe_tensor")
    )
    if stages != 1:
        because = "verl 0.9.1 has no pipeline-parallel engines"
        yield refusal(f"{ROLLOUT}.pipeline_model_parallel_size={stages}", "1", because)
    on_vllm = OmegaConf.select(config, f"{ROLLOUT}.name") == "vllm"
    if on_vllm and experts not in (1, tensor * data):
        given = f"{ROLLOUT}.expert_parallel_size={experts}"
        allowed = f"1 or {tensor * data}" if tensor * data != 1 else "1"
        because = "verl wants tensor_model_parallel_size x data_parallel_size, all ranks of an engine"
        yield refusal(given, allowed, because)
    if on_vllm and of_experts != 1:
        yield refusal(f"{ROLLOUT}.moe_tensor_parallel_size={of_experts}", "1", "verl takes it for TensorRT-LLM only")
    share = OmegaConf.select(config, f"{ROLLOUT}.gpu_memory_utilization")
    if on_vllm and share is not None and not 0 < share <= 1:
        because = "it is the engine's share of a GPU's memory"
        yield refusal(f"{ROLLOUT}.gpu_memory_utilization={share}", "above 0 and at most 1", because)


def _size(config: DictConfig, name: str) -> int:
    value: Any = OmegaConf.select(config, f"{ROLLOUT}.{name}_parallel_size")
    return 1 if value is None else value


def _batch(config: DictConfig) -> Iterator[Refusal]:
    """Without dynamic micro-batches verl compares sizes with each other."""
    actor = config.actor_rollout_ref.actor
    batch, part = config.data.train_batch_size, actor.ppo_mini_batch_size
    if not actor.use_dynamic_bsz and isinstance(part, int) and batch < part:
        because = "verl trains a batch in whole mini-batches"
        yield refusal(f"{ACTOR}.ppo_mini_batch_size={part}", f"at most data.train_batch_size={batch}", because)


def refused_sizes(config: DictConfig) -> Iterator[Refusal]:
    """What verl refuses of the engines' sizes."""
    names = ("tensor_model", "data")
    sizes = [_size(config, name) for name in names]
    devices = num_engine_devices(config)
    if min(sizes) < 1 or devices % (sizes[0] * sizes[1]):
        given = " x ".join(
            f"{ROLLOUT}.{name}_parallel_size={size}"
            for name, size in zip(names, sizes, strict=True)
            if size != 1 or name == "tensor_model"
        )
        block = engine_block(config)
        on = f"{block}.nnodes x {block}.n_gpus_per_node = {devices} devices"
        yield refusal(f"{given} for {on}", "a divisor of the devices", "each engine has equally many of them")
