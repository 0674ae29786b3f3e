"""The prompt manager: a named Ray actor that holds the `PromptQueue`, and in which callers wait for its changes.

| caller  | calls                         | waits for                         | woken by                               |
|---------|-------------------------------|-----------------------------------|----------------------------------------|
| trainer | begin_round, admit, snapshot, | nothing                           |                                        |
|         | discard_expired, report_step, |                                   |                                        |
|         | set_capacity                  |                                   |                                        |
| trainer | take_batch                    | enough done, or too few in flight | finish, drop, fail, release,           |
|         |                               |                                   | other take, close                      |
| worker  | claim (long poll)             | a pending group that fits,        | admit, give_back, fail, release, close |
|         |                               | or one of its own that goes on    | begin_round; the end of a suspect, if  |
|         |                               |                                   | another suspect is pending             |
| worker  | finish_many, fail, expire,    | nothing                           |                                        |
|         | drop, give_back               |                                   |                                        |
| actor   | beat, tell_stack              | nothing                           |                                        |
| trainer | next_death (long poll)        | the death of a watched actor      | Ray, beats that do not come, close     |
| trainer | end_silent                    | nothing, or until all are known   | beats, or a tenth of claim_s without;  |
|         |                               | to live or to be silent           | watch, in a process started again      |
| trainer | stacks                        | actors to tell where they stand   | tell_stack; at most seconds            |
| anybody | status, statistics            | nothing                           |                                        |

All methods run on one event loop and change the queue between two awaits, never across one.

Ray starts the actor again when its process dies, and makes the calls again that were not answered. What must not be
lost is in the books, and each change of them is in the journal first (journal.py): docs/design/0013-prompt-manager.md.

The actor is also where the deaths of other actors are noticed (death_watch.py says why here).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import uuid
from collections import Counter, defaultdict
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import ray
from ray._private import worker as ray_worker

from partial_rollout.core.queue.ledger import WORKER_LOST
from partial_rollout.core.queue.lifecycle import MAX_LOSSES
from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.staleness import UNBOUNDED, make_bound
from partial_rollout.core.queue.tail import make_policy
from partial_rollout.core.time_mean import TimeWeightedMean
from partial_rollout.errors import ActorLost, ClusterError, RunStopped, WaitTimeout
from partial_rollout.observability.events import EventWriter, PromptDropped, QueueMoved, events_folder
from partial_rollout.observability.log import report_to
from partial_rollout.observability.metrics import ManagerMetrics, run_name
from partial_rollout.runtime.books import Books
from partial_rollout.runtime.claim_polls import ClaimPolls
from partial_rollout.runtime.death_watch import (
    DeathWatch,
    Watched,
    ask_where,
    last_lines,
    nothing,
    own_process,
    unpacked,
)
from partial_rollout.runtime.heartbeat import Silence, Stacks, begin_beats
from partial_rollout.runtime.journal import Journal, Place
from partial_rollout.runtime.placement import RESTARTED
from partial_rollout.runtime.processes import AGENT_LOOP_WORKER
from partial_rollout.types import MANAGER_NAME, Death, ManagerStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from ray.actor import ActorHandle

    from partial_rollout.core.queue.staleness import StalenessBound
    from partial_rollout.core.queue.tail import RoundPlan, TailPolicy
    from partial_rollout.settings.block import PartialRolloutConfig
    from partial_rollout.types import (
        Claim,
        FinishResult,
        Process,
        PromptMeta,
        QueueSnapshot,
        QueueStatistics,
        ReleaseResult,
        TakeResult,
        TrajectorySummary,
        WorkerStatus,
    )

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

METRICS_INTERVAL_S = 1.0
"""Metrics and the event of the queue are exported once in this time, whatever the number of changes."""
QUEUE_FILE_BYTES = 4 * 1024 * 1024
"""The queue's events have files of their own, so that they displace no warning; some hours of them are kept."""

NAMESPACE = "partial_rollout"
"""Ray namespace of the manager, in which `partial_rollout.status` looks for its name."""
PARKED_AT = "until_killed"
"""Method that never returns; an actor that Ray starts again has one, so that its death can be told."""
MAX_CONCURRENT_CALLS = 10_000
"""Every worker has one long poll waiting here, so this must be far above the number of workers."""

