"""Our messages are seen whatever the root logger drops."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from partial_rollout.observability import stages
from partial_rollout.observability.events import EventReader, EventWriter, Fault, Opened, StageBegan, Warned
from partial_rollout.observability.log import NAME, configure_logging, report_to

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    before = root.level
    yield
    root.setLevel(before)


def test_a_message_is_written_once_whatever_the_root_logger_drops(capsys: pytest.CaptureFixture[str]):
    logging.getLogger().setLevel(logging.ERROR)
    configure_logging()
    configure_logging()
    logging.getLogger(f"{NAME}.train.packing").info("rows are %s", "packed")
    assert capsys.readouterr().err.count("rows are packed") == 1


def reported(folder: Path) -> list[object]:
    return [event for event in EventReader(folder).read() if not isinstance(event, Opened)]


def test_warnings_and_errors_are_events_once_and_the_log_has_them_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    configure_logging()
    log = logging.getLogger(f"{NAME}.train.packing")
    for folder in ("a", "b"):  # the second call takes the place of the first one
        report_to(EventWriter(tmp_path / folder, "trainer"))
    log.info("rows are packed")
    log.warning("prompt %s is dropped", "p3")
    log.error("attempt %d failed", 2, exc_info=KeyError("index"))
    assert reported(tmp_path / "a") == []
    warned, failed = reported(tmp_path / "b")
    assert isinstance(warned, Warned)
    assert isinstance(failed, Warned)
    assert (warned.text, warned.level, warned.source) == ("prompt p3 is dropped", "warning", f"{NAME}.train.packing")
    assert (failed.text, failed.level) == ("attempt 2 failed: KeyError: 'index'", "error")
    assert capsys.readouterr().err.count("prompt p3 is dropped") == 1


def test_a_message_that_carries_an_event_is_that_event_at_any_level(tmp_path: Path):
    report_to(EventWriter(tmp_path, "trainer"))
    log = logging.getLogger(f"{NAME}.train.fleet")
    fault = Fault(t=5.0, role="engine core", text="killed", name="replica 1", pid=7, action="started again")
    log.warning("the engine core of replica 1 was killed", extra={"event": fault})
    stages.begin(stages.ENGINES, 6.0)
    assert reported(tmp_path) == [fault, StageBegan(t=6.0, number=4, total=5, name="engines")]


def test_a_stream_that_has_ended_does_not_stop_the_log(tmp_path: Path):
    writer = EventWriter(tmp_path, "trainer", max_file_bytes=0)
    report_to(writer)
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()  # no next file can be opened, and the warning of that is an event too
    log = logging.getLogger(f"{NAME}.train")
    log.warning("a")
    log.warning("b")
    assert not tmp_path.exists()
