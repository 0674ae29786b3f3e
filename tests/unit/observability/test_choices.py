"""Choices of a start on their way to the log and the event stream."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from partial_rollout.observability import events
from partial_rollout.observability.choices import tell, tell_proposals
from partial_rollout.observability.log import NAME, report_to
from partial_rollout.settings.auto import KEEP_KEY, MODE_KEY, Choice, Proposal

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_each_choice_is_a_line_and_but_for_open_ones_an_event(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger=NAME)
    report_to(events.EventWriter(tmp_path, "driver"))
    tell([Choice(MODE_KEY, "auto", "auto", "a", "b"), Choice(MODE_KEY, "auto", "reuse_kv", "memory stays", "why")])
    assert [record.getMessage().partition(". Seen")[0] for record in caplog.records] == [
        f"auto: {MODE_KEY} is decided when the run starts",
        f"auto: {MODE_KEY} = reuse_kv",
    ]
    written = [event for event in events.EventReader(tmp_path).read() if isinstance(event, events.Choice)]
    assert [(e.step, e.key, e.before, e.after, e.seen, e.reason) for e in written] == [
        (0, MODE_KEY, "auto", "reuse_kv", "memory stays", "why")
    ]


def test_what_would_be_faster_is_a_line_and_a_choice_that_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger=NAME)
    report_to(events.EventWriter(tmp_path, "driver"))
    tell_proposals([Proposal(KEEP_KEY, False, True, "a GPU of 80 GiB", "memory stays", "docs/modes.md")])
    [record] = caplog.records
    assert record.getMessage() == (
        f"auto: faster with {KEEP_KEY}=True: memory stays. What it takes: a GPU of 80 GiB (docs/modes.md)"
    )
    [event] = [event for event in events.EventReader(tmp_path).read() if isinstance(event, events.Choice)]
    assert (event.key, event.before, event.after, event.seen) == (KEEP_KEY, False, False, "a GPU of 80 GiB")
    assert event.reason == f"not set; faster with {KEEP_KEY}=True: memory stays. What it takes: a GPU of 80 GiB"
