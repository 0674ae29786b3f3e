"""A prompt queue as one value from which the same queue is made: claims, round and all, unlike `QueueSnapshot`.

A checkpoint has a `QueueSnapshot`, since no claim outlives its run. A `WholeQueue` is for a run that goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from partial_rollout.core.queue.lifecycle import Entry  # noqa: TC001 - whoever decodes the value looks the name up


@dataclass(frozen=True, slots=True)
class WholeLedger:
    """All that a `Ledger` holds; prompts by uid."""

    admitted: int
    taken: int
    dropped: dict[str, int]
    retried: dict[str, int]
    done: list[str]
    expired: list[str]
    clearing: list[str]
    next_order: int
    left: list[str]
    num_remembered: int


@dataclass(frozen=True, slots=True)
class WholeClaims:
    """All that a `ClaimBook` holds; prompts by uid, in the order in which the book has them."""

    next_id: int
    version: int
    ongoing: list[str]
    deferred: list[str]
    fenced: list[str]
    unfetched: dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class WholeRounds:
    """All that `Rounds` holds; prompts by uid."""

    deferred: list[str]
    pending: list[tuple[bool, str]]
    num_startable: float
    required: list[str]
    missing: list[str]


@dataclass(frozen=True, slots=True)
class WholeQueue:
    """All of a `PromptQueue` but what it is made with."""

    entries: list[Entry]
    """Prompts in flight, in the order of their admission."""
    ledger: WholeLedger
    claims: WholeClaims
    rounds: WholeRounds
    num_owed: int
    num_unreplaced: int
    filtered: dict[float, int]
    oldest_allowed: int
    capacity: int
    """Prompts in flight at most; the run may have changed the number since its start."""
