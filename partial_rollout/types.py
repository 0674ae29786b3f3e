"""Small immutable values that cross actor boundaries.

They carry names, counts and versions, never tokens: one step's control traffic must not grow with response length.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """A worker's exclusive right to generate one prompt; a report with an older `claim_id` is refused."""

    uid: str
    claim_id: int
    worker_id: str
    num_trajectories: int
    global_step: int
    attempt: int
    """1 for the first try; grows when a group failed or its worker was lost."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`num_tokens` consecutive response tokens sampled under one weight version."""

    version: int
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
    """Tokens (prompt and response so far) sent to the engine again after interruptions."""
    version_spans: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """All trajectories of one prompt; the unit of training."""

    uid: str
    global_step: int
    source_index: str
    trajectories: tuple[TrajectorySummary, ...]


@dataclass(frozen=True, slots=True)
class TakeResult:
    """Answer to `take_batch`: either `groups` is full, or `num_missing` prompts must be admitted first."""

    groups: tuple[FinishedGroup, ...] = ()
    num_missing: int = 0


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Counts at one moment. Invariant: admitted == pending + ongoing + done + taken + dropped."""

    admitted: int
    pending: int
    ongoing: int
    done: int
    taken: int
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped prompts by reason."""
    failed_attempts: int = 0
    """Attempts that failed and were given back to the queue."""
    claimed_trajectories: int = 0
    """Trajectories of all ongoing prompts."""
    oldest_ongoing_s: float = 0.0
    """Age of the oldest claim."""
    oldest_ongoing_uid: str = ""

    @property
    def in_flight(self) -> int:
        """Prompts admitted and neither trained nor dropped: what the prefetch cap counts."""
        return self.pending + self.ongoing + self.done

    @property
    def num_dropped(self) -> int:
        """Dropped prompts of all reasons."""
        return sum(self.dropped.values())

    @property
    def conserved(self) -> bool:
        """Whether the conservation invariant holds."""
        return self.admitted == self.in_flight + self.taken + self.num_dropped
