"""Runs of tokens that have something in common."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from partial_rollout.types import ContextSpan, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Span = TypeVar("Span", VersionSpan, ContextSpan)


def extend(spans: list[Span], span: Span) -> None:
    """Append `span`, in place; one that differs from the last only in its length lengthens that one."""
    if spans and replace(spans[-1], num_tokens=span.num_tokens) == span:
        span = replace(span, num_tokens=spans.pop().num_tokens + span.num_tokens)
    spans.append(span)


def kv_lags(versions: Sequence[VersionSpan], contexts: Sequence[ContextSpan]) -> Iterator[tuple[int, int]]:
    """How many weight versions the oldest KV of a token's context lies behind the token, and how many tokens do so.

    Both sequences run over the same tokens; where one has fewer, the rest of the other is left out.
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
