"""The `partial_rollout` configuration block, typed and checked before anything is started."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from partial_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

BLOCK = "partial_rollout"
RETIRED_KEYS = {
    "manager.namespace": f"leave it out: {BLOCK}.manager.name tells concurrent runs apart",
    "slots.kv_high": "leave it out: the KV cache counts as full when 90 % are in use",
    "tail.boundary": "leave it out: the end of a step interrupts what is unfinished, as tail.boundary=now did",
    "packing.per_rank_batch_size": f"leave it out: {BLOCK}.packing.token_budget bounds what a row holds",
    "packing.cost_model": "leave it out: the model's own sizes say what a row costs, and verl's formula does where the "
    "model has none",
    "costs": "leave the block out: only tail.boundary=cost read it, which is retired as well",
}
"""Keys of release 0.1 below the block, and what to do instead; 0.3 knows them no more."""
_NO_PLANNER = f"leave {BLOCK}.packing.planner out, or set it to verl"
RETIRED_VALUES = {
    ("packing.planner", "fixed"): _NO_PLANNER,
    ("packing.planner", "budget"): _NO_PLANNER,
    ("tail.interrupt_mode", "keep"): f"set {BLOCK}.tail.interrupt_mode=abort, which computes as much again and "
    "holds no request in the engine, or keep_kv, which computes nothing again",
}
"""The same for values of keys that stay."""


def _require(condition: bool, key: str, value: object, allowed: str) -> None:
    require(condition, f"{BLOCK}.{key}", value, allowed)


def _refuse_retired(key: str, value: str) -> None:
    way_out = RETIRED_VALUES.get((key, value))
    if way_out:
        raise ConfigError(f"{BLOCK}.{key}={value} was retired in release 0.2: {way_out} (see CHANGELOG.md)")


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise ConfigError for the key, its value and what is allowed, unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key}={value!r} is not allowed: must be {allowed} (set {key}=...)")


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """Name under which the prompt manager is found from any shell."""

    name: str = "rollout_prompt_manager"

    def __post_init__(self) -> None:
        """Raise ConfigError for an empty name."""
        _require(bool(self.name), "manager.name", self.name, "a non-empty string")


@dataclass(frozen=True, slots=True)
class TimeoutConfig:
    """Upper bounds of all waits, in seconds."""

    start_s: float = 600.0
    resources_s: float = 30.0
    drain_s: float = 60.0
    resume_s: float = 600.0
    batch_s: float = 7200.0
    call_s: float = 60.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a bound that is not positive."""
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            _require(value > 0, f"timeouts.{item.name}", value, "a number of seconds above 0")


PLANNERS = ("global", "verl")


@dataclass(frozen=True, slots=True)
class PackingConfig:
    """Which samples train together: the planner of micro-batches, see docs/design/0004."""

    planner: str = "global"
    token_budget: int | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown name or a size below 1."""
        _refuse_retired("packing.planner", self.planner)
        _require(self.planner in PLANNERS, "packing.planner", self.planner, f"one of {', '.join(PLANNERS)}")
        budget = self.token_budget
        _require(budget is None or budget >= 1, "packing.token_budget", budget, "null or at least 1")


OLD_NAME_OF_WAIT = "sync"
"""In release 0.1; accepted until 0.3, because jobs in flight should not stop for a name."""
TAIL_POLICIES = ("partial", "wait", "reorder")
PAST_STALENESS = ("mask", "drop", "finish", "restart")
OVER_SAMPLING = 1.25
"""Groups of a short round in batches: the original reorder rollout's example, 10 for 8."""
MAX_OVER_SAMPLING = 2
"""Beyond it more groups are left behind by a round than it trains, and those wait for one another."""
INTERRUPT_MODES = ("abort", "keep_kv", "reuse_kv", "offload_kv")
DEFERRAL_LIMIT = 8
"""Twice the rounds in which what they leave behind fills a batch at best, so that most of it gets a long round."""


_OFFLOAD_SIZE = f"a number of GiB with {BLOCK}.tail.interrupt_mode=offload_kv, and null with any other"


@cache
def _warn_of_old_name() -> None:
    given = f"{BLOCK}.tail.policy"
    logger.warning(
        "%s=%s is called %s=wait since release 0.2; 0.3 refuses the old name", given, OLD_NAME_OF_WAIT, given
    )


