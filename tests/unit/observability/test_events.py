"""The event stream: what is written is read, whatever happens to the files in between."""

from __future__ import annotations

import errno
import json
import logging
import os
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partial_rollout.errors import DataError
from partial_rollout.observability import events
from partial_rollout.observability.events import (
    AnyEvent,
    BatchTaken,
    CheckpointSaved,
    Choice,
    CommandEnded,
    DeadlinePassed,
    EventReader,
    EventWriter,
    Fault,
    GateMoved,
    Opened,
    PhaseBegan,
    ProcessFound,
    PromptDropped,
    QueueMoved,
    RequestSent,
    SegmentEnded,
    StageBegan,
    StepEnded,
    TrajectoryEnded,
    Warned,
    WeightsUpdated,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ONE_OF_EACH: list[AnyEvent] = [
    StepEnded(t=1.0, step=1, total=9, metrics={"critic/score/mean": 0.5}),
    BatchTaken(t=2.0, step=1, uids=["a"], source_index=[None], deferrals=[0], interruptions=[2]),
    GateMoved(t=3.0, step=1, version=0, is_open=False, seconds=0.1, interrupted=4),
    WeightsUpdated(t=4.0, step=1, version=1, seconds=0.2, relaunches=1),
    CheckpointSaved(t=4.5, step=1, seconds=0.4, num_bytes=1024),
    SegmentEnded(t=5.0, uid="a", session=1, server="s", version=1, seconds=1.5, prompt_tokens=9, tokens=3),
    TrajectoryEnded(t=6.0, uid="a", session=1, seconds=2.0, engine_seconds=1.5, tokens=3, interruptions=1),
    PromptDropped(t=6.5, uid="a", source_index="3", reason="no_spread", metric=1.0),
    Choice(t=7.0, step=1, key="slots", before=8, after=16, reason="all are in use"),
    Warned(t=8.0, text="slow"),
    Fault(t=9.0, role="engine core", text="killed", node="n", pid=3, name="replica 1", noticed_after_s=2.5, action="-"),
    ProcessFound(t=9.5, role="engine", name="replica 1", node="n", pid=3),
    StageBegan(t=10.0, number=1, total=5, name="engine"),
    CommandEnded(t=11.0, code=1, text="no room"),
    PhaseBegan(t=12.0, uid="a", session=1, phase="tool", response=2, row="17", attempt=2),
    DeadlinePassed(
        t=13.0, uid="a", session=1, phase="tool", response=2, row="17", attempt=2, seconds=60.5, limit_s=60.0
    ),
    QueueMoved(
        t=14.0, step=1, pending=3, ongoing=2, deferred=0, done=1, taken=8, slots_in_use=8, slots_total=16, admitted=14
    ),
    RequestSent(t=15.0, uid="a", session=1, server="s"),
]


def ticking() -> Callable[[], float]:
    """A clock that moves on by a second with each look."""
    seconds = iter(range(1, 1_000_000))
    return lambda: float(next(seconds))


def written(folder: Path, *these: AnyEvent, role: str = "trainer") -> Path:
    writer = EventWriter(folder, role)
    for event in these:
        writer.write(event)
    writer.close()
    return next(folder.glob(f"{role}-*.jsonl"))


def without_opened(found: list[AnyEvent]) -> list[AnyEvent]:
    return [event for event in found if not isinstance(event, Opened)]


def test_each_kind_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = written(tmp_path / "events", *ONE_OF_EACH)
    assert without_opened(EventReader(path.parent).read()) == ONE_OF_EACH
    assert {type(event) for event in ONE_OF_EACH} | {Opened} == set(AnyEvent.__args__)
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["event"], first["format"], first["role"], first["pid"]) == ("opened", 1, "trainer", os.getpid())


def test_a_metric_that_is_no_number_does_not_cost_the_step(tmp_path: Path) -> None:
    written(tmp_path, StepEnded(t=1.0, step=1, total=2, metrics={"a": float("nan"), "b": float("inf"), "c": 0.5}))
    (step,) = without_opened(EventReader(tmp_path).read())
    assert isinstance(step, StepEnded)
    assert step.metrics == {"a": None, "b": None, "c": 0.5}


def test_events_of_several_processes_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    written(tmp_path, *ONE_OF_EACH[1::2], role="worker-1")
    written(tmp_path, *ONE_OF_EACH[0::2], role="worker-0")
    assert without_opened(EventReader(tmp_path).read()) == ONE_OF_EACH


