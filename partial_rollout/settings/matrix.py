"""What is supported: one table, from which `doctor` speaks and the document's table is made.

Each row says when it applies to a composed configuration, and has an example to which it applies.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from partial_rollout.settings.derived import (
    ADAPTER_RANKS,
    devices_of_replica,
    engine_devices_per_node,
    has_own_devices,
    has_own_reference,
    num_devices,
    num_engine_devices,
    num_engine_nodes,
    num_rollout_devices,
    sequence_parallel_size,
)
from partial_rollout.settings.drafts import SUFFIX_DRAFTS
from partial_rollout.settings.flag import CORRECTION_BLOCK, POLICY_LOSS, REINFORCE, REPLAYS, ROLLOUT, SPECULATION
from partial_rollout.settings.memory import ModelSizes, model_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from omegaconf import DictConfig

TESTED = "in the tests"
SEEN = "seen once on GPUs"
SEEN_ON_CPU = "seen once on a CPU"
UNTRIED = "not tried"
REFUSED = "refused"
ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True, slots=True)
class Row:
    """A part of a job, with what is known of it."""

    part: str
    what: str
    state: str
    """One of the five above."""
    where: str
    """Where the part was run, or why it is refused or not tried."""
    applies: Callable[[DictConfig], bool] | None = None
    """Whether a configuration has the part; None: a configuration does not show it."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Keys that make the quickstart's configuration one to which the row applies."""
    also: str = ""
    """What the document says besides the state."""
    brief: str = ""
    """In the README's short table; empty: not there."""


def _of(config: DictConfig, key: str, default: Any = None) -> Any:
    value = OmegaConf.select(config, key)
    return default if value is None else value


def _is(key: str, *values: Any) -> Callable[[DictConfig], bool]:
    return lambda config: _of(config, key) in values


def _above(key: str, least: int) -> Callable[[DictConfig], bool]:
    return lambda config: _of(config, key, 0) > least


def _vllm_on(device: str) -> Callable[[DictConfig], bool]:
    return lambda config: _of(config, f"{ROLLOUT}.name") == "vllm" and _of(config, "trainer.device") == device


def _drafter(config: DictConfig) -> str | None:
    """The class or model by which an engine drafts; None: it does not."""
    if not _of(config, SPECULATION):
        return None
    return _of(config, f"{SPECULATION}.model") or "another"


def _has_several_nodes(config: DictConfig) -> bool:
    return _of(config, "trainer.nnodes", 1) > 1 or num_engine_nodes(config) > 1


def _has_many_gpus(config: DictConfig) -> bool:
    devices = num_devices(config) + num_rollout_devices(config)
    return _of(config, "trainer.device") != "cpu" and devices > MOST_GPUS


def _trains_a_large_model(config: DictConfig) -> bool:
    return _of(config, "trainer.device") != "cpu" and _billions(config) > LARGEST


def _billions(config: DictConfig) -> float:
    """Parameters by the model's files where they are on this machine, else by its name; infinity: neither tells."""
    sizes = model_sizes(config)
    if isinstance(sizes, ModelSizes):
        return sizes.num_parameters / 1e9
    name = PurePath(str(_of(config, "actor_rollout_ref.model.path", ""))).name
    return max(map(float, BILLIONS.findall(name)), default=math.inf)


def _has_adapter(config: DictConfig) -> bool:
    return any(_of(config, f"actor_rollout_ref.{key}", 0) > 0 for key in ADAPTER_RANKS)


def _has_critic(config: DictConfig) -> bool:
    chosen = _of(config, "critic.enable")
    return bool(_of(config, "algorithm.adv_estimator") == "gae" if chosen is None else chosen)


def _is_one_call(config: DictConfig) -> bool:
    return not _calls_tools(config)


