"""One response that may be interrupted: the tokens so far, the next request to the engine, and the end. Pure.

    next_request -> (engine) -> add(segment) --+--> finished
         ^                                     |
         +------- "aborted", budget left ------+

The token budget is one number for the whole response: all segments together have as many tokens as one uninterrupted
request could have produced, and never more.

A stop string may begin in one segment and end in the next, where the engine cannot see all of it. So once a response
was interrupted, its tokens are looked through here, and it is cut where the engine would have stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from partial_rollout.core.interrupt import FRESH, Context
from partial_rollout.errors import EngineError, InternalError, ResumeStalled
from partial_rollout.types import ContextSpan, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    FindStop = Callable[[Sequence[int]], int | None]
    """Takes the tokens of a response as they come; how many of these belong to it, if a stop string ends in them."""

Span = TypeVar("Span", VersionSpan, ContextSpan)

ABORTED = "aborted"
"""Stop reason of an interrupted segment."""
LENGTH = "length"
"""Stop reason given here when an interruption fell on the last token of the budget."""
STOPPED = "completed"
"""Stop reason verl's server gives when the engine stopped by itself, at a stop token or at the limit."""
COMPLETE = frozenset({STOPPED, LENGTH, "stop"})
"""Stop reasons of a response that may be trained on."""
UNRESUMABLE = (
    "bad_words",
    "presence_penalty",
    "frequency_penalty",
    "structured_outputs",
    "repetition_detection",
    "thinking_token_budget",
)
"""Sampling parameters whose state in the engine covers one request's output; a resumed request would restart it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What one request to the engine returned."""

    token_ids: list[int]
    log_probs: list[float] | None
    """One per token, or None when none were asked for."""
    stop_reason: str | None
    version: int
    """Weight version that sampled the tokens."""
    openings: int
    """Number of the gate's openings when the request passed; where it differs, the gate was closed in between."""
    context: Context
    stop_string: str | None = None
    """Stop string at which the engine ended the request: it found the string in the text that the engine saw."""


@dataclass(frozen=True, slots=True)
class GenerationState:
    """What a checkpoint holds of a generation, so that another process can go on with it."""

    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float] | None
    spans: list[VersionSpan]
    stop_reason: str | None
    num_interruptions: int
    num_reprefilled_tokens: int
    settings: str = ""
    """How the tokens were sampled and on which pictures; only a generation with the same `settings` goes on from them.

    Checkpoints from before this field have an empty one.
    """
    context_spans: list[ContextSpan] = field(default_factory=list[ContextSpan])
    num_shared: int = 0
    """In a checkpoint: leading tokens of the prompt that the call before has, which `prompt_ids` lacks (journal.py)."""


@dataclass(frozen=True, slots=True)
class SegmentRequest:
    """What to ask the engine for next."""

    prompt_ids: list[int]
    max_tokens: int
    min_tokens: int
    is_resumption: bool


