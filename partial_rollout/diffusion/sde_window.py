"""Which denoise steps of an image are stochastic, and therefore trained: those in its SDE window. Pure.

Inside its window a sample takes SDE steps, which have a log-prob; outside of it ODE steps without noise
(Flow-GRPO-Fast, arXiv 2505.05470; MixGRPO, arXiv 2507.21802). The window is drawn before the
request is sent and never changes, however often the request is interrupted.
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
            raise ConfigError(f"SDE window [{self.start}, {self.stop}) is not allowed: must have 0 <= start <= stop")

    def __contains__(self, step: int) -> bool:
        """Whether `step` is stochastic."""
        return self.start <= step < self.stop

    def __len__(self) -> int:
        """Number of stochastic steps."""
        return self.stop - self.start


NO_WINDOW = SdeWindow(0, 0)


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Where windows may lie: `size` steps within `first <= step < last`.

    MixGRPO's window stays `interval` training steps where it is and then moves on by one denoise step; None: it is
    drawn at random in each training step.

    >>> plan = WindowPlan(size=2, first=0, last=5)
    >>> plan.draw("flow_grpo", 0, 7, 42) == plan.draw("flow_grpo", 0, 7, 42)
    True
    >>> len(plan.draw("flow_grpo", 0, 7, 43))
    2
    """

    size: int
    first: int
    last: int
    interval: int | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a range that no window of this size fits, or an interval below 1."""
        if self.interval is not None and self.interval < 1:
            raise ConfigError(
                f"algorithm.sde_window_interval={self.interval} is not allowed: must be null or at least 1"
            )
        if self.size < 0 or self.first < 0 or self.first + self.size > self.last:
            raise ConfigError(
                f"algorithm.sde_window_size={self.size} does not fit from algorithm.sde_window_first={self.first} to "
                f"algorithm.sde_window_last={self.last}: must be 0 to {max(0, self.last - self.first)}"
            )

    def draw(self, *key: int | str) -> SdeWindow:
        """The window that belongs to `key`: the same in every process."""
        # Seeded with a string, which Random hashes with SHA-512; a tuple's hash differs between processes.
        start = random.Random(repr(key)).randint(self.first, self.last - self.size)
        return SdeWindow(start, start + self.size)


def window_of_request(plan: WindowPlan, *, run_seed: int, global_step: int, request_seed: int) -> SdeWindow:
    """FlowGRPO: each request has a window of its own."""
    return plan.draw("flow_grpo", run_seed, global_step, request_seed)


def window_of_step(plan: WindowPlan, *, run_seed: int, global_step: int, request_seed: int) -> SdeWindow:
    """MixGRPO: all requests of a training step share one window, whichever engine runs them and whenever they start.

    With `plan.interval` it begins at the first denoise steps of the range, where there is most noise, and moves on to
    the last, where it stays: the progressive strategy of MixGRPO (arXiv 2507.21802). `global_step` counts from 0.
    `request_seed` is not used, because a window that depends on the request would not be shared.

    >>> plan = WindowPlan(size=2, first=0, last=5, interval=25)
    >>> [window_of_step(plan, run_seed=7, global_step=step, request_seed=42).start for step in (0, 24, 25, 75, 1000)]
    [0, 0, 1, 3, 3]
    """
    del request_seed
    if plan.interval is None:
        return plan.draw("mix_grpo", run_seed, global_step)
    start = min(plan.first + global_step // plan.interval, plan.last - plan.size)
    return SdeWindow(start, start + plan.size)