def _calls_tools(config: DictConfig) -> bool:
    agent = _of(config, f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent")
    named = _of(config, f"{ROLLOUT}.agent.agent_loop_config_path") is not None
    return bool(_of(config, f"{ROLLOUT}.multi_turn.enable")) or agent != "single_turn_agent" or named


def _shares_reward_devices(config: DictConfig) -> bool:
    return _has_reward_model(config) and not _of(config, "reward.reward_model.enable_resource_pool")


def _has_reward_model(config: DictConfig) -> bool:
    return bool(_of(config, "reward.reward_model.enable"))


def _model_has(words: re.Pattern[str], name: re.Pattern[str]) -> Callable[[DictConfig], bool]:
    """By the model's own configuration where it is on this machine, else by its name."""

    def applies(config: DictConfig) -> bool:
        path = str(_of(config, "actor_rollout_ref.model.path", ""))
        file = Path(path).expanduser() / MODEL_FILE
        if file.is_file():
            return words.search(file.read_text(encoding="utf-8")) is not None
        return name.search(path) is not None

    return applies


def _own_pool(config: DictConfig) -> bool:
    return _has_reward_model(config) and not _shares_reward_devices(config) and not _scores_alone(config)


def _scores_alone(config: DictConfig) -> bool:
    return _has_reward_model(config) and _of(config, "reward.custom_reward_function.path") is None


def _correction(config: DictConfig) -> dict[str, Any]:
    """What the off-policy correction has besides verl's defaults."""
    given = _of(config, CORRECTION_BLOCK, {})
    return {name: given[name] for name, default in CORRECTION_DEFAULTS.items() if given.get(name, default) != default}


def _has_another_loss(config: DictConfig) -> bool:
    # The loss of `bypass_mode` has rows of its own.
    return any(_of(config, key, usual) not in (usual, "bypass_mode") for key, usual in USUAL_LOSS.items())


def _critic_on(*, cpu: bool) -> Callable[[DictConfig], bool]:
    return lambda config: _has_critic(config) and (_of(config, "trainer.device") == "cpu") == cpu


MOST_GPUS = 2
"""Number with which jobs were run."""
LARGEST = 4.5
"""Billions of parameters: Qwen3-4B's shape, which was trained, has less."""
BILLIONS = re.compile(r"(?i)(?<![\d.])(\d+(?:\.\d+)?)b(?![a-z])")
"""Billions of parameters in a model's name."""
KNOWN_ESTIMATORS = ("grpo", "gae", "remax", "rloo", "reinforce_plus_plus", "opo")
"""Estimators that have rows of their own."""
OFFLOADS = ("param_offload", "optimizer_offload")
CORRECTION_DEFAULTS = {
    "rollout_is": None,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
}
"""verl's defaults of the keys that say which correction a job has."""
TOKEN_LEVEL = {"rollout_is": "token"}
BYPASS = ({"bypass_mode": True}, {"bypass_mode": True, **TOKEN_LEVEL})
"""With `ppo_clip` verl computes weights of tokens for its metrics only."""
WEIGHED = {"bypass_mode": True, "loss_type": REINFORCE, **TOKEN_LEVEL}
USUAL_LOSS = {
    f"{POLICY_LOSS}.loss_mode": "vanilla",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    "algorithm.norm_adv_by_std_in_grpo": True,
}
MEDIA = re.compile(r"(?i)(?<![a-z])(vl|omni|vision|audio|\d+(\.\d+)?v|o)(?![a-z])")
"""Found in the names of models that take more than text."""
OWN_MEDIA = re.compile("vision_config|audio_config")
EXPERTS = re.compile(
    r"(?i)(?<![a-z\d])(a\d+(\.\d+)?b|\d+x\d+b|[a-z]*moe|mixtral|deepseek-((coder-)?v[23]|r1(?!-(distill|\d+-qwen)))|"
    r"gpt-oss|kimi-k2|llama-4|dbrx|grok|minimax-m\d|glm-4\.[5-9])(?![a-z])"
)
"""Found in the names of models with several experts a layer."""
SEEN_MEDIA = (re.compile(r'"model_type":\s*"qwen2_5_vl"'), re.compile(r"(?i)qwen2\.5-vl"))
OWN_EXPERTS = re.compile(r'"(num_(local_)?experts|n_routed_experts|moe_num_experts)":\s*([2-9]|\d\d)')
MODEL_FILE = "config.json"


_takes_media = _model_has(OWN_MEDIA, MEDIA)


def _is_seen_with_images(config: DictConfig) -> bool:
    return _of(config, "trainer.device") == "cpu" and _model_has(*SEEN_MEDIA)(config)


ROWS = (
    Row(
        "engine",
        "vLLM, CPU build 0.28.0",
        TESTED,
        "`tests/e2e/test_training.py`, `tests/engine/test_interrupt_modes.py`",
        _vllm_on("cpu"),
        brief="vLLM on a CPU",
    ),
    Row(
        "engine",
        "vLLM 0.24.0 on GPUs",
        SEEN,
        "[results on GPUs](results/gpu.md)",
        _vllm_on("cuda"),
        {"trainer.device": "cuda"},
        brief="vLLM 0.24 on GPUs",
    ),
    Row(
        "engine",
        "vLLM on other devices",
        UNTRIED,
        "weights travel by verl's way",
        lambda config: _of(config, "trainer.device") not in ("cpu", "cuda"),
        {"trainer.device": "npu"},
    ),
    Row(
        "engine",
        "tensor parallel",
        TESTED,
        "`tests/engine/test_weight_channel.py`",
        _above(f"{ROLLOUT}.tensor_model_parallel_size", 1),
        {f"{ROLLOUT}.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 2},
        also="the tests cover the weight channel only; whole jobs were seen on 2 GPUs, also beside verl's modes",
        brief="weights to tensor-parallel engines",
    ),
    Row(
        "engine",
        "several replicas",
        TESTED,
        "`tests/engine/test_weight_channel.py`",
        lambda config: num_engine_devices(config) > devices_of_replica(config),
        {"trainer.n_gpus_per_node": 2, f"{ROLLOUT}.tensor_model_parallel_size": 1},
        also="the tests cover the weight channel only; whole jobs were seen with 2, also beside verl's modes",
        brief="weights to two replicas",
    ),
    Row(
        "engine",
        "engines on GPUs of their own",
        TESTED,
        "`tests/e2e/test_separate.py`, `tests/nodes/test_separate.py`",
        has_own_devices,
        {"partial_rollout.placement": "separate"},
        also="on a CPU; seen on two GPUs, in two jobs",
    ),
    Row(
        "engine",
        "data-parallel engines",
        UNTRIED,
        "each engine has its own KV",
        _above(f"{ROLLOUT}.data_parallel_size", 1),
        {f"{ROLLOUT}.data_parallel_size": 2, "trainer.n_gpus_per_node": 2},
        also="refused with modes that retain KV",
        brief="data-parallel engines",
    ),
    Row(
        "engine",
        "expert-parallel engines",
        UNTRIED,
        "no job of this size was run",
        _above(f"{ROLLOUT}.expert_parallel_size", 1),
        {
            f"{ROLLOUT}.expert_parallel_size": 2,
            f"{ROLLOUT}.tensor_model_parallel_size": 2,
            "trainer.n_gpus_per_node": 2,
        },
    ),
    Row(
        "engine",
        "pipeline-parallel engines",
        REFUSED,
        "verl 0.9.1 has none",
        _above(f"{ROLLOUT}.pipeline_model_parallel_size", 1),
        {f"{ROLLOUT}.pipeline_model_parallel_size": 2},
    ),
    Row(
        "engine",
        "weights quantised on arrival",
        SEEN,
        "50 steps of a small model, engine memory kept, no difference in rewards seen; the rows of layers must be "
        "multiples of 128, as SmolLM2's are not; they travel by verl's way: "
        "[results](results/gpu.md#fp8-weights-and-an-fp8-kv-cache-50-steps)",
        lambda config: _of(config, f"{ROLLOUT}.quantization") is not None,
        {f"{ROLLOUT}.quantization": "fp8"},
    ),
    Row(
        "engine",
        "engines on several nodes, on a CPU",
        TESTED,
        "`tests/nodes/test_two_nodes.py`",
        lambda config: _has_several_nodes(config) and _of(config, "trainer.device") == "cpu",
        {"trainer.nnodes": 2},
        also="two nodes; a node's death in `make test`, all else by `make nodes`",
        brief="two nodes on a CPU",
    ),
    Row(
        "engine",
        "several nodes with GPUs",
        UNTRIED,
        "two nodes were run on a CPU only",
        lambda config: _has_several_nodes(config) and _of(config, "trainer.device") != "cpu",
        {"trainer.nnodes": 2, "trainer.device": "cuda"},
    ),
    Row(
        "engine",
        "more than 2 GPUs",
        UNTRIED,
        "with two, an engine on each or one on both was run",
        _has_many_gpus,
        {"trainer.n_gpus_per_node": 4, "trainer.device": "cuda"},
        brief="more than 2 GPUs",
    ),
    Row(
        "engine",
        "an engine over several nodes",
        UNTRIED,
        "it is not relaunched",
        lambda config: min(devices_of_replica(config), num_engine_devices(config)) > engine_devices_per_node(config),
        {"trainer.nnodes": 2, f"{ROLLOUT}.tensor_model_parallel_size": 2},
    ),
    Row(
        "engine",
        "SGLang, TensorRT-LLM",
        REFUSED,
        "gate, drain and weight channel are built on vLLM",
        lambda config: _of(config, f"{ROLLOUT}.name") != "vllm",
        {f"{ROLLOUT}.name": "sglang"},
        brief="SGLang, TensorRT-LLM: only vLLM has our gate",
    ),
    Row("trainer", "FSDP2", TESTED, "`tests/e2e/test_training.py`", _is(f"{ACTOR}.strategy", "fsdp2"), brief="FSDP2"),
    Row(
        "trainer",
        "FSDP",
        SEEN,
        "the recipes' strategy on GPUs",
        _is(f"{ACTOR}.strategy", "fsdp"),
        {f"{ACTOR}.strategy": "fsdp"},
        brief="FSDP",
    ),
    Row(
        "trainer",
        "training of models above 4B, or of unknown size, on GPUs",
        UNTRIED,
        "with 8B, engines generated and nothing was trained",
        _trains_a_large_model,
        {"actor_rollout_ref.model.path": "Qwen/Qwen3-8B", "trainer.device": "cuda"},
    ),
    Row(
        "trainer",
        "Megatron, VeOmni, TorchTitan and others",
        UNTRIED,
        "they keep verl's micro-batches: our planner needs verl's FSDP engine. On a CPU verl itself ends "
        "with `Unknown backend: megatron`",
        lambda config: _of(config, f"{ACTOR}.strategy") not in ("fsdp", "fsdp2"),
        {f"{ACTOR}.strategy": "megatron"},
        also="refused with `partial_rollout.packing.planner=global`",
        brief="Megatron with verl's planner",
    ),
    Row(
        "trainer",
        "sequence parallel (Ulysses)",
        UNTRIED,
        "its plans are tested, no job was run",
        lambda config: _of(config, f"{ACTOR}.strategy") in ("fsdp", "fsdp2") and sequence_parallel_size(config) > 1,
        {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2, "trainer.n_gpus_per_node": 2},
    ),
    Row(
        "trainer",
        "training state in host memory (`param_offload`, `optimizer_offload`)",
        UNTRIED,
        "weights then go to the engines from parameters that verl has just brought back to the GPU",
        lambda config: any(_of(config, f"{ACTOR}.fsdp_config.{name}") for name in OFFLOADS),
        {f"{ACTOR}.fsdp_config.param_offload": True},
        brief="`param_offload`",
    ),
    Row(
        "trainer",
        "critic on a CPU (GAE and other losses that need one)",
        TESTED,
        "`tests/e2e/test_reorder.py`; it keeps verl's micro-batches",
        _critic_on(cpu=True),
        {"algorithm.adv_estimator": "gae"},
        brief="critic on a CPU",
    ),
    Row(
        "trainer",
        "critic on GPUs",
        UNTRIED,
        "what differs is its memory beside engine and actor",
        _critic_on(cpu=False),
        {"algorithm.adv_estimator": "gae", "trainer.device": "cuda"},
        brief="critic on GPUs",
    ),
    Row(
        "trainer",
        "models with several experts a layer",
        UNTRIED,
        "only the names of their weights are in the tests, not their way to an engine. A model whose "
        "configuration is not on this machine is known by its name",
        _model_has(OWN_EXPERTS, EXPERTS),
        {"actor_rollout_ref.model.path": "Qwen/Qwen3-30B-A3B"},
        brief="MoE",
    ),
    Row(
        "trainer",
        "reference model (KL in loss or reward)",
        SEEN_ON_CPU,
        "`make matrix` (benchmarks/results/matrix.json); it gets the actor's micro-batches",
        has_own_reference,
        {f"{ACTOR}.use_kl_loss": True},
        brief="reference model",
    ),
    Row(
        "trainer",
        "LoRA on a CPU",
        TESTED,
        "`tests/engine/test_lora_update.py`; weights below an adapter travel by verl's way",
        lambda config: _has_adapter(config) and _of(config, "trainer.device") == "cpu",
        {"actor_rollout_ref.model.lora_rank": 8},
        also="adapters are sent to engines; refused with `keep_kv`",
        brief="LoRA on a CPU",
    ),
    Row(
        "trainer",
        "LoRA on GPUs",
        UNTRIED,
        "what differs is how the weights below an adapter travel",
        lambda config: _has_adapter(config) and _of(config, "trainer.device") != "cpu",
        {"actor_rollout_ref.model.lora_rank": 8, "trainer.device": "cuda"},
        brief="LoRA on GPUs",
    ),
    Row(
        "trainer",
        "distillation from a teacher",
        UNTRIED,
        "the teacher's log-probs of a continued response were not looked at",
        _is("distillation.enabled", True),
        {"distillation.enabled": True},
    ),
    Row(
        "algorithm",
        "GRPO, DAPO's losses",
        TESTED,
        "`tests/e2e/test_training.py`; DAPO's clipping: `tests/e2e/test_adaptive.py`",
        _is("algorithm.adv_estimator", "grpo"),
        brief="GRPO, DAPO",
    ),
    Row(
        "algorithm",
        "losses of verl other than PPO's and DAPO's (GSPO, CISPO, Dr. GRPO, other means over tokens)",
        UNTRIED,
        "nothing of theirs depends on how a response came about",
        _has_another_loss,
        {f"{ACTOR}.policy_loss.loss_mode": "gspo"},
    ),
    Row(
        "algorithm",
        "RLOO",
        SEEN_ON_CPU,
        "`make matrix` (benchmarks/results/matrix.json)",
        _is("algorithm.adv_estimator", "rloo"),
        {"algorithm.adv_estimator": "rloo"},
        brief="RLOO",
    ),
    Row(
        "algorithm",
        "REINFORCE++",
        SEEN_ON_CPU,
        "`make matrix` (benchmarks/results/matrix.json)",
        _is("algorithm.adv_estimator", "reinforce_plus_plus"),
        {"algorithm.adv_estimator": "reinforce_plus_plus"},
        brief="REINFORCE++",
    ),
    Row(
        "algorithm",
        "OPO",
        SEEN_ON_CPU,
        "`make matrix` (benchmarks/results/matrix.json)",
        _is("algorithm.adv_estimator", "opo"),
        {"algorithm.adv_estimator": "opo"},
        brief="OPO",
    ),
    Row(
        "algorithm",
        "other estimators",
        UNTRIED,
        "nobody has looked at them, nor at verl's variants `rloo_vectorized` and `reinforce_plus_plus_baseline`",
        lambda config: _of(config, "algorithm.adv_estimator") not in KNOWN_ESTIMATORS,
        {"algorithm.adv_estimator": "gpg"},
    ),
    Row(
        "algorithm",
        "ReMax",
        REFUSED,
        "it needs a greedy baseline from the same weights as the sampled response",
        _is("algorithm.adv_estimator", "remax"),
        {"algorithm.adv_estimator": "remax"},
        brief="ReMax: its baseline needs the same weights",
    ),
    Row(
        "algorithm",
        "token-level truncated importance sampling, the flag's correction",
        TESTED,
        "`tests/e2e/test_training.py`",
        lambda config: _correction(config) == TOKEN_LEVEL,
        {f"{CORRECTION_BLOCK}.rollout_is": "token"},
    ),
    Row(
        "algorithm",
        "the engine's log-probs as old ones (`bypass_mode`)",
        SEEN,
        "[124 steps on an H200](results/gpu.md#rollout-log-probs-as-old-ones-82-steps), and "
        "[23 of 4B](results/gpu.md#beside-sync-and-with-rollout-log-probs-as-old-ones) with a learning rate of 0",
        lambda config: _correction(config) in BYPASS,
        {f"{CORRECTION_BLOCK}.bypass_mode": True},
    ),
    Row(
        "algorithm",
        "the same with the loss that weighs tokens (`loss_type=reinforce`)",
        TESTED,
        "`tests/unit/settings/test_one_step.py`: the gradient is that of the usual loss where a batch is one optimizer "
        "step; `tests/e2e/test_adaptive.py`. [186 steps on an "
        "H100](results/gpu.md#a-third-seed-and-no-old-log-probs-up-to-186-steps), and [14 of "
        "4B](results/gpu.md#todays-loss-and-all-activations-kept) with a learning rate of 0",
        lambda config: _correction(config) == WEIGHED,
        {f"{CORRECTION_BLOCK}.bypass_mode": True, f"{CORRECTION_BLOCK}.loss_type": REINFORCE},
    ),
    Row(
        "algorithm",
        "other off-policy corrections",
        UNTRIED,
        "`rollout_is=sequence` or normalised, `rollout_rs`: what they do to responses with tokens of several weight "
        "versions was not looked at",
        lambda config: _correction(config) not in ({}, TOKEN_LEVEL, *BYPASS, WEIGHED),
        {f"{CORRECTION_BLOCK}.rollout_is": "sequence"},
    ),
    Row(
        "algorithm",
        "`filter_groups` (DAPO's dynamic sampling)",
        TESTED,
        "`tests/e2e/test_adaptive.py`; as in verl's asynchronous modes: k groups without spread are dropped, k fresh "
        "prompts are sampled at once; `max_num_gen_batches` is ignored with a warning",
        _is("algorithm.filter_groups.enable", True),
        {"algorithm.filter_groups.enable": True},
        brief="`filter_groups`",
    ),
    Row(
        "algorithm",
        "`rollout.full_determinism`",
        REFUSED,
        "what is interrupted depends on the clock",
        _is(f"{ROLLOUT}.full_determinism", True),
        {f"{ROLLOUT}.full_determinism": True},
    ),
    Row(
        "reward",
        "functions, rule-based or your own",
        TESTED,
        "`tests/e2e/test_training.py`, `tests/e2e/test_adaptive.py`",
        lambda config: not _has_reward_model(config),
        brief="functions",
    ),
    Row(
        "reward",
        "reward model on devices of its own (a reward function asks it)",
        SEEN_ON_CPU,
        "a classifier, `make matrix`: over interruptions and a restart. Its engines are verl's own",
        _own_pool,
        {
            "reward.reward_model.enable": True,
            "reward.reward_model.enable_resource_pool": True,
            "reward.custom_reward_function.path": "pkg://mine",
        },
        brief="reward model asked by a function",
    ),
    Row(
        "reward",
        "reward model as the only reward",
        REFUSED,
        "verl 0.9.1 itself ends each of its responses with `KeyError: 'reward_extra_info'`, without the flag too",
        _scores_alone,
        {
            "reward.reward_model.enable": True,
            "reward.reward_model.enable_resource_pool": True,
            "reward.custom_reward_function.path": None,
        },
        brief="reward model alone: verl 0.9.1 fails",
    ),
    Row(
        "reward",
        "reward model on the engines' GPUs",
        REFUSED,
        "it puts engines to sleep while they generate",
        _shares_reward_devices,
        {"reward.reward_model.enable": True, "reward.reward_model.enable_resource_pool": False},
        brief="reward model on the engines' GPUs: it stops engines",
    ),
    Row("agent loop", "single turn", TESTED, "`tests/e2e/test_training.py`", _is_one_call, brief="single turn"),
    Row(
        "agent loop",
        "several calls of one trajectory; tools",
        TESTED,
        "`tests/engine/test_turns.py`",
        _calls_tools,
        {f"{ROLLOUT}.multi_turn.enable": True},
        also="with a scripted agent, on a CPU; on GPUs the tool recipe ran, and its random model called no tool",
        brief="tool calls of a scripted agent",
    ),
    Row(
        "agent loop",
        "vision-language model (Qwen2.5-VL) on a CPU",
        SEEN_ON_CPU,
        "`make matrix` (benchmarks/results/matrix.json): rows with images, over interruptions and a restart. With "
        "`keep_kv` such a request is aborted and sent again. Such responses are not in the log of rollouts",
        _is_seen_with_images,
        {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-VL-7B-Instruct"},
        brief="images",
    ),
    Row(
        "agent loop",
        "images, video, audio as input, on GPUs or with other models",
        UNTRIED,
        "a tiny Qwen2.5-VL with images was run on a CPU",
        lambda config: _takes_media(config) and not _is_seen_with_images(config),
        {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-VL-7B-Instruct", "trainer.device": "cuda"},
    ),
    Row(
        "sampling",
        "`temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `seed`, `stop_token_ids`, `min_tokens`, "
        "`ignore_eos`",
        TESTED,
        "`tests/engine/test_interruption.py`, `tests/unit/rollout/test_client.py`; limits count over the whole "
        "response. With drafts vLLM refuses each sampled request with `min_p`",
        brief="temperature, `top_p`, `top_k`, seeds, stop tokens, `min_tokens`",
    ),
    Row(
        "sampling",
        "`stop` strings, with `include_stop_str_in_output`",
        TESTED,
        "`tests/engine/test_interruption.py`; looked for in the whole response. As in vLLM, tokens of the string are "
        "in the response; the parameter is about text, which training does not see. If a string falls on an "
        "interruption, the engine sees only a part of it: then it goes on to the response's end, and what comes after "
        "the string is cut",
        brief="stop strings",
    ),
    Row(
        "sampling",
        "`bad_words`, `presence_penalty`, `frequency_penalty`, `structured_outputs`, "
        "`repetition_detection`, `thinking_token_budget`",
        REFUSED,
        "their state in the engine covers one request; a continued response would start it anew",
        brief="presence and frequency penalties, structured output: their state is one request's",
    ),
    Row(
        "other",
        "routing replay",
        UNTRIED,
        "tokens come with a request's end only",
        lambda config: (
            bool(_of(config, f"{ROLLOUT}.enable_rollout_routing_replay"))
            or any(_of(config, f"{ACTOR}.{key}.mode", "disabled") != "disabled" for key in REPLAYS)
        ),
        {f"{ROLLOUT}.enable_rollout_routing_replay": True},
        also="refused with `keep_kv` and `offload_kv`",
    ),
    Row(
        "other",
        "`trainer.val_only`",
        UNTRIED,
        "a run that only validates interrupts nothing, so it gains nothing",
        _is("trainer.val_only", True),
        {"trainer.val_only": True},
    ),
    Row(
        "other",
        "draft models (MTP)",
        UNTRIED,
        "tokens come with a request's end only",
        _is(f"{ROLLOUT}.mtp.enable_rollout", True),
        {f"{ROLLOUT}.mtp.enable_rollout": True},
        also="refused with `keep_kv`",
    ),
    Row(
        "other",
        "drafts by `SuffixDrafts` (`engine_kwargs.vllm.speculative_config`)",
        SEEN,
        "`run_smollm2_reasoning_gym.sh` with `sync` (two jobs) and with the flag alone (three, of which one was "
        "started again from its checkpoint), on one engine of one GPU; an engine in "
        "`tests/gpu/test_drafts.py`, on a CPU in `tests/engine/test_drafts.py`",
        lambda config: _drafter(config) == SUFFIX_DRAFTS,
        {SPECULATION: {"method": "custom_class", "model": SUFFIX_DRAFTS}, "trainer.device": "cuda"},
        also="refused on a CPU",
    ),
    Row(
        "other",
        "drafts with `offload_kv`",
        UNTRIED,
        "no engine has copied KV to host memory while it drafted; `auto` takes another mode",
        lambda config: (
            _drafter(config) is not None and _of(config, "partial_rollout.tail.interrupt_mode") == "offload_kv"
        ),
        {
            SPECULATION: {"method": "custom_class", "model": SUFFIX_DRAFTS},
            "trainer.device": "cuda",
            f"{ROLLOUT}.free_cache_engine": True,
            "partial_rollout.tail.interrupt_mode": "offload_kv",
            "partial_rollout.tail.offload_gib": 8,
        },
        also="refused on a CPU",
    ),
    Row(
        "other",
        "other drafts",
        UNTRIED,
        "`SuffixDrafts` is what has run",
        lambda config: _drafter(config) not in (None, SUFFIX_DRAFTS),
        {SPECULATION: {"method": "ngram"}, "trainer.device": "cuda"},
        also="refused on a CPU",
    ),
    Row(
        "other",
        "separate prefill and decode engines",
        UNTRIED,
        "weights travel by verl's way",
        _is(f"{ROLLOUT}.disaggregation.enabled", True),
        {f"{ROLLOUT}.disaggregation.enabled": True},
        also="refused with modes that retain KV",
    ),
)


def rows_of(config: DictConfig) -> list[Row]:
    """The rows that apply to a composed configuration."""
    return [row for row in ROWS if row.applies is not None and row.applies(config)]


def summary() -> str:
    """The README's short table, as Markdown: a row for each part, a column for each state."""
    states = ((TESTED,), (SEEN, SEEN_ON_CPU), (UNTRIED,), (REFUSED,))
    lines = ["| part | in the tests | seen once | not tried | refused, and why |", "|---|---|---|---|---|"]
    for part in dict.fromkeys(row.part for row in ROWS if row.brief):
        cells = [
            "; ".join(
                f"{row.brief} on a CPU" if row.state == SEEN_ON_CPU else row.brief
                for row in ROWS
                if row.brief and row.part == part and row.state in column
            )
            for column in states
        ]
        lines.append(" ".join(f"| {part} {''.join(f'| {cell} ' for cell in cells)}|".split()))
    return "\n".join(lines) + "\n"


def table() -> str:
    """A Markdown table; a part is named in its first row only."""
    lines, last = ["| part | value | state | why, or where |", "|---|---|---|---|"], ""
    for row in ROWS:
        state = f"{row.state}; {row.also}" if row.also else row.state
        part = row.part if row.part != last else ""
        lines.append(f"| {part} | {row.what} | {state} | {row.where} |".replace("|  |", "| |", 1))
        last = row.part
    return "\n".join(lines) + "\n"
