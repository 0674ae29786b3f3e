"""The choices of a start, in the log and in the run's event stream: a line and an event for each."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from partial_rollout.observability import events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.settings.auto import Choice, Proposal

logger = logging.getLogger(__name__)


def tell(choices: Sequence[Choice]) -> None:
    """Log each choice; those that are still open are no events yet."""
    for choice in choices:
        noted = {"key": choice.key, "before": choice.before, "after": choice.value}
        event = events.Choice(step=0, **noted, reason=choice.why, seen=choice.seen)
        logger.info("%s", choice, extra={} if choice.is_open else {"event": event})


def tell_proposals(proposals: Sequence[Proposal]) -> None:
    """Log what would be faster and was not chosen; as an event it is a choice that changes nothing."""
    for proposal in proposals:
        present, reason = proposal.present, f"not set; {proposal.told}"
        noted = {"key": proposal.key, "before": present, "after": present}
        event = events.Choice(step=0, **noted, reason=reason, seen=proposal.price)
        logger.info("%s", proposal, extra={"event": event})
