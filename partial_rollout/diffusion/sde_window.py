"""Which denoise steps of a trajectory are stochastic, and so trained. Pure.

Inside its window a trajectory takes SDE steps with a log-prob, outside of it ODE steps without noise (Flow-GRPO-Fast,
arXiv 2505.05470; MixGRPO, arXiv 2507.21802). A window is fixed before a request is encoded and never changes, however
often the request is interrupted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from partial_rollout.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SdeWindow:
    """Steps `start <= step < stop`; empty when both are equal."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        """Raise ConfigError for a window that ends before it starts."""
        if not 0 <= self.start <= self.stop:
            raise ConfigError(f"SDE window [{self.start}, {self.stop}) is not allowed: 0 <= start <= stop is needed")

    def __contains__(self, step: int) -> bool:
        """Whether `step` is stochastic."""
        return self.start <= step < self.stop

    def __len__(self) -> int:
        """Number of stochastic steps."""
        return self.stop - self.start


NO_WINDOW = SdeWindow(0, 0)


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Where windows may lie: `size` steps within `first <= step < last`."""

    size: int
    first: int
    last: int

    def __post_init__(self) -> None:
        """Raise ConfigError for a range that no window of this size fits."""
        if self.size < 0 or self.first < 0 or self.first + self.size > self.last:
            raise ConfigError(
                f"algorithm.sde_window_size={self.size} does not fit from algorithm.sde_window_first={self.first} to "
                f"algorithm.sde_window_last={self.last}: must be 0 to {max(0, self.last - self.first)}"
            )

    def draw(self, *key: int | str) -> SdeWindow:
        """The window that belongs to `key`, the same in every process."""
        # A string seed is hashed with SHA-512; a tuple's hash is another one in each process.
        start = random.Random(repr(key)).randint(self.first, self.last - self.size)
        return SdeWindow(start, start + self.size)


def window_of_request(plan: WindowPlan, *, run_seed: int, global_step: int, request_seed: int) -> SdeWindow:
    """FlowGRPO: every request has a window of its own."""
    return plan.draw("flow_grpo", run_seed, global_step, request_seed)


def window_of_step(plan: WindowPlan, *, run_seed: int, global_step: int, request_seed: int) -> SdeWindow:
    """MixGRPO: all requests of a training step share one window, whichever engine they run on and whenever they start.

    `request_seed` is not used: a window that depends on the request would not be shared.
    """
    del request_seed
    return plan.draw("mix_grpo", run_seed, global_step)
