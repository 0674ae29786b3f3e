"""The prompt queue's parts as one value, and back; and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partial_rollout.core.queue.census import AGENT_LOOP_FAILED, TOO_STALE, Census
from partial_rollout.core.queue.lifecycle import Entry, Event, State
from partial_rollout.types import PromptMeta, QueueSnapshot, QueueStatistics

if TYPE_CHECKING:
    from partial_rollout.core.queue.claims import ClaimBook
    from partial_rollout.core.queue.done import DoneGroups
    from partial_rollout.core.queue.rounds import Rounds


def count(rounds: Rounds, claims: ClaimBook, done: DoneGroups, census: Census) -> QueueStatistics:
    """Counts at this moment."""
    return QueueStatistics(
        admitted=census.admitted,
        pending=rounds.num_pending,
        ongoing=len(claims.ongoing),
        deferred=len(rounds.deferred),
        done=len(done) + done.num_expired,
        taken=census.taken,
        dropped=dict(census.dropped),
        failed_attempts=census.retried[AGENT_LOOP_FAILED],
        restarted=census.retried[TOO_STALE],
        claimed_trajectories=claims.num_trajectories,
        **claims.oldest(),
    )


def save(rounds: Rounds, claims: ClaimBook, done: DoneGroups, census: Census) -> QueueSnapshot:
    """All that `load` needs; O(prompts in flight)."""
    pending, deferred = rounds.pending(), list(rounds.deferred.values())
    ongoing = list(claims.ongoing.values())
    unfinished = deferred + ongoing + pending
    return QueueSnapshot(
        pending=tuple(entry.meta for entry in pending),
        ongoing=tuple(entry.meta for entry in ongoing),
        deferred=tuple(entry.meta for entry in deferred),
        done=done.groups(),
        admitted=census.admitted,
        taken=census.taken,
        dropped=dict(census.dropped),
        failed_attempts=census.retried[AGENT_LOOP_FAILED],
        restarted=census.retried[TOO_STALE],
        failures={entry.meta.uid: entry.failures for entry in unfinished if entry.failures},
        restarts={entry.meta.uid: entry.restarts for entry in unfinished if entry.restarts},
        deferrals={entry.meta.uid: entry.deferrals for entry in unfinished if entry.deferrals},
        begun={entry.meta.uid: entry.begun for entry in unfinished if entry.begun is not None},
        next_claim_id=claims.next_id,
    )


def load(snapshot: QueueSnapshot, rounds: Rounds, claims: ClaimBook, done: DoneGroups, census: Census) -> None:
    """Fill the parts of a new queue; what was ongoing is pending again, ahead of what was pending."""
    entries = [_enter(meta, snapshot, claims, census) for meta in snapshot.unfinished]
    rounds.restore(entries, num_deferred=len(snapshot.deferred))
    for group in snapshot.done:
        meta = PromptMeta(group.uid, group.num_sessions, group.global_step, group.source_index)
        done.add(Entry(meta, census.enter(group.uid), State.DONE), group)
    claims.next_id = snapshot.next_claim_id
    census.restore(snapshot)


def _enter(meta: PromptMeta, snapshot: QueueSnapshot, claims: ClaimBook, census: Census) -> Entry:
    """A pending entry, with what the snapshot says of its past."""
    entry = Entry(meta, order=census.enter(meta.uid))
    entry.failures, entry.deferrals = snapshot.failures.get(meta.uid, 0), snapshot.deferrals.get(meta.uid, 0)
    entry.restarts = snapshot.restarts.get(meta.uid, 0)
    entry.move(Event.ADMIT)
    if meta.uid in snapshot.begun:
        entry.begun = claims.ages.begin(snapshot.begun[meta.uid])
    return entry
