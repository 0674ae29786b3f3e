"""Which responses of the log of rollouts a run trains again after it was started again, and in which batches. Pure.

A run that goes on from the checkpoint of step k has the log of what came after it. Files of several starts may be
there, since a run may die again before its next checkpoint:

    files of start 1 ──> History ──> files of start 2 ──> History ──> Plan: steps k+1 to n, with their batches

The prompts of a run are admitted in the same order after a restart, because the checkpoint has the data loader's
state. So the number of a prompt, counted from the run's beginning, says which one it is: it gets its old name (uid)
again, if it asks the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from partial_rollout.core.rollout_log import (
    Abandoned,
    Admitted,
    Finished,
    GivenUp,
    Group,
    Interrupted,
    Opened,
    Taken,
    prompt_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from partial_rollout.core.rollout_log import AnyRecord

    Order = tuple[int, int]
    """Number of the start and of the claim."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a trajectory's record is."""

    path: str
    offset: int
    """Byte at which the record's frame begins."""
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Logged:
    """A trajectory in the log, without its tokens."""

    key: str
    """`{uid}_{session}`."""
    uid: str
    order: Order
    """The later one counts, of two records of a trajectory."""
    newest_version: int
    num_tokens: int
    place: Place


@dataclass(frozen=True, slots=True)
class Piece:
    """A record of a trajectory that had not ended, without its tokens."""

    newest_version: int
    num_tokens: int
    place: Place


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch to take again."""

    step: int
    uids: tuple[str, ...]
    """The batch's prompts in their order."""


@dataclass(slots=True)
class Plan:
    """What is replayed."""

    batches: list[Batch] = field(default_factory=list[Batch])
    names: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    """By the number of a prompt: its uid, and what it asks."""
    places: dict[str, Place] = field(default_factory=dict[str, Place])
    """By trajectory, `{uid}_{session}`."""
    unfinished: dict[str, tuple[Place, ...]] = field(default_factory=dict[str, "tuple[Place, ...]"])
    """By trajectory that had not ended: its records, from which it goes on."""
    through: int = 0
    """The last step whose batch is replayed."""
    num_responses: int = 0
    num_tokens: int = 0
    """Tokens of the responses that are replayed and that no batch has included yet."""
    num_unfinished_tokens: int = 0