def test_a_view_reads_only_what_is_new(tmp_path: Path) -> None:
    writer, reader = EventWriter(tmp_path, "trainer", clock=ticking()), EventReader(tmp_path)
    assert len(reader.read()) == 1
    writer.write(Warned(text="one"))
    assert [event.text for event in reader.read() if isinstance(event, Warned)] == ["one"]
    assert reader.read() == []
    written(tmp_path, Warned(t=1.0, text="another process"), role="worker-0")
    assert [event.text for event in reader.read() if isinstance(event, Warned)] == ["another process"]


def test_a_torn_last_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path, reader = written(tmp_path, *ONE_OF_EACH[:2]), EventReader(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert without_opened(reader.read()) == ONE_OF_EACH[:1]
    path.write_bytes(whole)
    assert reader.read() == ONE_OF_EACH[1:2]
    assert reader.num_unreadable == 0


def test_what_a_later_release_added_is_skipped(tmp_path: Path) -> None:
    path = written(tmp_path)
    with path.open("a") as file:
        file.write('{"event":"eclipse","t":1}\n')
        file.write('{"event":"warning","t":2,"text":"a","colour":"red"}\n')
        file.write('{"event":"warning"}\n')
        file.write("[1, 2]\n")
    reader = EventReader(tmp_path)
    assert without_opened(reader.read()) == [Warned(t=2, text="a")]
    assert (reader.num_unknown, reader.num_unreadable) == (1, 2)


def test_a_later_format_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    later = Opened(t=1.0, format=events.FORMAT_VERSION + 1, role="trainer", node="n", pid=1)
    (tmp_path / "trainer-n-1-1.0.jsonl").write_bytes(msgspec.json.encode(later) + b"\n")
    with pytest.raises(DataError, match=r"trainer-n-1-1\.0\.jsonl has format 2"):
        EventReader(tmp_path).read()


def test_a_process_keeps_its_latest_events_in_two_files(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, "worker-0", max_file_bytes=2_000)
    reader, seen = EventReader(tmp_path), 0
    for number in range(500):
        writer.write(Warned(text=f"{number:03}"))
        seen += len(without_opened(reader.read()))
    assert seen == 500  # who reads while it is written misses nothing
    files = sorted(tmp_path.glob("*.jsonl"))
    assert len(files) == 2
    assert all(file.stat().st_size < 2_100 for file in files)
    kept = [event.text for event in EventReader(tmp_path).read() if isinstance(event, Warned)]
    assert kept == [f"{number:03}" for number in range(500 - len(kept), 500)]
    assert len(kept) > 30


def test_the_trainers_events_are_all_kept(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, "trainer", keep_all=True, max_file_bytes=100)
    for _ in range(50):
        writer.write(Warned(text="a"))
    assert len(list(tmp_path.glob("*.jsonl"))) == 1
    assert len(without_opened(EventReader(tmp_path).read())) == 50


def test_a_full_disk_ends_the_stream_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = EventWriter(tmp_path, "worker-0")

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def over_quota(file: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(events.os, "write", full)
    monkeypatch.setattr(events.os, "close", over_quota)
    with caplog.at_level(logging.WARNING):
        writer.write(Warned(text="a"))
        writer.write(Warned(text="b"))
    assert [record.getMessage() for record in caplog.records] == [
        "the event stream of worker-0 ends here, the run goes on without it: [Errno 28] No space left on device"
    ]
    monkeypatch.undo()
    writer.write(Warned(text="c"))
    assert without_opened(EventReader(tmp_path).read()) == []


def test_a_value_that_json_cannot_hold_costs_its_event_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = EventWriter(tmp_path, "worker-0")
    with caplog.at_level(logging.WARNING):
        writer.write(Choice(step=1, key="slots", before=object(), after=1, reason="a"))
    assert "an event Choice of worker-0 is left out" in caplog.text
    writer.write(Warned(text="b"))
    assert [event.text for event in EventReader(tmp_path).read() if isinstance(event, Warned)] == ["b"]


def test_without_a_folder_nothing_is_written() -> None:
    writer = EventWriter(None, "trainer")
    writer.write(Warned(text="a"))
    writer.close()


@given(cut=st.integers(0, 2_000), flips=st.lists(st.tuples(st.integers(0, 1_999), st.integers(0, 255)), max_size=4))
def test_a_damaged_file_never_breaks_a_view(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flips: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("events")
    path = written(folder, *ONE_OF_EACH)
    content = bytearray(path.read_bytes())
    for where, value in flips:
        content[where % len(content)] = value
    path.write_bytes(bytes(content[:cut]))
    reader = EventReader(folder)
    try:
        found = without_opened(reader.read())
    except DataError:  # a flipped bit made it a later format
        return
    assert len(found) <= len(ONE_OF_EACH) + len(flips)
    if not flips:
        assert found == ONE_OF_EACH[: len(found)]
