"""Generate calls of trajectories that have not been trained, so that a checkpoint can hold their tokens.

A restarted trajectory runs its agent loop again; each generate call that asks what the saved one asked is answered from
it, and the last one goes on. From the first call that differs (a tool that answers differently), all is generated anew.
"""

from __future__ import annotations

import logging
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING

from partial_rollout.errors import TooStale

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from partial_rollout.core.resume import GenerationState, ResumableGeneration
    from partial_rollout.types import Claim

logger = logging.getLogger(__name__)

Saved = dict[str, list["GenerationState"]]
"""Generate calls by trajectory, `{uid}_{session}`, in the order in which they were made."""

_current: ContextVar[_Trajectory | None] = ContextVar("partial_rollout_journal", default=None)


class _Trajectory:
    def __init__(self, claim_id: int, uid: str, saved: Sequence[GenerationState]) -> None:
        self.claim_id, self.uid = claim_id, uid
        self._saved = deque(saved)
        self.generations: list[ResumableGeneration] = []

    def record(self, generation: ResumableGeneration) -> GenerationState | None:
        """Returns the saved call that `generation` does not go on from, if there is one."""
        self.generations.append(generation)
        if not self._saved:
            return None
        saved = self._saved.popleft()
        if generation.adopt(saved):
            return None
        self._saved.clear()
        return saved

    def versions(self) -> Iterator[int]:
        """Weight versions that sampled tokens of calls made."""
        return (span.version for generation in self.generations for span in generation.spans)

    def states(self) -> list[GenerationState]:
        """Calls made, then saved ones that are still ahead."""
        return [*(generation.state() for generation in self.generations), *self._saved]


class Journals:
    """Journals of one worker's trajectories: `start` in the trajectory's task, `forget` when its group has ended."""

    def __init__(self) -> None:
        self._running: dict[int, dict[str, _Trajectory]] = {}
        self._saved: Saved = {}
        self._warned = False
        self.oldest_version: int | None = None
        """Tokens that older weights sampled are past the staleness bound; None: there is none."""

    def restore(self, saved: Mapping[str, list[GenerationState]]) -> None:
        """Let trajectories whose claims say so go on from `saved`; other workers have the same calls."""
        self._saved = dict(saved)

    def start(self, claim: Claim, session: int) -> None:
        """The current task, and what it starts, runs this trajectory; a further attempt begins afresh."""
        key = f"{claim.uid}_{session}"
        saved = self._saved.pop(key, ())
        trajectory = _Trajectory(claim.claim_id, claim.uid, saved if claim.goes_on else ())
        self._running.setdefault(claim.claim_id, {})[key] = trajectory
        _current.set(trajectory)

    def forget(self, claim_id: int) -> None:
        """The claim's group has ended; a later claim on the same prompt has a journal of its own."""
        self._running.pop(claim_id, None)

    def record(self, generation: ResumableGeneration) -> None:
        """A generate call begins; it may be given saved tokens."""
        trajectory = _current.get()
        refused = trajectory.record(generation) if trajectory is not None else None
        if refused is not None and refused.settings != generation.settings and not self._warned:
            self._warned = True
            logger.warning(
                "the checkpoint's tokens were sampled with (%s), now it is (%s): they are generated anew",
                refused.settings,
                generation.settings,
            )

    def require_fresh(self) -> None:
        """Raise TooStale if the current trajectory, or another one of its group, has tokens past the bound."""
        trajectory = _current.get()
        if trajectory is None or self.oldest_version is None:
            return
        group = self._running.get(trajectory.claim_id, {}).values()
        oldest = min((version for each in group for version in each.versions()), default=self.oldest_version)
        if oldest < self.oldest_version:
            raise TooStale(f"prompt {trajectory.uid} has tokens of version {oldest}, allowed: {self.oldest_version}")

    def states(self) -> Saved:
        """All generate calls of trajectories whose groups have not ended."""
        return {key: trajectory.states() for group in self._running.values() for key, trajectory in group.items()}

    def unclaimed(self) -> frozenset[str]:
        """Saved trajectories that have not started again here."""
        return frozenset(self._saved)

    def keep_unclaimed(self, unclaimed: AbstractSet[str]) -> Saved:
        """Forget the saved calls of all but `unclaimed`, which no worker had started; returns those left here.

        What another worker has started is never gone on from here: a further claim begins afresh.
        """
        self._saved = {key: calls for key, calls in self._saved.items() if key in unclaimed}
        return dict(self._saved)
