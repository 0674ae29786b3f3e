"""Small immutable values that actors send each other.

They carry names, counts and versions, but no tokens: what a step sends must not grow with the length of responses.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

MANAGER_NAME = "rollout_prompt_manager"
"""Name of the prompt manager's actor: a Ray cluster carries one run."""


@dataclass(frozen=True, slots=True)
class PromptMeta:
    """What the manager knows of a prompt; the row itself lives in TransferQueue under `uid`."""

    uid: str
    num_trajectories: int
    """Group size: trajectories to generate for this prompt, at least 1."""
    global_step: int
    """Training step in which the prompt left the dataloader."""
    source_index: str = ""
    """The data set's own index of the row (`extra_info.index`), for people and logs."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's exclusive right to generate one prompt; a report on a claim that has ended is refused."""

    uid: str
    claim_id: int
    worker_id: str
    num_trajectories: int
    global_step: int
    attempt: int
    """1 at first; one more after each failure, loss of its worker, or loss of its tokens to the staleness bound."""
    goes_on: bool = False
    """Whether the trajectories may go on from tokens that a checkpoint has kept, or the log of a lost worker."""
    source_index: str = ""
    """The data set's own index of the row, as in `PromptMeta`."""

    @property
    def prompt_name(self) -> str:
        """The prompt for people: its uid, and which row of the data set it is."""
        return (
            f"prompt {self.uid} (extra_info.index={self.source_index})" if self.source_index else f"prompt {self.uid}"
        )


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`num_tokens` consecutive response tokens sampled under one weight version."""

    version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ContextSpan:
    """`num_tokens` consecutive response tokens whose contexts came to be in the engine in the same way."""

    kv_version: int
    """No KV of the context is older than this weight version."""
    origin: str
    """`fresh` until the first interruption, then the name of the interrupt mode that the context went through."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TrajectorySummary:
    """What training needs to know of a finished trajectory without reading its tensors."""

    key: str
    """TransferQueue key `{uid}_{session}_{index}`."""
    prompt_len: int
    response_len: int
    min_version: int
    """Oldest weight version that sampled a token of this trajectory."""
    max_version: int
    num_interruptions: int = 0
    num_reprefilled_tokens: int = 0
    """Tokens of the prompt and the response so far that engines have computed again after interruptions."""
    version_spans: tuple[VersionSpan, ...] = ()
    context_spans: tuple[ContextSpan, ...] = ()
    metric: float | None = None
    """What `algorithm.filter_groups` compares within a group; None where groups are not filtered."""
    log_checksum: int = 0
    """Checksum of the trajectory's record in the log of rollouts; 0: the trajectory has no record."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """All trajectories of one prompt; the unit of training."""

    uid: str
    global_step: int
    source_index: str
    trajectories: tuple[TrajectorySummary, ...]
    num_deferrals: int = 0
    """How many rounds have ended without the group."""

    @property
    def min_version(self) -> int:
        """Oldest weight version that sampled one of its tokens."""
        return min(trajectory.min_version for trajectory in self.trajectories)

    @property
    def num_sessions(self) -> int:
        """Agent loops that ran for the prompt; one may return several trajectories."""
        return len({trajectory.key.rsplit("_", 1)[0] for trajectory in self.trajectories})


@dataclass(frozen=True, slots=True)
class FinishResult:
    """Answer to `finish_many`: which of the groups will not be trained."""

    stale: tuple[str, ...] = ()
    """Prompts whose claims had ended: their groups were refused."""
    no_spread: tuple[str, ...] = ()
    """Prompts that were dropped, because all trajectories have the same metric: the caller clears their rows."""


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """Answer to `release_worker`: what became of the worker's prompts, in the order of its claims."""

    given_back: tuple[str, ...] = ()
    """Prompts that others may claim."""
    dropped: tuple[Claim, ...] = ()
    """Claims whose prompts were dropped, because they have lost too many workers: the caller clears their rows."""