class History:
    """What the files of the log tell, start after start."""

    def __init__(self) -> None:
        self.batches: dict[int, list[list[Group]]] = {}
        """By step."""
        self.names: dict[int, tuple[str, str]] = {}
        self.trajectories: dict[str, dict[int, Logged]] = {}
        """By `{uid}_{session}`, then by checksum."""
        self.unfinished: dict[str, dict[Order, list[Piece]]] = {}
        """By `{uid}_{session}` and claim: the records of the trajectory before its end."""
        self._given_up: dict[str, Order] = {}
        """By uid: the last claim whose trajectories are void, but for those that were trained."""
        self._of_start: set[int] = set()
        """Steps of which the start that is being read has told."""

    def begin(self, holds_through: int) -> None:
        """The files of a further start follow."""
        self._of_start = set()
        self._forget_after(holds_through)

    def tell(self, record: AnyRecord) -> None:
        """The next record of the trainer's file."""
        if isinstance(record, Opened):
            self.begin(record.holds_through)
        elif isinstance(record, Abandoned):
            self._forget_after(record.holds_through)
            self.names = {number: name for number, name in self.names.items() if number < record.admitted}
        elif isinstance(record, Admitted):
            named = zip(record.uids, record.prompts, strict=False)
            self.names.update({record.first + number: each for number, each in enumerate(named)})
        elif isinstance(record, Taken):
            if record.step not in self._of_start:  # an earlier start has told of it as well
                self.batches[record.step] = []
                self._of_start.add(record.step)
            self.batches[record.step].append(record.groups)

    def tell_of_worker(self, record: AnyRecord, number: int, place: Place) -> None:
        """The next record of a worker's file, of the start `number`."""
        if isinstance(record, Finished):
            self.found(record, number, place)
        elif isinstance(record, Interrupted):
            self.interrupted(record, number, place)
        elif isinstance(record, GivenUp):
            self.given_up(record, number)

    def found(self, record: Finished, number: int, place: Place) -> None:
        """A trajectory that has ended; one that was replayed comes before all that this start has claimed itself."""
        known = self.trajectories.get(record.key, {}).get(place.checksum)
        logged = Logged(
            key=record.key,
            uid=record.uid,
            order=(number, 0 if known and known.order[0] < number else record.claim_id),
            newest_version=max((summary.max_version for summary in record.summaries), default=0),
            num_tokens=record.num_tokens,
            place=place,
        )
        self.trajectories.setdefault(record.key, {})[place.checksum] = logged

    def interrupted(self, record: Interrupted, number: int, place: Place) -> None:
        """A trajectory that has not ended."""
        claims = self.unfinished.setdefault(record.key, {})
        pieces = claims.get(order := (number, record.claim_id), [])
        piece = Piece(record.newest_version, record.num_tokens, place)
        if record.after == 0:
            claims[order] = [piece]
        # Another one follows a record that is not there, so nobody knows which tokens are between.
        elif pieces and pieces[-1].place.checksum == record.after:
            pieces.append(piece)

    def given_up(self, record: GivenUp, number: int) -> None:
        """Trajectories of a prompt are void, since their attempt has failed or was lost."""
        self._given_up[record.uid] = max(self._given_up.get(record.uid, (0, 0)), (number, record.claim_id))

    def _forget_after(self, step: int) -> None:
        """Later steps of earlier starts, and what weights of then have sampled: those weights are gone."""
        self.batches = {each: taken for each, taken in self.batches.items() if each <= step}
        kept: dict[str, dict[int, Logged]] = {}
        for key, records in self.trajectories.items():
            if of_then := {check: each for check, each in records.items() if each.newest_version <= step}:
                kept[key] = of_then
        self.trajectories = kept
        self.unfinished = {
            key: {order: _up_to(step, pieces) for order, pieces in claims.items()}
            for key, claims in self.unfinished.items()
        }

    def plan(self, base_step: int, *, first: int, unfinished: Collection[str], done: Collection[str]) -> Plan:
        """What to replay after the checkpoint of `base_step`.

        Args:
            base_step: its step.
            first: number of prompts that had been admitted when it was saved.
            unfinished: uids in its queue that are to be generated.
            done: uids in its queue whose trajectories it holds.
        """
        plan, number = Plan(through=base_step), first
        while number in self.names:
            plan.names[number] = self.names[number]
            number += 1
        unfinished = {*unfinished, *(uid for uid, _ in plan.names.values())}
        chosen: dict[str, Logged] = {}
        taken: set[str] = set()
        while (step := plan.through + 1) in self.batches:
            members = self._members(self.batches[step], unfinished, done)
            uids = [group.uid for groups in self.batches[step] for group in groups]
            if members is None or taken & set(uids) or len(set(uids)) < len(uids):
                break
            chosen |= members
            taken |= set(uids)
            plan.batches += [Batch(step, tuple(group.uid for group in groups)) for groups in self.batches[step]]
            plan.through = step
        chosen |= self._others(unfinished - taken, plan.through)
        plan.places = {key: logged.place for key, logged in chosen.items()}
        plan.num_responses = len(chosen)
        plan.num_tokens = sum(logged.num_tokens for logged in chosen.values())
        self._add_unfinished(plan, unfinished - taken)
        return plan

    def _add_unfinished(self, plan: Plan, uids: Collection[str]) -> None:
        """What weights that there will be again have sampled, of trajectories whose end no record has."""
        for key, claims in self.unfinished.items():
            uid = prompt_of(key)
            if uid not in uids or key in plan.places:
                continue
            void = self._void(uid)
            known = {order: _up_to(plan.through, pieces) for order, pieces in claims.items() if order > void}
            latest = max((order for order, pieces in known.items() if pieces), default=None)
            if latest is not None:
                plan.unfinished[key] = tuple(piece.place for piece in known[latest])
                plan.num_unfinished_tokens += sum(piece.num_tokens for piece in known[latest])

    def _void(self, uid: str) -> Order:
        """The last claim of the prompt from which nothing is taken over."""
        return self._given_up.get(uid, (0, 0))

    def _members(
        self, batches: Iterable[Iterable[Group]], unfinished: Collection[str], done: Collection[str]
    ) -> dict[str, Logged] | None:
        """The trajectories of a step's batches; None if one of them is not there as it was trained."""
        members: dict[str, Logged] = {}
        for group in (group for groups in batches for group in groups):
            if group.uid in done:
                continue
            if group.uid not in unfinished:
                return None
            for key, check in group.trajectories:
                session = key.rpartition("_")[0]  # an agent loop may return several outputs
                logged = self.trajectories.get(session, {}).get(check)
                if logged is None:
                    return None
                members[session] = logged
        return members

    def _others(self, uids: Collection[str], through: int) -> Mapping[str, Logged]:
        """Ended trajectories that no batch has, as far as weights have sampled them that there will be again."""
        latest: dict[str, Logged] = {}
        for key, records in self.trajectories.items():
            fit = [
                each
                for each in records.values()
                if each.uid in uids and each.newest_version <= through and each.order > self._void(each.uid)
            ]
            if fit:
                latest[key] = max(fit, key=lambda each: each.order)
        return latest


def _up_to(step: int, pieces: Sequence[Piece]) -> list[Piece]:
    """The records before the first with tokens of later weights."""
    return list(takewhile(lambda piece: piece.newest_version <= step, pieces))