ACTOR_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_concurrency": MAX_CONCURRENT_CALLS,
    "enable_task_events": False,
}
"""Task events are off: thousands of calls a second would crowd all other tasks out of the Ray dashboard."""
LOST_TOO_MANY = (
    "%s is dropped: %d agent-loop workers were lost while they generated it, the last one was %s. Its tool or agent "
    "loop may end the process (a crash, too much memory), or block the event loop for longer than "
    "partial_rollout.timeouts.claim_s; the warnings of these deaths name the workers' logs"
)
NOBODY = ""
"""Makes a change that no call waits for."""


class RolloutPromptManager:
    """Who generates which prompt, and which groups are ready for training. Holds uids and counts, never tensors.

    The lifecycle of a prompt is drawn at `PromptQueue`, whose methods the manager's are named after: a method here
    has the journal call the queue's, and wakes whoever may go on because of the change.
    A plain class; `create_manager` makes it an actor.

    >>> from partial_rollout.core.queue.tail import Partial
    >>> from partial_rollout.types import PromptMeta, TrajectorySummary
    >>> async def one_prompt() -> list[str]:
    ...     manager = RolloutPromptManager(Partial(capacity=2), max_attempts=2)
    ...     await manager.admit([PromptMeta("a", num_trajectories=1, global_step=1)])
    ...     (claim,) = await manager.claim("worker-0", free_slots=1, timeout_s=1.0)
    ...     await manager.finish_many([(claim, [TrajectorySummary("a_0_0", 3, 5, min_version=0, max_version=0)])])
    ...     return [group.uid for group in (await manager.take_batch(1, timeout_s=1.0)).groups]
    >>> asyncio.run(one_prompt())
    ['a']
    """

    def __init__(
        self,
        policy: TailPolicy,
        max_attempts: int,
        clock: Callable[[], float] = time.monotonic,
        metrics: Callable[[], ManagerMetrics] | None = None,
        bound: StalenessBound = UNBOUNDED,
        *,
        batch_s: float = math.inf,
        claim_s: float = math.inf,
        events: Path | None = None,
        journal: Callable[[], Place] | None = None,
        call_id: Callable[[], str] = lambda: NOBODY,
    ) -> None:
        """`metrics` is called here, in the manager's own process, to make what shows the manager's status.

        `journal`, called here too, says where a later process finds the queue; `call_id` names the call that runs, in
        the same way when it is made again.

        When a batch is taken, a warning names each claim that has been ongoing for more than `batch_s`.
        A watched actor that gives no sign of life for `claim_s` is killed.
        Warnings go into the run's event stream, whose folder is `events`.

        Raises:
            JournalUnreadable: this is a later process, and the journal is gone or damaged.
        """
        self._events = "" if events is None else str(events)
        if events is not None:
            report_to(EventWriter(events, "prompt_manager"))
        self._queue_events = EventWriter(events, "queue", max_file_bytes=QUEUE_FILE_BYTES)
        self._queue_told: QueueMoved | None = None
        self._batch_s = batch_s
        self._journal = Journal(policy, max_attempts, clock, bound, journal() if journal else None)
        self._books, self._call_id = self._journal.books, call_id
        self._metrics = metrics() if metrics else None
        self._export_timer: asyncio.TimerHandle | None = None
        self._polls = ClaimPolls()
        self._takeable = asyncio.Condition()
        self._workers: dict[str, WorkerStatus] = {}
        self._clock = clock
        self._slots_in_use = TimeWeightedMean(clock())
        self._num_releases: Counter[str] = Counter()
        self._waiting: defaultdict[str, set[str]] = defaultdict(set)
        """Calls of `claim` that wait, by worker."""
        self._claim_s = claim_s
        self._silence = Silence(claim_s, clock, self._end_silent, self._call)
        self._stacks = Stacks()
        self._deaths = DeathWatch(self._park, self._doing, self._ask, on_death=self._silence.forget)
        self._unpacking = asyncio.Lock()
        self._never: ray.ObjectRef[None] | None = None

    # ---- trainer ----

    async def begin_round(self) -> RoundPlan:
        """Start the next round as the tail policy decides; the caller admits `num_fresh` prompts.

        Raises:
            ActorLost: the manager was closed.
        """
        # All polls look again: claims that go on are each for one worker.
        async with self._changing(wake_claims=True):
            self._require_open()
            self._slots_in_use.restart(self._clock())
            return self._do(PromptQueue.begin_round)

    async def admit(self, prompts: Sequence[PromptMeta]) -> None:
        """Make prompts pending, all or none.

        Raises:
            ConfigError, DuplicateUid, CapacityExceeded: nothing was admitted.
            ActorLost: the manager was closed.
        """
        async with self._changing():
            self._require_open()
            self._do(PromptQueue.admit, prompts)

    async def take_batch(self, num_groups: int, timeout_s: float, wanted: Sequence[str] = ()) -> TakeResult:
        """Wait for a batch of `num_groups` done groups and take it; under some tail policies this ends the round.

        With `wanted`, the groups of these uids and no others.

        Returns at once with `num_missing > 0` and no groups when fewer than `num_groups` prompts are on their way.

        Raises:
            WaitTimeout: the groups were not done after `timeout_s`.
            RunStopped: somebody has asked for the end of the run; no group was taken.
            InternalError: prompts were lost or doubled; lists the differences. Checked with every batch.
            ActorLost: the manager was closed.
        """
        async with self._changing():
            if self._journal.answered(call := self._call_id()):
                return self._journal.do(call, Books.take, num_groups, wanted)
            if not await _wait(self._takeable, lambda: self._ends_wait(num_groups, wanted), timeout_s):
                why = describe_wait(self._queue, num_groups, timeout_s)
                raise WaitTimeout(f"{why}; {len(self._workers)} workers known, gate {self._books.desk.gate!r}")
            self._require_open()
            if self._books.desk.stop_reason:
                raise RunStopped(self._books.desk.stop_reason)
            # Still under the lock: an event between the look and the taking could take the groups away.
            if self._queue.has_batch(num_groups, wanted):
                # Once a batch, and not for each prompt that is replaced: it looks at every prompt in flight.
                warn_of_long_running(
                    self._journal.do(NOBODY, PromptQueue.take_long_running, self._batch_s), self._batch_s
                )
            return self._do(Books.take, num_groups, wanted)

    async def discard_expired(self) -> list[str]:
        """Restart or drop the groups that the last batch's result called expired; returns the uids of the dropped ones.

        The rows of their trajectories must have been cleared.
        """
        async with self._changing():
            return self._do(PromptQueue.discard_expired)

    async def set_capacity(self, capacity: int) -> None:
        """Allow so many prompts in flight from the next round on; of the policy `partial` only."""
        async with self._changing():
            self._do(Books.set_capacity, capacity)

    async def report_step(self, step: int, weight_version: int, gate: str) -> None:
        """What the trainer does now, and the weight version that generates or did last: tokens age by it."""
        async with self._changing():
            if gate == "open":
                self._slots_in_use.restart(self._clock())
            self._do(Books.report_step, step, weight_version, gate)

    async def snapshot(self) -> QueueSnapshot:
        """All that `restore` needs."""
        # No lock: nothing is awaited, so no event can come in between.
        return self._queue.snapshot()

    async def restore(self, snapshot: QueueSnapshot) -> QueueStatistics:
        """Continue from a snapshot; raises InternalError if it does not add up or prompts were admitted already."""
        async with self._changing():
            self._require_open()
            return self._do(Books.restore, snapshot)

    # ---- workers ----

    async def claim(self, worker_id: str, free_slots: int, timeout_s: float) -> list[Claim]:
        """Long poll: claims that fit in `free_slots`, and the worker's own claims that go on, whether they fit or not.

        None at the timeout, when the manager is closed, or when `worker_id` is released. A worker that comes back after
        it was lost should use a new id: a call of it that is still on its way is not recognised.
        """
        # Read before the wait: a release in between ends this poll, also where the worker is known again since.
        num_releases = self._num_releases[worker_id]

        def ended() -> bool:
            # A poll parked by a worker that was lost meanwhile must not claim: nobody would give it back.
            return bool(self._closed) or self._num_releases[worker_id] != num_releases

        call, loop = self._call_id(), asyncio.get_running_loop()
        end_s = loop.time() + timeout_s

        def may_answer() -> bool:
            return self._journal.answered(call) or self._queue.can_claim(worker_id, free_slots)

        self._waiting[worker_id].add(call)
        try:
            # A call that has come meanwhile may have taken what this poll was woken for.
            while not (may := may_answer()) and not ended() and loop.time() < end_s:
                await self._polls.wait(free_slots, end_s - loop.time())
            claims = self._do(PromptQueue.claim, worker_id, free_slots) if may and not ended() else []
        finally:
            self._waiting[worker_id].discard(call)
            self._wake_one()
        if claims:
            self._schedule_export()
        return claims

    async def finish_many(self, groups: Sequence[tuple[Claim, Sequence[TrajectorySummary]]]) -> FinishResult:
        """Claimed groups are done; returns those that are refused or dropped.

        Raises InternalError for a group that is not whole.
        """
        async with self._changing():
            result = self._do(Books.finish_many, groups)
        for uid in result.stale:
            logger.warning("refused a group of prompt %s: its claim has ended", uid)
        return result

    async def fail(self, claim: Claim, reason: str) -> bool:
        """An attempt failed. True: given back for another one; False: dropped. Raises StaleClaim.

        `reason` may be any text: it is logged and shown, but not counted.
        """
        async with self._changing():
            given_back = self._do(Books.fail, claim, reason)
            logger.warning("attempt %d of %s failed (%s)", claim.attempt, claim.prompt_name, reason)
            return given_back

    async def expire(self, claim: Claim) -> bool:
        """The prompt's tokens are past the staleness bound. True: it starts again; False: it is dropped.

        Raises StaleClaim.
        """
        async with self._changing():
            return self._do(PromptQueue.expire, claim)

    async def drop(self, claim: Claim, reason: str) -> None:
        """Let a claimed prompt go for good, counted under the short fixed word `reason`; raises StaleClaim."""
        async with self._changing():
            self._do(PromptQueue.drop, claim, reason)

    async def give_back(self, claim: Claim) -> None:
        """Make a claimed prompt pending again without charging an attempt; raises StaleClaim."""
        async with self._changing():
            self._do(PromptQueue.give_back, claim)

    async def fence_worker(self, worker_id: str) -> list[Claim]:
        """Refuse the late reports of a lost worker from now on; returns its claims, oldest first."""
        return self._do(PromptQueue.fence_worker, worker_id)

    async def release_worker(self, worker_id: str, going_on: Sequence[str] = ()) -> ReleaseResult:
        """Give back all claims of a worker that is lost or stops, and end its long poll.

        Workers have been given tokens of the prompts `going_on`, from which their next claims go on. A prompt that has
        lost too many workers is dropped instead.
        """
        async with self._changing(wake_claims=True):
            # Ends a long poll of the worker that is parked in `claim`.
            self._num_releases[worker_id] += 1
            for poll in self._waiting.pop(worker_id, ()):  # Ray may make it again in a later process
                self._journal.do(poll, Books.claim_nothing)
            self._note_slots(worker_id, 0)
            self._workers.pop(worker_id, None)
            self._silence.forget(worker_id)
            result = self._do(Books.release_worker, worker_id, going_on)
        for claim in result.dropped:
            logger.warning(LOST_TOO_MANY, claim.prompt_name, MAX_LOSSES, worker_id)
            dropped = PromptDropped(uid=claim.uid, source_index=claim.source_index, reason=WORKER_LOST)
            self._queue_events.write(dropped)
        return result

    async def report_worker(self, worker_id: str, status: WorkerStatus) -> None:
        """Slots of a worker, for status and metrics; those of a worker that was released are known to be none."""
        if worker_id in self._num_releases:
            return
        self._note_slots(worker_id, status.inflight_trajectories)
        self._workers[worker_id] = status
        self._schedule_export()

    async def beat(self, worker_id: str, count: int) -> bool:
        """A sign of life of an actor, which puts off its deadline if `count` is not that of before.

        Returns whether the actor is to tell where it stands, by `tell_stack`.
        """
        if worker_id not in self._books.beating:
            self._journal.do(NOBODY, Books.beats, worker_id)
        self._silence.beat(worker_id, count)
        return self._stacks.is_asked(worker_id)

    async def tell_stack(self, name: str, stack: str) -> None:
        """Where the actor's thread for calls stands, innermost function first."""
        self._stacks.tell(name, stack)

    # ---- deaths ----

    async def meet(self, module: str) -> Process:
        """Where the manager runs; it begins to import a module that handles to come need, and does not wait for it."""
        self._importing = asyncio.ensure_future(asyncio.to_thread(import_module, module))
        self._importing.add_done_callback(_tell_failed_import)
        return own_process("", "")

    async def watch(self, actors: bytes, *, is_whole: bool = False) -> list[Process]:
        """Watch actors, given as (role, name, handle) and `packed`, from now on; returns where they run.

        `is_whole` says that these are all of the run at this time.
        """
        async with self._unpacking:  # calls must not overtake one another: an actor's name may come again
            handles = await unpacked(actors)
        return await self._deaths.watch(handles, is_whole=is_whole)

    async def forget(self, name: str) -> None:
        """The end of the actor of this name is no death: somebody has asked for it."""
        self._deaths.forget(name)
        self._silence.forget(name)
        self._do(Books.forget, name)

    async def end_silent(self, why: str, role: str = "", *, waits: bool = False) -> list[str]:
        """A wait has run out, `why` says which: kill the actors that are silent meanwhile.

        With `role` only those of this role are killed. Their deaths are told as any others. Returns in words all of
        this role that were killed and whose death is not noticed yet, also those that were killed before. `waits`: a
        wait that was shorter than a tenth of `claim_s` does not tell who is silent, so wait until somebody can. A
        new process of the manager waits until it was told whom to watch, too.
        """

        def is_meant(name: str) -> bool:
            process = self._deaths.process(name)
            return not role or (process is not None and process.role == role)

        if waits:
            await self._deaths.begun.wait()
            await self._silence.decided(is_meant)
        for name, silent_s in self._silence.late().items():
            if is_meant(name):
                self._silence.forget(name)
                silent = f"it had given no sign of life for {silent_s:.0f} s"
                self._end_silent(name, f"it was killed, because {silent} when a wait ran out: {why}")
        return [f"{self._call(name)}: {cause}" for name, cause in self._deaths.dying.items() if is_meant(name)]

    async def stacks(self, names: Sequence[str], timeout_s: float) -> dict[str, str]:
        """The stacks of watched actors, which may be busy; an actor that does not tell in time is left out."""
        return await self._stacks.of(names, timeout_s)

    async def next_death(self, timeout_s: float, known: Process | None = None) -> Death | None:
        """Long poll: a death that was not told yet; None at the timeout, or when the manager is closed.

        The first is that of the manager's own process before, if the caller knows of no other one.
        """
        if known is not None and known.pid not in (0, os.getpid()):
            lines = await asyncio.to_thread(last_lines, known.log) if known.log else ""
            return Death(known, "its process has ended, and Ray has started another one", "", lines)
        return None if self._closed else await self._deaths.next_death(timeout_s)

    async def until_killed(self) -> None:
        """Never return: the actor is killed at the end of the run."""
        await asyncio.Event().wait()

    # ---- anybody ----

    async def statistics(self) -> QueueStatistics:
        """Counts at this moment."""
        return self._queue.statistics()

    async def status(self) -> ManagerStatus:
        """Counts, workers, step and gate at this moment."""
        return self._status()

    async def request_stop(self, reason: str) -> bool:
        """Ask for the end of the run, with a checkpoint: `take_batch` raises RunStopped from now on.

        False: training has not begun, so there is nothing to save and nobody to wait for.
        """
        async with self._changing():
            return self._do(Books.request_stop, reason)

    async def stop_reason(self) -> str:
        """Why the run should end; empty while it should not."""
        return self._books.desk.stop_reason

    async def close(self, reason: str) -> None:
        """End all waits: `claim` returns nothing, `take_batch` and `admit` raise ActorLost. Reports stay accepted.

        The first reason is kept.
        """
        async with self._changing(wake_claims=True):
            self._do(Books.close, reason)
        self._silence.stop()
        await self._deaths.end()

    # ---- inside ----

    def _end_silent(self, name: str, why: str) -> bool:
        """The deadline of an actor has passed: what a worker reports late is refused, before and after it dies."""
        if not self._deaths.kill(name, why):
            return False
        self._journal.do(NOBODY, PromptQueue.fence_worker, name)
        return True

    def _call(self, name: str) -> str:
        return str(self._deaths.process(name) or name)

    async def _ask(self, actor: Watched) -> Process:
        """Where an actor runs; from now on it sends signs of life. Agent-loop workers send others, by themselves."""
        if actor.role == AGENT_LOOP_WORKER.role:
            if actor.name in self._books.beating:
                self._silence.beat(actor.name, -1)  # it owes the next sign of life, also to a later process
            return await ask_where(actor)
        own: Any = ray.get_runtime_context().current_actor
        self._silence.beat(actor.name, 0)  # it may freeze before its first sign of life
        return await actor.handle.__ray_call__.remote(begin_beats, own, actor.name, self._claim_s)

    @asynccontextmanager
    async def _changing(self, *, wake_claims: bool = False) -> AsyncIterator[None]:
        """Hold the lock; after a change that raised nothing, let whoever waits look again whether it may go on."""
        async with self._takeable:
            yield
            if wake_claims:
                self._polls.wake_all()
            else:
                self._wake_one()
            self._takeable.notify_all()
            self._schedule_export()

    def _wake_one(self) -> None:
        """Let a worker claim the next prompt, if there is one; that worker's poll wakes the next worker."""
        if self._queue.has_startable_suspect:
            # The one that is woken may not be given it, and would not wake the next one.
            self._polls.wake_all()
        elif num_slots := self._queue.next_group_size:
            self._polls.wake_one(num_slots)

    @property
    def _queue(self) -> PromptQueue:
        return self._books.queue

    @property
    def _closed(self) -> str:
        return self._books.desk.closed

    def _do(self, change: Callable[Concatenate[Any, P], R], *arguments: P.args, **no_keywords: P.kwargs) -> R:
        """Make the one change of the call that runs; returns or raises what the change does."""
        return self._journal.do(self._call_id(), change, *arguments, **no_keywords)

    def _require_open(self) -> None:
        # A call that Ray makes again gets the answer of the change that it has made before the end.
        if self._closed and not self._journal.answered(self._call_id()):
            raise ActorLost(f"the prompt manager was closed: {self._closed}")

    def _ends_wait(self, num_groups: int, wanted: Sequence[str]) -> bool:
        return bool(self._closed or self._books.desk.stop_reason) or self._queue.can_take(num_groups, wanted)

    async def _park(self, handle: Any) -> None:
        """Return never, or raise RayActorError when the actor dies."""
        if self._never is None:
            self._never = ray.get_runtime_context().current_actor.until_killed.remote()
        own_call = getattr(handle, PARKED_AT, None)
        if own_call is None:
            await handle.__ray_call__.remote(nothing, self._never)
        else:
            # Ray would make the call above at the next process of the actor; one that runs fails with its process.
            await own_call.options(max_task_retries=0).remote()

    def _doing(self, name: str) -> str:
        uids = self._queue.uids_of_worker(name)
        return f"generated {len(uids)} prompts, {', '.join(uids[:3])} among them" if uids else ""

    def _note_slots(self, worker_id: str, in_use: int) -> None:
        known = self._workers.get(worker_id)
        self._slots_in_use.change(in_use - (known.inflight_trajectories if known else 0), self._clock())

    def _status(self) -> ManagerStatus:
        desk = self._books.desk
        return ManagerStatus(
            queue=self._queue.statistics(),
            capacity=self._queue.policy.capacity,
            workers=dict(self._workers),
            step=desk.step,
            weight_version=desk.weight_version,
            gate=desk.gate,
            last_failure=desk.last_failure,
            closed=desk.closed,
            events=self._events,
            mean_slots_in_use=self._slots_in_use.mean(self._clock()),
        )

    def _schedule_export(self) -> None:
        if self._export_timer is None and (self._metrics is not None or self._events):
            self._export_timer = asyncio.get_running_loop().call_later(METRICS_INTERVAL_S, self._export)

    def _export(self) -> None:
        """Show the status; keep doing so while prompts are in flight, because ages grow without events."""
        self._export_timer = None
        status = self._status()
        if self._metrics is not None:
            self._metrics.update(status)
        if (moved := queue_event(status)) != self._queue_told:
            self._queue_told = moved
            self._queue_events.write(moved)
        if status.queue.in_flight and not self._closed:
            self._schedule_export()


