"""What becomes of a request's tokens and KV when the step ends before it does. Pure; see docs/design/0006."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partial_rollout.settings.block import TailConfig

FRESH = "fresh"
"""Origin of a context that was never interrupted."""
REPREFILLED = "abort"
"""Origin of a context that was sent to an engine again and computed by the weights that went on with it."""


@dataclass(frozen=True, slots=True)
class InterruptMode:
    """How requests are interrupted."""

    name: str
    stays: bool
    """The request stays in the paused engine; otherwise it leaves and is sent again."""
    retains_kv: bool
    """What old weights computed is used on; otherwise the whole context is computed again."""
    releases_memory: bool = False
    """KV outlives the release of engine memory, in the host's."""

    @property
    def clears_cache(self) -> bool:
        """Whether an interruption forgets all KV."""
        return not self.retains_kv


MODES = {
    mode.name: mode
    for mode in (
        InterruptMode("abort", stays=False, retains_kv=False),
        InterruptMode("keep_kv", stays=True, retains_kv=True),
        InterruptMode("reuse_kv", stays=False, retains_kv=True),
        InterruptMode("offload_kv", stays=False, retains_kv=True, releases_memory=True),
    )
}
"""By the names that `partial_rollout.tail.interrupt_mode` allows."""


@dataclass(frozen=True, slots=True)
class Retained:
    """What an interrupted request has left in its engine, for the client to hand back when it goes on."""

    cache_salt: str | None
    """Under which its blocks are found; None if they are not to be."""
    kv_version: int
    """No KV of the context is older than this weight version."""
    kept_id: str | None = None
    """The engine's own id of the request, if it stayed."""


@dataclass(frozen=True, slots=True)
class Context:
    """How a segment's context came to be in the engine."""

    kv_version: int
    """No KV of it is older than this weight version."""
    origin: str
    """FRESH, or the interrupt mode that it went through: REPREFILLED if nothing of it was found."""
    num_reused_tokens: int = 0
    """Tokens of a resumed context that were not computed again."""


def context_of(
    mode: InterruptMode,
    version: int,
    *,
    retained: Retained | None,
    went_on: bool,
    context_len: int,
    num_cached_tokens: int,
) -> Context:
    """How the context of a segment came about.

    Args:
        version: weights that sampled the segment.
        retained: what the segment before it left behind; None for the first, and when nothing was.
        went_on: the request was still in the engine.
        context_len: tokens that the segment goes on from; 0 for a first one.
        num_cached_tokens: of a request that was sent again, tokens found in the prefix cache.
    """
    if context_len == 0:
        return Context(version, FRESH)
    reused = context_len if went_on else num_cached_tokens
    if retained is None or not mode.retains_kv or reused == 0:
        # Hits without anything retained are a sibling's prompt, computed since the interruption.
        return Context(version, REPREFILLED, reused)
    return Context(retained.kv_version, mode.name, reused)


def mode_of(tail: TailConfig) -> InterruptMode:
    """The configured mode."""
    return MODES[tail.interrupt_mode]
