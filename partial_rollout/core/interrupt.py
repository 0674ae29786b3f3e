"""What becomes of a request's tokens and KV cache when the step ends before the request. Pure.

The modes are compared in docs/design/0006-tail-scheduling.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partial_rollout.settings.block import TailConfig

FRESH = "fresh"
"""Origin of a context that was never interrupted."""
REPREFILLED = "abort"
"""Origin of a context that was sent to an engine again, and computed by the weights that sampled the next tokens."""


@dataclass(frozen=True, slots=True)
class InterruptMode:
    """How requests are interrupted.

    >>> mode = MODES["reuse_kv"]
    >>> mode.stays, mode.retains_kv, mode.clears_cache
    (False, True, False)
    """

    name: str
    stays: bool
    """The request stays in the paused engine; otherwise it leaves and is sent again."""
    retains_kv: bool
    """The KV that old weights computed is used on; otherwise the whole context is computed again."""
    releases_memory: bool = False
    """The KV is kept in host memory while the engine's memory is released for training."""

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
"""All modes by name; the names are the values of `partial_rollout.tail.interrupt_mode`."""


@dataclass(frozen=True, slots=True)
class Retained:
    """What an interrupted request has left in its engine; the client hands it back when the request goes on."""

    cache_salt: str | None
    """The salt under which the prefix cache finds the request's blocks; None if they shall not be found."""
    kv_version: int
    """No KV of the context is older than this weight version."""
    kept_id: str | None = None
    """The engine's own id of the request, if it stayed."""


@dataclass(frozen=True, slots=True)
class Context:
    """How a segment's context came to be in the engine."""

    kv_version: int
    """No KV of the context is older than this weight version."""
    origin: str
    """FRESH, or the name of the interrupt mode that the context went through; REPREFILLED if no KV of it was left."""
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
    """How a segment's context came to be in the engine.

    Args:
        mode: how the request was interrupted.
        version: the weight version that sampled the segment.
        retained: what the previous segment left in the engine; None for a first segment, and when nothing was left.
        went_on: whether the request had stayed in the engine.
        context_len: number of tokens that the segment goes on from; 0 for a first segment.
        num_cached_tokens: tokens of a request that was sent again which the prefix cache had.
    """
    if context_len == 0:
        return Context(version, FRESH)
    reused = context_len if went_on else num_cached_tokens
    if retained is None or not mode.retains_kv or reused == 0:
        # Where nothing was retained, the cache still has the prompt if a sibling computed it since the interruption.
        return Context(version, REPREFILLED, reused)
    return Context(retained.kv_version, mode.name, reused)


def mode_of(tail: TailConfig) -> InterruptMode:
    """The mode of a configuration; `auto` that nobody has chosen a mode for counts as `abort`."""
    return MODES.get(tail.interrupt_mode, MODES["abort"])