@dataclass(frozen=True, slots=True)
class TailConfig:
    """What becomes of a batch's longest responses, see docs/design/0006."""

    policy: str = "partial"
    gen_batch_size: int | None = None
    max_deferred_per_round: int | None = None
    max_deferrals: int | None = None
    max_staleness: int | None = None
    interrupt_mode: str = "abort"
    offload_gib: int | None = None
    past_staleness: str = "mask"

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown policy, a count below 1, or a key that the others leave without use."""
        if self.policy == OLD_NAME_OF_WAIT:
            _warn_of_old_name()
            object.__setattr__(self, "policy", "wait")
        _require(self.policy in TAIL_POLICIES, "tail.policy", self.policy, f"one of {', '.join(TAIL_POLICIES)}")
        past, bound = self.past_staleness, self.max_staleness
        _require(past in PAST_STALENESS, "tail.past_staleness", past, f"one of {', '.join(PAST_STALENESS)}")
        unbounded = f"mask without a bound: set {BLOCK}.tail.max_staleness as well"
        _require(past == "mask" or bound is not None, "tail.past_staleness", past, unbounded)
        _require(bound is None or bound >= 0, "tail.max_staleness", bound, "null or at least 0")
        for name in ("gen_batch_size", "max_deferred_per_round", "max_deferrals"):
            value = getattr(self, name)
            unused = f"null with {BLOCK}.tail.policy={self.policy}, which defers nothing: policy=reorder uses it"
            _require(value is None or self.policy == "reorder", f"tail.{name}", value, unused)
            _require(value is None or value >= 1, f"tail.{name}", value, "null or at least 1")
        self._check_interrupt_mode()

    def _check_interrupt_mode(self) -> None:
        mode, key = self.interrupt_mode, "tail.interrupt_mode"
        _refuse_retired(key, mode)
        _require(mode in INTERRUPT_MODES, key, mode, f"one of {', '.join(INTERRUPT_MODES)}")
        unused = f"abort with {BLOCK}.tail.policy=wait, which interrupts nothing"
        _require(mode == "abort" or self.policy != "wait", key, mode, unused)
        leaves = f"abort, reuse_kv or offload_kv with {BLOCK}.tail.policy=reorder: what it defers leaves the engine"
        _require(mode != "keep_kv" or self.policy != "reorder", key, mode, leaves)
        size = self.offload_gib
        _require(size is None or size >= 1, "tail.offload_gib", size, "null or at least 1")
        _require((size is not None) == (mode == "offload_kv"), "tail.offload_gib", size, _OFFLOAD_SIZE)

    @property
    def deferral_limit(self) -> int:
        """Deferrals after which a group must be trained."""
        return self.max_deferrals or DEFERRAL_LIMIT

    def groups_per_round(self, train_batch_size: int) -> int:
        """Prompt groups in generation at the same time, by default."""
        if self.policy != "reorder":
            return train_batch_size
        return self.gen_batch_size or math.ceil(OVER_SAMPLING * train_batch_size)

    def check_batch(self, train_batch_size: int) -> None:
        """Raise ConfigError for sizes that do not fit a batch of `train_batch_size` prompts."""
        size, most = self.groups_per_round(train_batch_size), MAX_OVER_SAMPLING * train_batch_size
        allowed = f"above data.train_batch_size={train_batch_size} and at most {most}"
        _require(
            self.policy != "reorder" or train_batch_size < size <= most,
            "tail.gen_batch_size",
            size,
            f"{allowed}; to train all that is started use {BLOCK}.tail.policy=wait",
        )
        few = self.max_deferred_per_round
        allowed = f"at most data.train_batch_size={train_batch_size}: one round cannot train more"
        _require(few is None or few <= train_batch_size, "tail.max_deferred_per_round", few, allowed)


@dataclass(frozen=True, slots=True)
class SlotsConfig:
    """Whether the number of trajectory slots follows the engines' load, see docs/design/0006."""

    adaptive: bool = False
    least: int | None = None
    most: int | None = None
    interval_s: float = 5.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range, or a bound of a budget that does not move."""
        for name in ("least", "most"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"slots.{name}", value, "null or at least 1")
            unused = f"null with {BLOCK}.slots.adaptive=false: the number of slots is {BLOCK}.num_slots"
            _require(value is None or self.adaptive, f"slots.{name}", value, unused)
        _require(self.interval_s > 0, "slots.interval_s", self.interval_s, "a number of seconds above 0")


WEIGHT_BACKENDS = ("auto", "channel", "verl")


@dataclass(frozen=True, slots=True)
class WeightsConfig:
    """How new weights travel from the training workers to the engines."""

    backend: str = "auto"
    timeout_s: float = 60.0
    bucket_mb: int | None = None
    validate: bool = False
    relaunches: int = 1

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown backend or a size, bound or number out of range."""
        _require(self.backend in WEIGHT_BACKENDS, "weights.backend", self.backend, f"one of {WEIGHT_BACKENDS}")
        _require(self.timeout_s > 0, "weights.timeout_s", self.timeout_s, "a number of seconds above 0")
        _require(
            self.bucket_mb is None or self.bucket_mb >= 1, "weights.bucket_mb", self.bucket_mb, "null or at least 1"
        )
        _require(self.relaunches >= 0, "weights.relaunches", self.relaunches, "at least 0")

    @property
    def buffer_bytes(self) -> int | None:
        """Size of one slot; None leaves it to the transport."""
        return None if self.bucket_mb is None else self.bucket_mb << 20