def queue_event(status: ManagerStatus) -> QueueMoved:
    """What the event stream has of the status."""
    queue = status.queue
    return QueueMoved(
        step=status.step,
        pending=queue.pending,
        ongoing=queue.ongoing,
        deferred=queue.deferred,
        done=queue.done,
        taken=queue.taken,
        slots_in_use=status.slots_in_use,
        slots_total=status.slots_total,
        parked=status.parked_requests,
        admitted=queue.admitted,
        dropped=queue.num_dropped,
    )


def _tell_failed_import(importing: asyncio.Future[Any]) -> None:
    if not importing.cancelled() and (error := importing.exception()) is not None:
        logger.warning("what handles of actors need cannot be imported: %r", error)


async def _wait(condition: asyncio.Condition, predicate: Callable[[], bool], timeout_s: float) -> bool:
    """Whether `predicate` came true within `timeout_s`; the condition's lock is held before and after."""
    if predicate() or timeout_s <= 0:
        return predicate()
    try:
        return await asyncio.wait_for(condition.wait_for(predicate), timeout_s)
    except asyncio.TimeoutError:
        return predicate()  # the change may have come while the lock was taken again


def create_manager(
    config: PartialRolloutConfig, train_batch_size: int, place: Any = "DEFAULT", name: str = MANAGER_NAME
) -> ActorHandle:
    """Start the manager as a named actor that lives as long as its creator; Ray must be initialised.

    `place` is Ray's scheduling strategy.

    Raises:
        ClusterError: another manager with this name is running in the namespace.
    """
    options = {"name": name, "namespace": NAMESPACE, "scheduling_strategy": place, **ACTOR_OPTIONS, **RESTARTED}
    actor_class: Any = ray.remote(RolloutPromptManager).options(**options)
    policy = make_policy(config, train_batch_size)
    bound = make_bound(config.tail, policy, train_batch_size)
    logger.info("tail policy %s: %s", policy, describe_bound(policy))
    events = events_folder(config)
    more: dict[str, Any] = {"batch_s": config.timeouts.batch_s, "claim_s": config.timeouts.claim_s, "events": events}
    more |= {"journal": partial(journal_place, uuid.uuid4().hex), "call_id": ray_call_id}
    metrics = partial(ManagerMetrics, run_name(events))
    try:
        return actor_class.remote(policy, config.max_attempts, metrics=metrics, bound=bound, **more)
    # Two runs that start within the same second both find the cluster free. Ray gives the name to one of them.
    except ValueError as error:
        raise ClusterError(
            f"a prompt manager named {name!r} is already running in namespace {NAMESPACE!r}: end that run, or start "
            "this one on a Ray cluster of its own (ray_kwargs.ray_init.address, RAY_ADDRESS)"
        ) from error