class ResumableGeneration:
    """One response of at most `max_new_tokens` tokens, put together from the segments that the engine returns.

    An interrupted response goes on after its last token, with what is left of its budget:

    >>> generation = ResumableGeneration(prompt_ids=[1, 2], max_new_tokens=4)
    >>> context = Context(kv_version=7, origin=FRESH)
    >>> generation.add(Segment([5, 6], [-0.1, -0.2], ABORTED, 7, 0, context))
    False
    >>> generation.next_request()
    SegmentRequest(prompt_ids=[1, 2, 5, 6], max_tokens=2, min_tokens=0, is_resumption=True)
    >>> context = Context(kv_version=8, origin="abort")
    >>> generation.add(Segment([9], [-0.3], STOPPED, 8, 1, context))
    True
    >>> generation.token_ids, generation.min_version, generation.max_version
    ([5, 6, 9], 7, 8)
    """

    def __init__(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        *,
        min_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        settings: str = "",
    ) -> None:
        """Start with an empty response; `max_new_tokens` is the budget of all segments together, at least 1.

        `settings` says how tokens are sampled: only tokens with the same are adopted.
        """
        if max_new_tokens < 1:
            raise InternalError(f"max_new_tokens={max_new_tokens}: a generation needs a budget of at least 1 token")
        self.prompt_ids = list(prompt_ids)  # the caller may go on writing to its own
        self.max_new_tokens = max_new_tokens
        self.settings = settings
        self.token_ids: list[int] = []
        self.log_probs: list[float] | None = None
        self.spans: list[VersionSpan] = []
        self.context_spans: list[ContextSpan] = []
        self.stop_reason: str | None = None
        self.num_interruptions = 0
        self.num_reprefilled_tokens = 0
        self._min_tokens = min_tokens
        self._stop_token_ids = stop_token_ids
        self.make_finder: Callable[[], FindStop] | None = None
        """Makes what looks for stop strings, from the response's first token on; None: it has none."""
        self._find_stop: FindStop | None = None
        self.num_cut = 0
        """Tokens that the engine sampled after the end of a stop string that it could not see."""
        self._num_segments = 0
        self._last_version = 0
        self._stalled_at: int | None = None

    @property
    def finished(self) -> bool:
        """Whether the response is complete."""
        return self.stop_reason is not None

    @property
    def remaining(self) -> int:
        """Tokens left in the budget."""
        return self.max_new_tokens - len(self.token_ids)

    @property
    def context_len(self) -> int:
        """Tokens that the next request goes on from."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def min_version(self) -> int:
        """Oldest weight version in the response; the last one seen if it is empty."""
        return min((span.version for span in self.spans), default=self._last_version)

    @property
    def max_version(self) -> int:
        """Newest weight version in the response; the last one seen if it is empty."""
        return max((span.version for span in self.spans), default=self._last_version)

    def state(self) -> GenerationState:
        """A copy of what `adopt` takes."""
        return GenerationState(
            prompt_ids=list(self.prompt_ids),
            token_ids=list(self.token_ids),
            log_probs=None if self.log_probs is None else list(self.log_probs),
            spans=list(self.spans),
            stop_reason=self.stop_reason,
            num_interruptions=self.num_interruptions,
            num_reprefilled_tokens=self.num_reprefilled_tokens,
            settings=self.settings,
            context_spans=list(self.context_spans),
        )

    def adopt(self, state: GenerationState) -> bool:
        """Go on from `state` before the first request; False if it answers another question or exceeds the budget."""
        if (state.prompt_ids, state.settings) != (self.prompt_ids, self.settings):
            return False
        if len(state.token_ids) > self.max_new_tokens:
            return False
        self.token_ids, self.log_probs = list(state.token_ids), state.log_probs
        self.spans, self.stop_reason = list(state.spans), state.stop_reason
        self.context_spans = list(state.context_spans)
        self.num_interruptions, self.num_reprefilled_tokens = state.num_interruptions, state.num_reprefilled_tokens
        # Without tokens the next request is a first one for the engine, whatever happened before.
        self._num_segments = 1 if state.token_ids else 0
        if not self.finished and self.remaining == 0:
            # The budget may be smaller now than when the state was saved.
            self.stop_reason = LENGTH
        return True

    def next_request(self) -> SegmentRequest:
        """Ask for the rest, continuing after the tokens so far.

        Raises:
            InternalError: the generation is finished.
        """
        if self.finished:
            raise InternalError(f"a generation that ended with {self.stop_reason!r} asks for nothing more")
        return SegmentRequest(
            prompt_ids=self.prompt_ids + self.token_ids,
            max_tokens=self.remaining,
            min_tokens=max(0, self._min_tokens - len(self.token_ids)),
            is_resumption=self._num_segments > 0,
        )

    def add(self, segment: Segment) -> bool:
        """Append a segment and say whether the response is complete.

        Raises:
            EngineError: the engine ended the segment for a reason that is neither an end nor an interruption.
            InternalError: log-probs are missing or too many, or the segment exceeds the budget.
            ResumeStalled: interrupted twice without a token and without the gate having closed in between.
        """
        self._check(segment)
        segment = self._until_stop(segment)
        if self._num_segments and segment.token_ids:  # else it may not have got to compute anything
            self.num_reprefilled_tokens += self.context_len - segment.context.num_reused_tokens
        self._add_log_probs(segment)
        self._add_spans(segment)
        self.token_ids.extend(segment.token_ids)
        self._num_segments += 1
        self._last_version = segment.version
        self.stop_reason = self._stop_reason(segment)
        if not self.finished:
            self._interrupted(segment)
        return self.finished

    def _check(self, segment: Segment) -> None:
        if self.finished:
            raise InternalError(f"a segment arrived after the generation ended with {self.stop_reason!r}")
        if len(segment.token_ids) > self.remaining:
            raise InternalError(f"a segment of {len(segment.token_ids)} tokens exceeds the budget of {self.remaining}")
        if segment.stop_reason != ABORTED and segment.stop_reason not in COMPLETE:
            raise EngineError(
                f"the engine ended a request with {segment.stop_reason!r} after {len(self.token_ids)} of "
                f"{self.max_new_tokens} tokens (prompt {len(self.prompt_ids)})"
            )
        if segment.log_probs is not None and len(segment.log_probs) != len(segment.token_ids):
            raise InternalError(f"{len(segment.log_probs)} log-probs for {len(segment.token_ids)} tokens")
        if segment.token_ids and len(self.token_ids) and (segment.log_probs is None) != (self.log_probs is None):
            raise InternalError("some segments have log-probs and some have none")

    def _until_stop(self, segment: Segment) -> Segment:
        """The segment up to the end of the response's first stop string."""
        if self.make_finder is None:
            return segment
        # The engine has seen the whole response. Its last step may have brought drafts that are past the stop string.
        is_whole = not self.token_ids and segment.stop_reason != ABORTED
        if is_whole and segment.stop_string is None:
            return segment
        if self._find_stop is None:
            self._find_stop = self.make_finder()
            self._find_stop(self.token_ids)
        num = self._find_stop(segment.token_ids)
        if num is not None:
            self.num_cut = len(segment.token_ids) - num
            log_probs = None if segment.log_probs is None else segment.log_probs[:num]
            return replace(segment, token_ids=segment.token_ids[:num], log_probs=log_probs, stop_reason=STOPPED)
        if segment.stop_string is not None and not is_whole:
            # The engine took something else for the text of the response, and stopped too early.
            return replace(segment, stop_reason=ABORTED)
        return segment

    def _add_log_probs(self, segment: Segment) -> None:
        # An interruption before the first token carries no log-probs, whatever was asked for.
        if segment.log_probs is not None:
            self.log_probs = (self.log_probs or []) + segment.log_probs

    def _add_spans(self, segment: Segment) -> None:
        num_tokens, context = len(segment.token_ids), segment.context
        if num_tokens == 0:
            return
        extend(self.spans, VersionSpan(segment.version, num_tokens))
        # Whatever happened to a request before its first token, its context is a fresh one.
        origin = context.origin if self.token_ids else FRESH
        extend(self.context_spans, ContextSpan(context.kv_version, origin, num_tokens))

    def _stop_reason(self, segment: Segment) -> str | None:
        if segment.stop_reason != ABORTED:
            return segment.stop_reason
        if self.remaining == 0:
            return LENGTH
        # An abort may come after the engine has sampled a stop token and before it has said that it stopped.
        ends_in_stop = bool(segment.token_ids) and segment.token_ids[-1] in self._stop_token_ids
        return STOPPED if ends_in_stop and len(self.token_ids) > self._min_tokens else None

    def _interrupted(self, segment: Segment) -> None:
        self.num_interruptions += 1
        # One interruption without a token is usual: the gate closed during the prefill. A second one without an opening
        # in between means that the engine ends the request for a reason of its own, and would do so for ever.
        if segment.token_ids:
            self._stalled_at = None
        elif self._stalled_at == segment.openings:
            raise ResumeStalled(
                f"interrupted twice after opening {segment.openings} of the gate, at {len(self.token_ids)} of "
                f"{self.max_new_tokens} tokens (prompt {len(self.prompt_ids)}): nothing was generated "
                "and the gate did not close in between"
            )
        else:
            self._stalled_at = segment.openings


