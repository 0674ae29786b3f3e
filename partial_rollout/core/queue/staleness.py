"""How old a token may be when it is trained, and what becomes of older ones. Pure.

A token's staleness is counted from its generation: the version about to be updated minus the version that sampled it.

| past the bound | what happens                                                                                     |
|----------------|--------------------------------------------------------------------------------------------------|
| `train`        | the token is trained and corrected as any old token is; the bound limits the prompts in flight    |
| `mask`         | the token stays in its response and is left out of the loss                                      |
| `drop`         | a group that can no longer be trained in time is dropped; another prompt takes its place         |
| `restart`      | its tokens are thrown away and it begins again, `max_attempts` times; then it is dropped         |
| `finish`       | it does not happen: the update waits for the groups that would otherwise pass the bound          |

With the last three, tokens that pass the bound in another way, such as those of an old checkpoint, are masked.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partial_rollout.errors import ConfigError

if TYPE_CHECKING:
    from partial_rollout.core.queue.tail import TailPolicy
    from partial_rollout.settings.block import TailConfig


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """How old the tokens may be that are trained; without `max_staleness` there is no bound.

    >>> bound = StalenessBound(max_staleness=2, past="drop")
    >>> bound.oldest(trained_version=10), bound.discards
    (8, True)
    """

    max_staleness: int | None = None
    past: str = "train"
    """What happens past the bound: `train`, `mask`, `drop`, `restart` or `finish`."""

    @classmethod
    def of(cls, tail: TailConfig) -> StalenessBound:
        """The bound of a configuration."""
        return cls(tail.max_staleness, tail.past_staleness)

    @property
    def masks(self) -> bool:
        """Whether tokens past the bound leave the loss."""
        return self.max_staleness is not None and self.past != "train"

    @property
    def discards(self) -> bool:
        """Whether groups past the bound lose their tokens."""
        return self.max_staleness is not None and self.past in ("drop", "restart")

    @property
    def finishes(self) -> bool:
        """Whether an update waits for the groups that would otherwise pass the bound."""
        return self.max_staleness is not None and self.past == "finish"

    def oldest(self, trained_version: int) -> int:
        """The oldest version whose tokens may be trained in an update of `trained_version`."""
        return trained_version - (self.max_staleness or 0)


UNBOUNDED = StalenessBound()


class Ages:
    """How many unfinished prompts began at which weight version.

    The version at which a prompt began is never newer than the prompt's oldest token. It is one version too old for a
    prompt that was claimed during a weight update.
    """

    def __init__(self) -> None:
        self.version = 0
        """Weight version that generates now."""
        self._begun: Counter[int] = Counter()

    def begin(self, begun: int | None) -> int:
        """Count a prompt that begins now (None) or began at version `begun`; returns the version to give to `end`."""
        begun = self.version if begun is None else begun
        self._begun[begun] += 1
        return begun

    def end(self, begun: int) -> None:
        """The prompt is finished, or has lost its tokens."""
        self._begun[begun] -= 1
        if not self._begun[begun]:
            del self._begun[begun]

    def num_due(self, bound: StalenessBound, batch: int) -> int:
        """Unfinished prompts that must finish before the next training step, lest one pass the bound in a later step.

        A prompt that began at version b can be trained in this step and in b + max_staleness - version further steps,
        each of `batch` groups. So after this step no more such prompts may be left than those steps have room for.
        O(versions in flight).
        """
        due = num_begun = 0
        for begun, num in sorted(self._begun.items()):
            num_begun += num
            # Prompts that began earlier have to be trained within these steps as well, so they are counted with them.
            num_updates = max(0, begun - bound.oldest(self.version))
            due = max(due, num_begun - num_updates * batch)
        return due


def make_bound(tail: TailConfig, policy: TailPolicy, train_batch_size: int) -> StalenessBound:
    """The bound of a checked configuration.

    Raises:
        ConfigError: the policy lets prompts wait for longer than the bound allows.
    """
    bound = StalenessBound.of(tail)
    if tail.max_staleness is None or bound.past in ("train", "mask"):
        return bound
    given = f"partial_rollout.tail.max_staleness={tail.max_staleness} with tail.past_staleness={bound.past}"
    if policy.max_steps is not None and tail.max_staleness < policy.max_steps - 1:
        raise ConfigError(
            f"{given} is not allowed: tail.policy={tail.policy} may train a prompt {policy.max_steps} steps after its "
            f"start, so it must be at least {policy.max_steps - 1}; raise it "
            "or set partial_rollout.tail.past_staleness=train"
        )
    most = (tail.max_staleness + 1) * train_batch_size
    if bound.finishes and policy.max_steps is None and policy.capacity > most:
        raise ConfigError(
            f"{given} is not allowed: with {policy.capacity} prompts in flight there is no room in "
            f"{tail.max_staleness + 1} batches of {train_batch_size} for all that begin together; "
            f"lower partial_rollout.prefetch_factor to {tail.max_staleness + 1} or raise max_staleness"
        )
    return bound