def journal_place(name: str) -> Place:
    """Run in the manager's process: where the journal of this name is, beside the logs of this Ray on this node."""
    session: Any = ray_worker._global_node
    is_later = bool(ray.get_runtime_context().was_current_actor_reconstructed)
    return Place(Path(session.get_session_dir_path()) / f"prompt_manager_{name}", is_later)


def ray_call_id() -> str:
    """Ray's id of the running call; the call that Ray makes again in its place has the same id."""
    return ray.get_runtime_context().get_task_id() or NOBODY


def find_manager(name: str = MANAGER_NAME) -> ActorHandle:
    """The running manager of that name; raises ActorLost if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise ActorLost(
            f"no prompt manager named {name!r} in namespace {NAMESPACE!r}: the run has not started or has ended"
        ) from error


def warn_of_long_running(claims: Sequence[tuple[Claim, float]], limit_s: float) -> None:
    """Log each claim that has been ongoing for more than `limit_s`, with its age in seconds."""
    for claim, age_s in claims:
        logger.warning(
            "prompt %r is ongoing at worker %r for %.1f s (attempt %d; time held back is not counted), more than "
            "partial_rollout.timeouts.batch_s=%g: its unfinished trajectories keep their slots",
            claim.uid,
            claim.worker_id,
            age_s,
            claim.attempt,
            limit_s,
        )


def describe_wait(queue: PromptQueue, num_groups: int, timeout_s: float) -> str:
    """What the queue knows of the reason why `num_groups` groups were not done after `timeout_s`."""
    now = queue.statistics()
    oldest = (
        f"oldest ongoing prompt {now.oldest_ongoing_uid!r} at worker {now.oldest_ongoing_worker!r} "
        f"for {now.oldest_ongoing_s:.1f} s"
        if now.ongoing
        else f"no prompt is ongoing, the next one needs {queue.next_group_size} free slots"
    )
    num_due = queue.num_due(num_groups)
    due = f"; {num_due} ongoing prompts must finish before, by partial_rollout.tail.max_staleness" if num_due else ""
    return (
        f"take_batch waited {timeout_s:.1f} s for {num_groups} groups: pending {now.pending}, "
        f"ongoing {now.ongoing}, done {now.done}, deferred {now.deferred}; {oldest}{due}"
    )


def describe_bound(policy: TailPolicy) -> str:
    """How long a prompt may take from its admission to its end, in training steps."""
    if policy.max_steps is None:
        return "there is no limit to the steps after which an admitted prompt is trained or dropped"
    return f"an admitted prompt is trained or dropped within {policy.max_steps} steps"
