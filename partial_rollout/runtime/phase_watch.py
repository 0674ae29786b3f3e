"""Ends a phase of the training that does not go on: who keeps the trainer waiting is named and killed.

    trainer: main thread ──begin──> phase, since when <──looks── thread ──who has an open call?──> training ranks
                                                                  |  └────where do they stand?────> prompt manager
                                                                  └──over──> RunWatch: the run ends, and starts again

verl waits for its training ranks and for TransferQueue without a bound. A rank whose main thread hangs (a loss that
waits for something, a file system, a lock) gives signs of life from another thread, so nobody else notices. What the
trainer does outside of the waits that have limits of their own is a phase; core/phases.py says how long one may take.

A rank has an open call when it does not answer a further one. Where it stands it tells with its signs of life.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from partial_rollout.core.phases import NUM_NAMED, Phases, alike, shortened, who_is_stuck
from partial_rollout.runtime.bounded import BLOCKED_S
from partial_rollout.runtime.death_watch import describe, end_actor, own_process
from partial_rollout.runtime.heartbeat import BEAT_S, stack_of
from partial_rollout.runtime.processes import TASK_RUNNER, TRAINING_RANK, TRANSFER_QUEUE_CONTROLLER
from partial_rollout.types import Death, Process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ray.actor import ActorHandle

    from partial_rollout.core.deadlines import Late
    from partial_rollout.core.phases import Stuck
    from partial_rollout.runtime.run_watch import RunWatch

logger = logging.getLogger(__name__)

ELSEWHERE = ""
"""The kind of a phase whose time others limit."""
LATER = ", later part"
"""End of the kind of what follows a wait: the part before the wait says nothing about its time."""
LOOK_S = 1.0
ASK_S = 5.0
"""A training rank that has no open call answers at once."""
STACKS_S = 2 * BEAT_S
"""Time within which each rank gives a sign of life."""
TRAINER_CODE = ("/verl/trainer/", "/partial_rollout/train/")
"""Paths whose functions say what the trainer does."""
NUM_FRAMES = 8
"""Innermost functions of a stack that an error quotes; the log has all."""
NOT_KNOWN = "it could not be found out which training ranks have an open call"


class PhaseWatch:
    """Knows what the trainer does, and from `start` on ends what takes too long.

    begin -> warned of, with the names of those that have an open call -> over: their stacks are logged, the run ends
      ^        |
      +--------+ `begin` of the next phase
    """

    def __init__(self, least_s: float, doing: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`least_s` is `timeouts.train_s`; `doing` says what the trainer does now, as a sentence about the past."""
        self._phases, self._clock = Phases(least_s), clock
        self._doing, self._number = doing, 0
        self._num_left_out = 0
        """Blocks of `left_out` that threads of the trainer are in."""
        self._looked_s = clock()
        self._lock = threading.Lock()

    @property
    def doing(self) -> str:
        """What the trainer does, as a sentence about the past: it is said of one that has died."""
        return self._doing

    def begin(self, doing: str, kind: str = ELSEWHERE) -> None:
        """The trainer begins something else; `kind` says with what its time is to be compared."""
        with self._lock:
            self._phases.begin(kind, self._clock())
            self._doing, self._number = doing, self._number + 1

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """The time of this block is limited by others; afterwards another part of what the trainer does begins."""
        doing, kind = self._doing, self._phases.kind
        self.begin(doing)
        try:
            yield
        finally:
            self.begin(doing, kind and f"{kind.removesuffix(LATER)}{LATER}")

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """The time of this block is limited by others; afterwards the same part of what the trainer does goes on."""
        with self._lock:
            self._num_left_out += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_left_out -= 1

    def start(
        self, watch: RunWatch, manager: ActorHandle, ranks: Callable[[], Sequence[tuple[str, ActorHandle]]]
    ) -> None:
        """Watch from now on, in a thread, until `watch` has stopped; call this in the main thread."""
        main, self._looked_s = threading.get_ident(), self._clock()

        def run() -> None:
            while not watch.wait_stopped(LOOK_S):
                try:
                    self.look(watch, manager, ranks, main)
                except Exception:
                    logger.exception("could not find out what the trainer waits for; the watch on it goes on")

        threading.Thread(target=run, daemon=True, name="phase-watch").start()

    def look(
        self,
        watch: RunWatch,
        manager: ActorHandle,
        ranks: Callable[[], Sequence[tuple[str, ActorHandle]]],
        main: int,
    ) -> None:
        """Warn of a phase that takes long, or end it; `main` is the trainer's thread."""
        with self._lock:
            now_s = self._clock()
            since_s = now_s - self._looked_s
            # A process that was stopped for a while, as by Ctrl-Z, has missed looks.
            self._phases.put_off(since_s if self._num_left_out else max(0.0, since_s - LOOK_S - BLOCKED_S))
            self._looked_s, number, doing = now_s, self._number, self._doing
            late = next(iter(self._phases.look(now_s)), None)
            longest_s = self._phases.longest_s(late.phase) if late else 0.0
        if late is None:
            return
        own, stacks, stuck = stack_of(main), dict[str, str](), None
        try:
            busy = _busy(ranks())
            stacks = _stacks(manager, busy) if late.is_over else {}
            stuck = who_is_stuck(own, {name: stacks.get(name, "") for name in busy})
        except Exception:  # the end of a phase is told once: it must come, whoever keeps the trainer waiting
            logger.exception("could not find out which training ranks have an open call")
        self._looked_s = self._clock()  # asking has taken time
        if self._number != number:
            return  # it went on meanwhile
        if late.is_over:
            logger.error("%s", _told(late, doing, own, stacks))
            death = _death(late, doing, stuck, own, stacks)
            watch.end_stuck(death, lambda: _end_others(ranks(), death.process.name))
        else:
            _warn(late, doing, longest_s, stuck, own)