@dataclass(frozen=True, slots=True)
class TakeResult:
    """Answer to `take_batch`: either `groups` is full, or `num_missing` prompts must be admitted first."""

    groups: tuple[FinishedGroup, ...] = ()
    num_missing: int = 0
    num_filtered: int = 0
    """How many of the missing prompts replace groups without spread."""
    filtered: dict[float, int] = field(default_factory=dict[float, int])
    """Groups without spread that were dropped since the last answer: their number by the metric that they share."""
    deferred: tuple[Claim, ...] = ()
    """Claims whose prompts are deferred now: their trajectories must be held back."""
    expired: tuple[FinishedGroup, ...] = ()
    """Groups past the staleness bound: the caller clears their rows and then calls `discard_expired`."""


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Numbers of prompts at one moment. Always: admitted == pending + ongoing + deferred + done + taken + dropped."""

    admitted: int
    pending: int
    ongoing: int
    done: int
    taken: int
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped prompts by reason."""
    deferred: int = 0
    """Prompts held back, with their tokens, until a later round."""
    failed_attempts: int = 0
    """Attempts that failed and were given back to the queue."""
    restarted: int = 0
    """Attempts given back because their tokens were past the staleness bound."""
    claimed_trajectories: int = 0
    """Trajectories of all ongoing prompts."""
    oldest_ongoing_s: float = 0.0
    """Seconds since the oldest claim of an ongoing prompt, without the time in which it was held back."""
    oldest_ongoing_uid: str = ""
    oldest_ongoing_worker: str = ""

    @property
    def in_flight(self) -> int:
        """Prompts admitted and neither trained nor dropped: what the prefetch cap counts."""
        return self.pending + self.ongoing + self.deferred + self.done

    @property
    def num_dropped(self) -> int:
        """Dropped prompts of all reasons."""
        return sum(self.dropped.values())

    @property
    def conserved(self) -> bool:
        """Whether the conservation invariant holds."""
        return self.admitted == self.in_flight + self.taken + self.num_dropped


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """What a checkpoint holds of the queue; after a restart the ongoing prompts are the first pending ones."""

    pending: tuple[PromptMeta, ...] = ()
    """In the order in which they would be claimed."""
    ongoing: tuple[PromptMeta, ...] = ()
    """In the order in which they were claimed."""
    deferred: tuple[PromptMeta, ...] = ()
    """Most often deferred first."""
    done: tuple[FinishedGroup, ...] = ()
    """Oldest finished first."""
    admitted: int = 0
    """A count of its own, not a sum: `restore` compares it with the prompts that are there."""
    taken: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    failed_attempts: int = 0
    restarted: int = 0
    begun: dict[str, int] = field(default_factory=dict)
    """By uid of an unfinished prompt that has begun: the weight version at which it did."""
    failures: dict[str, int] = field(default_factory=dict)
    """Failed attempts so far, by uid of an unfinished prompt that has any."""
    restarts: dict[str, int] = field(default_factory=dict)
    """Attempts so far whose tokens were past the staleness bound, by uid of an unfinished prompt that has any."""
    losses: dict[str, int] = field(default_factory=dict)
    """Attempts so far that ended with the loss of their worker, by uid of an unfinished prompt that has any."""
    deferrals: dict[str, int] = field(default_factory=dict)
    """Deferrals so far, by uid of an unfinished prompt that has any."""
    next_claim_id: int = 1
    """Saved so that no claim from before the restart has the id of a later one."""

    @property
    def unfinished(self) -> tuple[PromptMeta, ...]:
        """Prompts whose trajectories are not complete."""
        return self.deferred + self.ongoing + self.pending

    def without(self, uids: AbstractSet[str], reason: str) -> QueueSnapshot:
        """The snapshot as if those unfinished prompts among `uids` had been dropped for `reason`."""
        num_dropped = sum(prompt.uid in uids for prompt in self.unfinished)
        if not num_dropped:
            return self

        def kept(prompts: tuple[PromptMeta, ...]) -> tuple[PromptMeta, ...]:
            return tuple(prompt for prompt in prompts if prompt.uid not in uids)

        return replace(
            self,
            pending=kept(self.pending),
            ongoing=kept(self.ongoing),
            deferred=kept(self.deferred),
            dropped=self.dropped | {reason: self.dropped.get(reason, 0) + num_dropped},
            failures={uid: count for uid, count in self.failures.items() if uid not in uids},
            restarts={uid: count for uid, count in self.restarts.items() if uid not in uids},
            losses={uid: count for uid, count in self.losses.items() if uid not in uids},
            deferrals={uid: count for uid, count in self.deferrals.items() if uid not in uids},
            begun={uid: version for uid, version in self.begun.items() if uid not in uids},
        )

    def owned_keys(self) -> set[str]:
        """TransferQueue keys the queue still needs: rows of all prompts in flight, trajectories of done groups."""
        rows = {prompt.uid for prompt in self.unfinished} | {group.uid for group in self.done}
        return rows | {trajectory.key for group in self.done for trajectory in group.trajectories}


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker reported last of itself."""

    inflight_trajectories: int
    slot_budget: int
    requests_in_flight: int = 0
    """Generate calls at the engines; all of them wait while the gate is closed."""
    held_trajectories: int = 0
    """Trajectories of deferred prompts, kept with their tokens and without a slot."""


@dataclass(frozen=True, slots=True)
class ManagerStatus:
    """What the prompt manager shows: the status command, the metrics and the tests read it."""

    queue: QueueStatistics
    capacity: int
    workers: dict[str, WorkerStatus] = field(default_factory=dict)
    step: int = -1
    """The training step that the trainer reported last; -1 before the first one."""
    weight_version: int = -1
    gate: str = "unknown"
    last_failure: str = ""
    """Uid of the prompt whose attempt failed last, and the reason."""
    closed: str = ""
    """Why the manager was closed; empty while it is open."""
    events: str = ""
    """Folder of the run's event stream; empty: there is none."""
    mean_slots_in_use: float = 0.0
    """Mean of `slots_in_use` over the time since the round began or the gates opened, whichever was later.

    A prompt manager that was started again counts from its own start, and those workers only that have reported since.
    """

    @property
    def slots_in_use(self) -> int:
        """Trajectories in generation over all workers."""
        return sum(worker.inflight_trajectories for worker in self.workers.values())

    @property
    def slots_total(self) -> int:
        """Slot budgets of all workers."""
        return sum(worker.slot_budget for worker in self.workers.values())

    @property
    def parked_requests(self) -> int:
        """Requests that wait at a closed gate; 0 while it is open."""
        if self.gate != "closed":
            return 0
        return sum(worker.requests_in_flight for worker in self.workers.values())


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the run, by the names that an error gives it."""

    role: str
    name: str
    node: str = ""
    """Address of its node; empty while it is not known."""
    pid: int = 0
    log: str = ""
    """Path of its log on its node."""

    def __str__(self) -> str:
        """In one line."""
        where = f" (pid {self.pid} on node {self.node})" if self.pid else ""
        return (f"{self.role} {self.name}" if self.name != self.role else self.role) + where


@dataclass(frozen=True, slots=True)
class Death:
    """A process of the run has died."""

    process: Process
    cause: str
    """What Ray says of its end."""
    doing: str = ""
    """What the process was occupied with."""
    last_lines: str = ""
    """The last lines of the process's log."""

    def __str__(self) -> str:
        """What an error says of it."""
        text = f"{self.process} died: {self.cause}"
        if self.doing:
            text += f"; it {self.doing}"
        if self.process.log:
            text += f". Its log is {self.process.log}"
        if self.last_lines:
            text += f", which ends with:\n{self.last_lines}"
        return text