def extend(spans: list[Span], span: Span) -> None:
    """Append `span` to `spans`, in place; a span that differs from the last one only in its length lengthens that one.

    >>> spans = [VersionSpan(version=3, num_tokens=5)]
    >>> extend(spans, VersionSpan(version=3, num_tokens=2))
    >>> extend(spans, VersionSpan(version=4, num_tokens=1))
    >>> spans
    [VersionSpan(version=3, num_tokens=7), VersionSpan(version=4, num_tokens=1)]
    """
    if spans and replace(spans[-1], num_tokens=span.num_tokens) == span:
        span = replace(span, num_tokens=spans.pop().num_tokens + span.num_tokens)
    spans.append(span)


def kv_lags(versions: Sequence[VersionSpan], contexts: Sequence[ContextSpan]) -> Iterator[tuple[int, int]]:
    """How old the KV is that tokens were sampled with.

    Yields pairs: by how many weight versions the oldest KV of a token's context is older than the token, and the number
    of consecutive tokens of which that is true. Both sequences describe the same tokens; the tokens that only one of
    them describes are left out.

    >>> list(kv_lags([VersionSpan(4, 5)], [ContextSpan(3, "keep_kv", 2), ContextSpan(4, "fresh", 3)]))
    [(1, 2), (0, 3)]
    """
    rest, left = iter(contexts), 0
    context: ContextSpan | None = None
    for span in versions:
        ahead = span.num_tokens
        while ahead:
            if left == 0:
                context = next(rest, None)
                left = context.num_tokens if context else 0
            if context is None:
                return
            step = min(ahead, left)
            yield span.version - context.kv_version, step
            ahead, left = ahead - step, left - step
