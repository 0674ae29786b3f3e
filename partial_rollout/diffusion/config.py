"""Settings of an image job, typed and checked before anything is started; configs/diffusion.yaml explains each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from partial_rollout.diffusion.contract import QWEN_IMAGE
from partial_rollout.diffusion.sampling import NO_CFG
from partial_rollout.diffusion.sde import SDE_TYPES
from partial_rollout.diffusion.sde_window import WindowPlan
from partial_rollout.errors import ConfigError
from partial_rollout.settings.block import require

if TYPE_CHECKING:
    from collections.abc import Mapping

INTERRUPTS = ("hold", "snapshot")
DTYPES = ("bfloat16", "float32")
DEVICES = ("cpu", "cuda")
RESUME_MODES = ("auto", "disable")
MAX_STEPS = 200
"""Denoise steps of an image. Schedules are made for far fewer: a larger number is a slip of the pen."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model that is trained."""

    path: str
    architecture: str = QWEN_IMAGE
    dtype: str = "bfloat16"
    lora_rank: int = 0
    lora_alpha: int = 64

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        require(self.dtype in DTYPES, "model.dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        require(self.lora_rank >= 0, "model.lora_rank", self.lora_rank, "0, which trains all weights, or more")
        require(self.lora_alpha >= 1, "model.lora_alpha", self.lora_alpha, "at least 1")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Where prompts come from."""

    prompts: str
    negative_prompt: str | None = None


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """FlowGRPO or MixGRPO."""

    name: str = "flow_grpo"
    noise_level: float = 0.7
    sde_type: str = "sde"
    sde_window_size: int = 2
    sde_window_first: int = 0
    sde_window_last: int = 5
    sde_window_interval: int | None = None
    clip_ratio: float = 1.0e-4
    max_advantage: float = 5.0
    rollout_is_threshold: float = 2.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        require(self.sde_type in SDE_TYPES, "algorithm.sde_type", self.sde_type, " or ".join(SDE_TYPES))
        require(
            self.noise_level > 0, "algorithm.noise_level", self.noise_level, "above 0: without noise nothing is learnt"
        )
        # The standard deviation of cps is a sine, which falls again beyond 1.
        steady = self.sde_type != "cps" or self.noise_level <= 1
        require(steady, "algorithm.noise_level", self.noise_level, "at most 1 with algorithm.sde_type=cps")
        require(
            self.sde_window_size >= 1, "algorithm.sde_window_size", self.sde_window_size, "at least 1, for training"
        )
        for name in ("clip_ratio", "max_advantage", "rollout_is_threshold"):
            require(getattr(self, name) > 0, f"algorithm.{name}", getattr(self, name), "above 0")
        self.window_plan()

    def window_plan(self) -> WindowPlan:
        """Where SDE windows may lie; raises ConfigError if no window fits."""
        return WindowPlan(self.sde_window_size, self.sde_window_first, self.sde_window_last, self.sde_window_interval)

    def check_window(self, *, is_shared: bool) -> None:
        """Raise ConfigError if the window is to move over the training steps, but each request draws its own.

        `is_shared`: whether all requests of a training step have the same window (`Adapter.shares_window`).
        """
        interval = self.sde_window_interval
        allowed = f"null with algorithm.name={self.name}, which draws a window for each request"
        require(is_shared or interval is None, "algorithm.sde_window_interval", interval, allowed)


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How images are generated."""

    step_execution: bool = True
    interrupt: str = "hold"
    n: int = 8
    num_steps: int = 10
    height: int = 512
    width: int = 512
    true_cfg_scale: float = NO_CFG
    max_num_seqs: int = 8
    num_servers: int = 1
    gpus_per_server: int = 1
    prefetch_factor: float = 2.0
    timeout_s: float = 7200.0
    stall_s: float = 300.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        require(self.interrupt in INTERRUPTS, "rollout.interrupt", self.interrupt, " or ".join(INTERRUPTS))
        require(self.n >= 2, "rollout.n", self.n, "at least 2: an advantage compares the images of one prompt")
        for name in ("num_steps", "height", "width", "max_num_seqs", "num_servers"):
            require(getattr(self, name) >= 1, f"rollout.{name}", getattr(self, name), "at least 1")
        require(self.num_steps <= MAX_STEPS, "rollout.num_steps", self.num_steps, f"at most {MAX_STEPS}")
        for name in ("timeout_s", "stall_s"):
            require(getattr(self, name) > 0, f"rollout.{name}", getattr(self, name), "a number of seconds above 0")
        require(self.gpus_per_server in (0, 1), "rollout.gpus_per_server", self.gpus_per_server, "0, a CPU, or 1")
        require(self.prefetch_factor >= 1, "rollout.prefetch_factor", self.prefetch_factor, "at least 1")
        whole = self.step_execution or self.prefetch_factor == 1
        allowed = "1 with rollout.step_execution=false, which cannot interrupt what was begun"
        require(whole, "rollout.prefetch_factor", self.prefetch_factor, allowed)


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """How the model is trained."""

    device: str = "cuda"
    lr: float = 3.0e-4
    weight_decay: float = 1.0e-4
    max_grad_norm: float = 1.0
    num_mini_batches: int = 1
    micro_batch_size: int = 8
    gradient_checkpointing: bool = True

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        require(self.device in DEVICES, "actor.device", self.device, " or ".join(DEVICES))
        for name in ("lr", "max_grad_norm"):
            require(getattr(self, name) > 0, f"actor.{name}", getattr(self, name), "above 0")
        for name in ("num_mini_batches", "micro_batch_size"):
            require(getattr(self, name) >= 1, f"actor.{name}", getattr(self, name), "at least 1")


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """How long the job trains, and where its results go."""

    output_dir: str
    reward: str
    total_training_steps: int = 100
    train_batch_size: int = 8
    seed: int = 0
    num_pictures: int = 16
    save_minutes: float | None = 20.0
    save_freq: int = -1
    max_actor_ckpt_to_keep: int = 1
    resume_mode: str = "auto"
    timeout_s: float = 3600.0
    reward_s: float = 1800.0
    weights_timeout_s: float = 60.0
    stop_s: float = 120.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        for name in ("total_training_steps", "train_batch_size", "max_actor_ckpt_to_keep"):
            require(getattr(self, name) >= 1, f"trainer.{name}", getattr(self, name), "at least 1")
        require(self.num_pictures >= 0, "trainer.num_pictures", self.num_pictures, "at least 0")
        minutes = self.save_minutes
        require(minutes is None or minutes > 0, "trainer.save_minutes", minutes, "null or a number above 0")
        require(self.resume_mode in RESUME_MODES, "trainer.resume_mode", self.resume_mode, " or ".join(RESUME_MODES))
        for name in ("timeout_s", "reward_s", "weights_timeout_s", "stop_s"):
            require(getattr(self, name) > 0, f"trainer.{name}", getattr(self, name), "a number of seconds above 0")


@dataclass(frozen=True, slots=True)
class DiffusionConfig:
    """All settings; a test compares the defaults with configs/diffusion.yaml."""

    model: ModelConfig
    data: DataConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)

    def __post_init__(self) -> None:
        """Raise ConfigError for values that contradict each other."""
        last = self.rollout.num_steps - (self.algorithm.sde_type == "cps")
        allowed = f"at most {last}: rollout.num_steps={self.rollout.num_steps}, and the last step of cps adds no noise"
        require(
            self.algorithm.sde_window_last <= last, "algorithm.sde_window_last", self.algorithm.sde_window_last, allowed
        )
        guided, negative = self.rollout.true_cfg_scale > NO_CFG, self.data.negative_prompt is not None
        allowed = f"given with rollout.true_cfg_scale={self.rollout.true_cfg_scale}, which is above 1"
        allowed = allowed if guided else "null: rollout.true_cfg_scale is not above 1"
        require(guided == negative, "data.negative_prompt", self.data.negative_prompt, allowed)

    def check_sizes(self, multiple: int) -> None:
        """Raise ConfigError unless height and width are multiples of `multiple`, the pixels per latent token."""
        for name in ("height", "width"):
            value = getattr(self.rollout, name)
            require(value % multiple == 0, f"rollout.{name}", value, f"a multiple of {multiple} for this model")

    @property
    def shares_device(self) -> bool:
        """Whether training and rollout use one device: the CPU. Each server on a GPU has a GPU of its own."""
        return self.actor.device == "cpu" and self.rollout.gpus_per_server == 0

    @classmethod
    def from_mapping(cls, block: Mapping[str, Any]) -> DiffusionConfig:
        """Build from a plain mapping (`OmegaConf.to_container`).

        Raises:
            ConfigError: an unknown key, a wrong type or a value out of range.
        """
        return _build(cls, block, prefix="")


def _build(cls: type, block: Mapping[str, Any], *, prefix: str) -> Any:
    """A configuration dataclass from a plain mapping; `prefix` is where the mapping stands, for messages.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range.
    """
    hints = get_type_hints(cls)
    unknown = sorted(set(block) - set(hints))
    if unknown:
        raise ConfigError(f"unknown key {prefix}{unknown[0]}; known here: {', '.join(sorted(hints))}")
    return cls(**{key: _convert(hints[key], value, key=f"{prefix}{key}") for key, value in block.items()})


def _convert(hint: Any, value: Any, *, key: str) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not hasattr(value, "items"):
            raise ConfigError(f"{key}={value!r} is not allowed: must be a block of keys")
        return _build(hint, value, prefix=f"{key}.")
    if float in (hint, *get_args(hint)) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, bool) and hint is not bool or not isinstance(value, hint):
        raise ConfigError(f"{key}={value!r} is not allowed: must be of type {getattr(hint, '__name__', hint)}")
    return value
