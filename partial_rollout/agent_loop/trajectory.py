"""The trajectories that a worker runs, with the generate calls that each has made.

A checkpoint holds these calls, so that a restarted run does not generate them twice: it runs the agent loop again, and
each generate call that asks what the saved call asked is answered from it; the last saved one goes on from its tokens.
From the first call on that asks something else (after a tool that answers differently), all is generated anew.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from contextvars import ContextVar
from typing import TYPE_CHECKING

from partial_rollout.core.resume import extend
from partial_rollout.core.saved_calls import fold, unfold
from partial_rollout.errors import TooStale

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from partial_rollout.agent_loop.log_reading import Left
    from partial_rollout.core.resume import GenerationState, ResumableGeneration
    from partial_rollout.types import Claim, ContextSpan, VersionSpan

logger = logging.getLogger(__name__)

ENDED = "ended"
"""The phase of a trajectory that has ended, in whichever way."""
Saved = dict[str, list["GenerationState"]]
"""Generate calls by trajectory, `{uid}_{session}`, in the order of their making, folded (core/saved_calls.py)."""

CURRENT: ContextVar[Trajectory | None] = ContextVar("partial_rollout_trajectory", default=None)
"""The trajectory that the running task belongs to; None in validation.

verl's agent loops stand between the worker, which starts a trajectory, and the client, which is asked for tokens; they
pass on no argument of ours. Everywhere else the trajectory is passed.
"""


class Trajectory:
    """One agent loop that runs for a claimed prompt: one response, or several in turns.

    >>> from partial_rollout.core.resume import ResumableGeneration
    >>> from partial_rollout.types import Claim
    >>> claim = Claim("a", 1, "worker-0", num_trajectories=2, global_step=1, attempt=1)
    >>> trajectory = Trajectory(claim, session=0)
    >>> trajectory.record(ResumableGeneration(prompt_ids=[1, 2], max_new_tokens=4))  # nothing was saved: it begins
    >>> trajectory.enter("engine", now_s=3.0), trajectory.enter("reward", now_s=5.0)
    (True, True)
    >>> trajectory.key, trajectory.num_responses, trajectory.phase_s["engine"]
    ('a_0', 1, 2.0)
    """

    def __init__(self, claim: Claim, session: int, saved: Sequence[GenerationState] = ()) -> None:
        """`session` numbers the trajectories of a prompt; `saved` are folded generate calls of an earlier claim.

        Raises:
            DataError: they do not follow each other.
        """
        self.claim = claim
        self.session = session
        self.key = f"{claim.uid}_{session}"
        self.row = ""
        """Row of the data set, where it says one."""
        self.prompt = ""
        """The end of its prompt, where events are to have texts."""
        self.engine_s = 0.0
        """Seconds inside requests to an engine, waiting at a closed gate included."""
        self.generations: list[ResumableGeneration] = []
        """The generate calls made."""
        self.phase_s: defaultdict[str, float] = defaultdict(float)
        """Seconds by what the trajectory waited for, without the phase that lasts."""
        self.record_bytes = b""
        """The trajectory's record in the log of rollouts, once the trajectory has ended."""
        self._phase, self._since_s = "", 0.0
        self._saved = deque(unfold(saved) if self.may_go_on else ())

    def enter(self, phase: str, now_s: float) -> bool:
        """From now on the trajectory waits for something else; returns whether it is something else.

        One that has ended stays so, whatever its agent loop goes on to do.
        """
        if phase == self._phase or self.has_ended:
            return False
        self.phase_s[self._phase] += now_s - self._since_s
        self._phase, self._since_s = phase, now_s
        return True

    @property
    def has_ended(self) -> bool:
        """Whether it was stored, has failed or was given up: nothing that comes later counts."""
        return self._phase == ENDED

    @property
    def may_go_on(self) -> bool:
        """Whether tokens from before this claim count: of further attempts only those that follow a lost worker."""
        return self.claim.goes_on or self.claim.attempt == 1

    @property
    def num_ahead(self) -> int:
        """Saved generate calls that the agent loop has not made again yet."""
        return len(self._saved)

    @property
    def num_responses(self) -> int:
        """Responses that its agent loop has asked for."""
        return len(self.generations)

    @property
    def finished(self) -> list[ResumableGeneration]:
        """The generate calls whose responses are complete."""
        # An agent loop may survive a generate call that raised; the tokens of such a call are in no output.
        return [generation for generation in self.generations if generation.finished]

    @property
    def num_interruptions(self) -> int:
        """Interruptions of all complete responses."""
        return sum(generation.num_interruptions for generation in self.finished)

    @property
    def num_reprefilled_tokens(self) -> int:
        """Tokens that engines computed again after interruptions, over all complete responses."""
        return sum(generation.num_reprefilled_tokens for generation in self.finished)

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Which weights sampled the tokens of all complete responses."""
        spans: list[VersionSpan] = []
        for generation in self.finished:
            for span in generation.spans:
                extend(spans, span)
        return tuple(spans)

    @property
    def context_spans(self) -> tuple[ContextSpan, ...]:
        """The contexts in which the tokens of all complete responses were sampled."""
        spans: list[ContextSpan] = []
        for generation in self.finished:
            for span in generation.context_spans:
                extend(spans, span)
        return tuple(spans)

    def record(self, generation: ResumableGeneration) -> GenerationState | None:
        """A generate call begins; it goes on from the saved one, if that asked the same.

        Returns a saved call that `generation` does not go on from.
        """
        self.generations.append(generation)
        if not self._saved:
            return None
        saved = self._saved.popleft()
        if generation.adopt(saved):
            return None
        # The agent loop has taken another way than before: later saved calls answer questions it will not ask.
        self._saved.clear()
        return saved

    def versions(self) -> Iterator[int]:
        """Weight versions that sampled the tokens so far."""
        return (span.version for generation in self.generations for span in generation.spans)

    def states(self) -> list[GenerationState]:
        """Calls made, then saved ones that are still ahead; folded."""
        return fold([*(generation.state() for generation in self.generations), *self._saved])


class Trajectories:
    """The trajectories of one worker, from `start` until `forget` when the manager knows that their group has ended."""

    def __init__(self) -> None:
        self._running: dict[int, dict[str, Trajectory]] = {}
        """Trajectories by claim id, then by key."""
        self._saved: Saved = {}
        self._warned = False
        self.oldest_version: int | None = None
        """Tokens that older weights sampled are past the staleness bound; None: there is no bound."""

    def restore(self, saved: Mapping[str, list[GenerationState]]) -> None:
        """Let trajectories go on from `saved`, but those of further attempts; other workers have the same calls."""
        self._saved = dict(saved)

    def take_over(self, left: Left) -> None:
        """Let trajectories go on from the tokens of a dead worker, and from nothing older of its prompts."""
        self._saved = left.newest(self._saved, left.tokens)

    def go_back(self, keys: AbstractSet[str], before: Mapping[str, list[GenerationState]]) -> None:
        """Let trajectories of `keys` that have not started here go on from `before`; without these, afresh."""
        again = {key: calls for key, calls in before.items() if key in self._saved}
        self._saved = {key: calls for key, calls in self._saved.items() if key not in keys} | again

    def start(self, claim: Claim, session: int) -> Trajectory:
        """A trajectory begins; one of a further attempt begins afresh."""
        # Popped even where it is not used: what has started here never goes on from saved tokens again.
        saved = self._saved.pop(f"{claim.uid}_{session}", ())
        trajectory = Trajectory(claim, session, saved)
        self._running.setdefault(claim.claim_id, {})[trajectory.key] = trajectory
        return trajectory

    def forget(self, claim_id: int) -> None:
        """The claim's group has ended; a later claim on the same prompt has trajectories of its own."""
        self._running.pop(claim_id, None)

    def record(self, trajectory: Trajectory, generation: ResumableGeneration) -> None:
        """The trajectory begins a generate call, which may be given saved tokens."""
        refused = trajectory.record(generation)
        if refused is not None and refused.settings != generation.settings and not self._warned:
            self._warned = True
            logger.warning(
                "the checkpoint's tokens were sampled with (%s), now it is (%s): they are generated anew",
                refused.settings,
                generation.settings,
            )

    def require_fresh(self, trajectory: Trajectory) -> None:
        """Raise TooStale if the trajectory, or another one of its group, has tokens past the staleness bound."""
        if self.oldest_version is None:
            return
        claim = trajectory.claim
        # Groups are trained whole, so one trajectory that is too old makes its siblings useless.
        group = self._running.get(claim.claim_id, {}).values()
        oldest = min((version for each in group for version in each.versions()), default=self.oldest_version)
        if oldest < self.oldest_version:
            raise TooStale(f"prompt {claim.uid} has tokens of version {oldest}, allowed: {self.oldest_version}")

    def states(self) -> Saved:
        """All generate calls of trajectories whose groups have not ended."""
        return {each.key: each.states() for each in self._all()}

    def records(self) -> list[bytes]:
        """The records of ended trajectories whose groups have not ended."""
        return [each.record_bytes for each in self._all() if each.record_bytes]

    def unended(self) -> list[Trajectory]:
        """Trajectories that still run."""
        return [each for each in self._all() if not each.has_ended]

    def _all(self) -> Iterator[Trajectory]:
        return (each for group in self._running.values() for each in group.values())

    def unclaimed(self) -> frozenset[str]:
        """Saved trajectories that have not started again here."""
        return frozenset(self._saved)

    def keep_unclaimed(self, unclaimed: AbstractSet[str]) -> None:
        """Forget the saved calls of all but `unclaimed`, which no worker has started.

        What another worker has started is not gone on from here any more.
        """
        self._saved = {key: calls for key, calls in self._saved.items() if key in unclaimed}
