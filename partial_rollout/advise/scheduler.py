"""The service's scheduling in virtual time: what a step of rollout takes, from an engine's speed and response lengths.

Prompts are admitted, claimed in whole groups and trained by the service's own queue, `PromptQueue`, whose clock is the
virtual time; what the trainer, the workers and the engines do around it is here. Slots, prompts in flight and what an
interruption costs are the mode's. A rollout that needs more than the whole KV cache would see preemptions, which are
not predicted. Pure: no clock, no randomness, no I/O.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.tail import Partial
from partial_rollout.errors import InternalError
from partial_rollout.types import PromptMeta, TrajectorySummary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from partial_rollout.advise.workload import Workload
    from partial_rollout.types import Claim

WORKER = "all workers"
"""Claims for all slots: one agent-loop worker is assumed."""
MAX_ATTEMPTS = 1
"""No attempt fails."""
SENT_PER_S = 130.0
"""New requests that one agent-loop worker brings to an engine, by the samples of the 8B result after a step's end.
Requests that were interrupted wait at the server, and are all there at once."""


@dataclass(frozen=True)
class Speed:
    """An engine's speed: a decode step takes `base + request * requests + token * tokens in the KV cache` seconds.

    >>> Speed(0.004, 0.0, 0.0, prefill_tokens_per_s=1000.0, interruption_s=0.0).decode_s(steps=10, requests=1, kv=0)
    0.04
    """

    base: float
    request: float
    token: float
    prefill_tokens_per_s: float
    interruption_s: float
    """Seconds of one interruption: draining the engine, and resuming."""
    sent_per_s: float = SENT_PER_S
    """New requests that agent-loop workers bring, one worker for each engine."""

    def of_replicas(self, number: int) -> Speed:
        """The speed of `number` engines together, each with an equal share of the requests, as from the load balancer.

        >>> Speed(0.004, 0.002, 0.0, prefill_tokens_per_s=1000.0, interruption_s=0.0).of_replicas(2).request
        0.001
        """
        return replace(
            self,
            request=self.request / number,
            token=self.token / number,
            prefill_tokens_per_s=self.prefill_tokens_per_s * number,
            sent_per_s=self.sent_per_s * number,
        )

    def decode_s(self, steps: int, requests: int, kv: int) -> float:
        """Seconds of `steps` decode steps of the same requests, whose KV cache holds `kv` tokens at the beginning."""
        grown = steps * kv + requests * steps * (steps - 1) / 2
        return steps * (self.base + self.request * requests) + self.token * grown


@dataclass(frozen=True)
class Mode:
    """How a trainer rolls out: slots, prompts in flight, and what happens to requests when a step ends."""

    name: str
    slots: int
    prefetch: float
    """Prompts in flight, in batches."""
    retains_kv: bool = True
    interrupts: bool = True
    """False: requests go on as if no step had ended. No mode can be faster with these slots."""
    oldest_first: bool = False
    """Which of the finished groups are trained first: those that were admitted first, or those that finished first."""
    poll_s: float = 0.0
    """Seconds between two looks of the trainer whether a batch is done; 0: the trainer is told at once."""
    train_s: float = 0.0
    """Seconds of training during which engines go on, on GPUs of their own; 0: they stand still, and no time passes."""


@dataclass(eq=False)
class Group:
    """The responses to one prompt."""

    lengths: list[int]
    started: int = 0
    """The training step in which the group was claimed."""
    num_ended: int = 0
    claim: Claim | None = None


class Request(NamedTuple):
    """A response that is still generated."""

    length: int
    group: Group


@dataclass
class Rollout:
    """The engine and all prompts in flight, in virtual time. `step` is one training step's rollout."""

    mode: Mode
    speed: Speed
    load: Workload
    prompt_tokens: int
    prompts: Iterator[Group]
    groups: dict[str, Group] = field(default_factory=dict[str, Group])
    """Groups in flight, by uid."""
    ongoing: int = 0
    """Number of groups whose prompt is in the KV cache: claimed, and not done."""
    done: dict[str, Group] = field(default_factory=dict[str, Group])
    """Groups in flight that are complete, in the order of their ends."""
    entering: deque[tuple[float, Request]] = field(default_factory=deque[tuple[float, Request]])
    """Requests on their way to the engine, with the time of their arrival."""
    running: list[tuple[int, int, Request]] = field(default_factory=list[tuple[int, int, Request]])
    """A heap of (decode step after which a response ends, a number that breaks ties, the response)."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    decoded: int = 0
    """Decode steps so far."""
    context: int = 0
    """Tokens of all running requests, each with its prompt."""
    most_kv: int = 0
    """The most tokens that the KV cache held; a group has its prompt there once."""
    now_s: float = 0.0
    slot_s: float = 0.0
    number: int = 0

    def __post_init__(self) -> None:
        """Make the queue."""
        self.queue = PromptQueue(self._policy, MAX_ATTEMPTS, clock=lambda: self.now_s)
        self._uids = map(str, itertools.count())

    @property
    def _policy(self) -> Partial:
        """Modes that interrupt nothing differ in the engine only: the queue of all of them is this one."""
        return Partial(max(self.load.batch, int(self.mode.prefetch * self.load.batch)))

    def step(self) -> dict[str, float]:
        """Roll out until a batch is done; seconds, tokens, interrupted requests and staleness of this step."""
        self.number += 1
        started_s, started_slot_s = self.now_s, self.slot_s
        interrupted, recomputed = self._interrupt()
        self.queue.resize(self._policy)
        self._admit(self.queue.begin_round().num_fresh)
        while not self.queue.has_batch(self.load.batch):
            self._proceed()
        if self.mode.poll_s:
            polls = math.ceil((self.now_s - started_s) / self.mode.poll_s)
            self._proceed_until(started_s + polls * self.mode.poll_s)
        batch = self._take()
        ages = [self.number - group.started for group in batch]
        if self.mode.train_s:
            self._admit(self.queue.begin_round().num_fresh)
            self._proceed_until(self.now_s + self.mode.train_s)
        return {
            "seconds": self.now_s - started_s,
            "slot_s": self.slot_s - started_slot_s,
            "tokens": sum(sum(group.lengths) for group in batch),
            "interrupted": interrupted,
            "reprefilled": recomputed,
            "staleness_mean": statistics.fmean(ages),
            "staleness_max": max(ages),
        }

    @property
    def kv(self) -> int:
        """Tokens in the KV cache, where a group has its prompt once, from its claim on."""
        return self.context - self.prompt_tokens * (len(self.running) - self.ongoing)

    def _admit(self, number: int) -> None:
        fresh = {next(self._uids): group for group in itertools.islice(self.prompts, number)}
        self.groups |= fresh
        self.queue.admit([PromptMeta(uid, len(group.lengths), self.number) for uid, group in fresh.items()])

    def _take(self) -> list[Group]:
        """The batch; where the mode takes the oldest of what is done, as verl does, the queue is told which."""
        oldest: list[str] = []
        if self.mode.oldest_first:
            oldest = sorted(self.done, key=lambda uid: self.done[uid].started)[: self.load.batch]
        taken = [group.uid for group in self.queue.take(self.load.batch, oldest).groups]
        for uid in taken:
            del self.done[uid]
        return [self.groups.pop(uid) for uid in taken]

    def _interrupt(self) -> tuple[int, int]:
        """End a step for running requests; how many were interrupted, and tokens that are computed again."""
        interrupted = len(self.running)
        if not interrupted or not self.mode.interrupts:
            return 0, 0
        recomputed = 0 if self.mode.retains_kv else self.kv
        self.now_s += self.speed.interruption_s + recomputed / self.speed.prefill_tokens_per_s
        return interrupted, recomputed

    def _send(self, requests: Iterable[Request]) -> None:
        """Put requests on their way to the engine, one after the other."""
        at_s = max(self.now_s, self.entering[-1][0] if self.entering else 0.0)
        for number, request in enumerate(requests, 1):
            self.entering.append((at_s + number / self.speed.sent_per_s, request))

    def _claim(self) -> None:
        """Send the groups that the queue gives for the free slots."""
        free_slots = self.mode.slots - len(self.running) - len(self.entering)
        # Asked after every end of a response, and most free no room for a group; no claim is deferred that would resume
        # without room.
        if free_slots < self.load.group or not self.queue.next_group_size:
            return
        for claim in self.queue.claim(WORKER, free_slots):
            group = self.groups[claim.uid]
            group.claim, group.started = claim, self.number
            self.ongoing += 1
            self._send(Request(length, group) for length in group.lengths)
            self.now_s += self.prompt_tokens / self.speed.prefill_tokens_per_s

    def _enter(self) -> None:
        """Let requests that have arrived run; an idle engine waits for the next one."""
        if not self.running:
            self.now_s = max(self.now_s, self.entering[0][0])
        while self.entering and self.entering[0][0] <= self.now_s:
            _, request = self.entering.popleft()
            heapq.heappush(self.running, (self.decoded + request.length, next(self.numbers), request))
            self.context += self.prompt_tokens

    def _proceed(self, until_s: float = math.inf) -> None:
        self._claim()
        self._enter()
        self._decode(until_s)

    def _proceed_until(self, until_s: float) -> None:
        while self.now_s < until_s and (self.running or self.entering or self.queue.next_group_size):
            self._proceed(until_s)
        self.now_s = max(self.now_s, until_s)

    def _decode(self, until_s: float) -> None:
        """Decode until the next responses end, the next request arrives, or about `until_s`."""
        steps, requests, kv = self.running[0][0] - self.decoded, len(self.running), self.kv
        if self.entering:
            until_s = min(until_s, self.entering[0][0])
        if until_s < math.inf:
            left_s = max(0.0, until_s - self.now_s)
            steps = max(1, min(steps, math.ceil(left_s / self.speed.decode_s(1, requests, kv))))
        seconds = self.speed.decode_s(steps, requests, kv)
        self.now_s += seconds
        self.slot_s += requests * seconds
        self.decoded += steps
        self.context += requests * steps
        self.most_kv = max(self.most_kv, kv + requests * steps)
        while self.running and self.running[0][0] == self.decoded:
            request = heapq.heappop(self.running)[2]
            self.context -= self.prompt_tokens + request.length
            request.group.num_ended += 1
            if request.group.num_ended == len(request.group.lengths):
                self._finish(request.group)

    def _finish(self, group: Group) -> None:
        if group.claim is None:
            raise InternalError("a group is done that nobody has claimed")
        self.queue.finish(group.claim, _whole(len(group.lengths)))
        self.ongoing -= 1
        self.done[group.claim.uid] = group


@cache
def _whole(size: int) -> tuple[TrajectorySummary, ...]:
    """A whole group for the queue, which asks for the number of its trajectories only."""
    return tuple(TrajectorySummary(str(session), 0, 0, 0, 0) for session in range(size))