PREFETCH_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class PartialRolloutConfig:
    """All settings of this package; a test compares the defaults with configs/partial_rollout/default.yaml."""

    prefetch_factor: float = PREFETCH_FACTOR
    num_slots: int | None = None
    max_attempts: int = 2
    stream_interval: int = 32
    event_log: str | None = None
    manager: ManagerConfig = field(default_factory=ManagerConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    tail: TailConfig = field(default_factory=TailConfig)
    slots: SlotsConfig = field(default_factory=SlotsConfig)

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        _require(self.prefetch_factor >= 1, "prefetch_factor", self.prefetch_factor, "a number of at least 1")
        unused = f"left out with {BLOCK}.tail.policy={self.tail.policy}, which decides how many prompts are in flight"
        in_use = self.tail.policy == "partial" or self.prefetch_factor == PREFETCH_FACTOR
        _require(in_use, "prefetch_factor", self.prefetch_factor, unused)
        _require(self.num_slots is None or self.num_slots >= 1, "num_slots", self.num_slots, "null or at least 1")
        _require(self.max_attempts >= 1, "max_attempts", self.max_attempts, "at least 1")
        _require(self.stream_interval >= 1, "stream_interval", self.stream_interval, "at least 1")
        self._check_together()

    def _check_together(self) -> None:
        policy, restarts = self.tail.policy, self.tail.past_staleness == "restart"
        again = f"at least 2 with {BLOCK}.tail.past_staleness=restart; to try prompts once set past_staleness=drop"
        _require(self.max_attempts > 1 or not restarts, "max_attempts", self.max_attempts, again)
        unused = f"false with {BLOCK}.tail.policy={policy}, whose rounds start no more than there are slots for"
        _require(policy == "partial" or not self.slots.adaptive, "slots.adaptive", self.slots.adaptive, unused)

    @classmethod
    def from_mapping(cls, block: Mapping[str, Any]) -> PartialRolloutConfig:
        """Build from a plain mapping (`OmegaConf.to_container`).

        Raises:
            ConfigError: an unknown key, a wrong type or a value out of range.
        """
        return build(cls, block, prefix=f"{BLOCK}.")

    @classmethod
    def from_rollout(cls, custom: Mapping[str, Any] | None) -> PartialRolloutConfig:
        """The block as engines see it: in verl's `rollout.custom`, under the same name; without it, the defaults.

        Raises:
            ConfigError: as `from_mapping`.
        """
        return cls.from_mapping((custom or {}).get(BLOCK) or {})

    def capacity(self, train_batch_size: int) -> int:
        """Largest number of prompts in flight for a batch of `train_batch_size` prompts."""
        return max(train_batch_size, int(self.prefetch_factor * train_batch_size))


def build(cls: type, block: Mapping[str, Any], *, prefix: str) -> Any:
    """A configuration dataclass from a plain mapping; `prefix` is where the mapping stands, for messages.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range.
    """
    hints = get_type_hints(cls)
    unknown = sorted(set(block) - set(hints))
    retired = RETIRED_KEYS.get(f"{prefix}{unknown[0]}".removeprefix(f"{BLOCK}.")) if unknown else None
    if retired:
        raise ConfigError(f"{prefix}{unknown[0]} was retired in release 0.2: {retired} (see CHANGELOG.md)")
    if unknown:
        raise ConfigError(f"unknown key {prefix}{unknown[0]}; known here: {', '.join(sorted(hints))}")
    return cls(**{key: _convert(hints[key], value, key=f"{prefix}{key}") for key, value in block.items()})


def _convert(hint: Any, value: Any, *, key: str) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not hasattr(value, "items"):
            raise ConfigError(f"{key}={value!r} is not allowed: must be a block of keys")
        return build(hint, value, prefix=f"{key}.")
    if float in (hint, *get_args(hint)) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, bool) and hint is not bool or not isinstance(value, hint):
        raise ConfigError(f"{key}={value!r} is not allowed: must be of type {getattr(hint, '__name__', hint)}")
    return value