def _busy(ranks: Sequence[tuple[str, ActorHandle]]) -> list[str]:
    """The ranks that have an open call."""
    asked: list[ray.ObjectRef[Any]] = [rank.__ray_call__.remote(describe) for _, rank in ranks]
    _, late = ray.wait(asked, num_returns=len(asked), timeout=ASK_S) if asked else ([], [])
    return [name for (name, _), ref in zip(ranks, asked, strict=True) if ref in late]


def _stacks(manager: ActorHandle, names: Sequence[str]) -> dict[str, str]:
    if not names:
        return {}
    try:
        return ray.get(manager.stacks.remote(names, STACKS_S), timeout=STACKS_S + ASK_S)
    except RayError:  # the manager is gone or silent, which others notice
        return {}


def _warn(late: Late[str], doing: str, longest_s: float, stuck: Stuck | None, own: str) -> None:
    logger.warning(
        "the trainer has %s for %.0f s (the longest time before: %.0f s); it is in %s, and %s. After %.0f s "
        "(partial_rollout.timeouts.train_s; docs/troubleshooting.md) who keeps it waiting is killed, and training is "
        "started again from its last checkpoint",
        doing,
        late.waited_s,
        longest_s,
        _place(own),
        stuck.in_words if stuck else NOT_KNOWN,
        late.limit_s,
    )


def _told(late: Late[str], doing: str, own: str, stacks: Mapping[str, str]) -> str:
    """All stacks, for the log."""
    of_ranks = "".join(
        f"\n{shortened(names)} stood there, innermost function first:\n{stack}"
        for stack, names in list(alike(stacks).items())[:NUM_NAMED]
    )
    return (
        f"the trainer had {doing} for {late.waited_s:.0f} s when it was given up. Its main thread stood there, "
        f"innermost function first:\n{own}{of_ranks}"
    )


def _death(late: Late[str], doing: str, stuck: Stuck | None, own: str, stacks: Mapping[str, str]) -> Death:
    """What the run ends with: the likeliest of those that keep the trainer waiting. `stuck` is None: nobody knows."""
    limit = (
        f"the trainer had {doing} for {late.waited_s:.0f} s, longer than the {late.limit_s:.0f} s that "
        "partial_rollout.timeouts.train_s allows here"
    )
    if stuck is not None and stuck.in_transfer_queue:
        role = TRANSFER_QUEUE_CONTROLLER.role
        return Death(Process(role, role), f"it was given up: {limit}, and waited for TransferQueue's answer")
    if stuck is None or not stuck.ranks:
        process = own_process(TASK_RUNNER.role, TASK_RUNNER.role)
        cause = f"it was given up: {limit}, and {NOT_KNOWN if stuck is None else 'no training rank had an open call'}"
        return Death(process, cause, f"stood in\n{_inner(own)}")
    first, others = stuck.ranks[0], stuck.ranks[1:]
    also = f"; so had {shortened(others)}" if others else ""
    where = f"stood in\n{_inner(stacks[first])}" if first in stacks else "did not tell where it stood"
    return Death(Process(TRAINING_RANK.role, first), f"it was killed: {limit}, and it had an open call{also}", where)


def _place(own: str) -> str:
    """The function of verl's trainer or of this package's that the trainer is in; otherwise the innermost one."""
    lines = own.splitlines() or ["a thread that has ended"]
    return next((line for line in lines if any(code in line for code in TRAINER_CODE)), lines[0])


def _inner(stack: str) -> str:
    return "\n".join(stack.splitlines()[:NUM_FRAMES])


def _end_others(ranks: Sequence[tuple[str, ActorHandle]], named: str) -> None:
    """Kill all ranks but the one that the run's end names, and kills: the trainer's calls to them end."""
    for name, rank in ranks:
        if name != named:
            end_actor(rank, Process(TRAINING_RANK.role, name))  # it may hang too
