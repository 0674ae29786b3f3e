"""The trace of a run, read back: slices nest, flows connect a trajectory's requests, lost seconds are the report's."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("perfetto", reason="needs the package perfetto of requirements/cpu.txt")

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from partial_rollout import trace as trace_command
from partial_rollout.observability.events import (
    AnyEvent,
    Choice,
    EventWriter,
    Fault,
    GateMoved,
    PhaseBegan,
    SegmentEnded,
    StageBegan,
    StepEnded,
    Warned,
    WeightsUpdated,
)
from partial_rollout.observability.gpu_seconds import LOST, gpu_seconds, lost
from partial_rollout.observability.lanes import Lanes
from partial_rollout.observability.record import load

if TYPE_CHECKING:
    from pathlib import Path

STEP: dict[str, float | None] = {
    "timing_s/step": 10.0,
    "timing_s/gen": 6.0,
    "timing_s/drain": 0.5,
    "timing_s/old_log_prob": 1.0,
    "actor/entropy": 0.5,
    "timing_s/update_actor": 2.0,
    "timing_s/update_weights": 0.25,
    "timing_s/resume": 0.125,
    "perf/total_num_tokens": 1000.0,
    "perf/throughput": 25.0,
    "partial_rollout/slot_utilisation": 0.5,
    "partial_rollout/reprefilled_tokens": 100.0,
}
START_S = 1_700_000_000.0


@dataclass
class Read:
    """A slice as it is in the file."""

    name: str
    start_ns: int
    end_ns: int = 0
    depth: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    flows: list[int] = field(default_factory=list)
    ends_flow: bool = False


def read_back(path: Path) -> dict[tuple[str, str], list[Read]]:
    """Slices by names of parent track and track; fails where a slice ends that has not begun, or never ends."""
    packets = Trace.FromString(path.read_bytes()).packet
    described = {
        each.track_descriptor.uuid: each.track_descriptor for each in packets if each.HasField("track_descriptor")
    }
    names = {
        uuid: (described[each.parent_uuid].name, each.name) for uuid, each in described.items() if each.parent_uuid
    }
    found, stacks, at_ns = defaultdict(list), defaultdict(list), defaultdict(int)
    for packet in packets:
        if not packet.HasField("track_event"):
            continue
        event, track = packet.track_event, names[packet.track_event.track_uuid]
        assert packet.timestamp >= at_ns[track]
        at_ns[track] = packet.timestamp
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            notes = {each.name: getattr(each, each.WhichOneof("value")) for each in event.debug_annotations}
            flows = [*event.flow_ids, *event.terminating_flow_ids]
            ends_flow = bool(event.terminating_flow_ids)
            piece = Read(event.name, packet.timestamp, 0, len(stacks[track]), notes, flows, ends_flow)
            stacks[track].append(piece)
            found[track].append(piece)
        else:
            stacks[track].pop().end_ns = packet.timestamp
    assert not any(stacks.values())
    return dict(found)


def gate(t: float, step: int, *, is_open: bool, seconds: float = 0.0) -> GateMoved:
    return GateMoved(t=START_S + t, step=step, version=step, is_open=is_open, seconds=seconds)


def segment(uid: str, end: float, seconds: float, reason: str = "completed", version: int = 0) -> SegmentEnded:
    return SegmentEnded(
        t=START_S + end,
        uid=uid,
        session=1,
        server="s",
        version=version,
        seconds=seconds,
        prompt_tokens=9,
        tokens=5,
        reason=reason,
    )


def a_run(folder: Path, *more: AnyEvent) -> Path:
    """Two steps of 10 s; `a` is interrupted in both and waits at the gate, `b` is not interrupted."""
    events: list[AnyEvent] = [
        PhaseBegan(t=START_S, uid="a", session=1, phase="agent", row="17"),
        segment("b", 4.0, 3.0),
        segment("a", 6.0, 5.0, "aborted"),
        gate(6.0, 1, is_open=False, seconds=0.5),
        WeightsUpdated(t=START_S + 9.875, step=1, version=1, seconds=0.25),
        gate(10.0, 1, is_open=True, seconds=0.125),
        StepEnded(t=START_S + 10.2, step=1, total=2, metrics=STEP),
        segment("a", 16.0, 9.9, "aborted", version=1),
        gate(16.0, 2, is_open=False, seconds=0.5),
        gate(20.0, 2, is_open=True, seconds=0.125),
        StepEnded(t=START_S + 20.2, step=2, total=2, metrics=STEP | {"timing_s/testing": 0.1}),
        segment("a", 21.0, 4.9, version=2),
        *more,
    ]
    writer = EventWriter(folder / "events", "trainer", keep_all=True)
    for event in events:
        writer.write(event)
    writer.close()
    return folder


def written(run: Path) -> dict[tuple[str, str], list[Read]]:
    assert trace_command.main([str(run), "-o", str(run / "t.pftrace")]) == 0
    return read_back(run / "t.pftrace")


def test_steps_have_their_phases_within_them(tmp_path: Path) -> None:
    pieces = written(a_run(tmp_path))["run", "steps"]
    assert [(piece.name, piece.depth) for piece in pieces[: len(pieces) // 2]] == [
        ("step 1", 0),
        ("gen", 1),
        ("drain", 2),
        ("old_log_prob", 1),
        ("update_actor", 1),
        ("update_weights", 1),
        ("resume", 1),
    ]
    step, *phases = pieces[: len(pieces) // 2]
    assert (step.start_ns, step.end_ns) == (0, 10_000_000_000)
    assert all(step.start_ns <= each.start_ns < each.end_ns <= step.end_ns for each in phases)
    assert phases[-1].end_ns == step.end_ns
    second = pieces[len(pieces) // 2]
    assert (second.name, second.start_ns) == ("step 2", 10_000_000_000)


def test_steps_do_not_overlap_although_a_timer_goes_on_after_its_step(tmp_path: Path) -> None:
    """A busy machine takes milliseconds between the opening of the gate and the end of the step's timer."""
    late = STEP | {"timing_s/step": STEP["timing_s/step"] + 0.004, "timing_s/save_checkpoint": 2e-7}
    writer = EventWriter(tmp_path / "events", "trainer", keep_all=True)
    for number in (1, 2, 3):
        writer.write(gate(10.0 * number, number, is_open=True))
        writer.write(StepEnded(t=START_S + 10.0 * number + 0.2, step=number, total=3, metrics=late))
    writer.close()
    tracks = written(tmp_path)
    assert {piece.depth for piece in tracks["run", "GPU seconds by cause"]} == {0}
    steps = [piece for piece in tracks["run", "steps"] if piece.name.startswith("step ")]
    assert [piece.depth for piece in steps] == [0, 0, 0]
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(steps))


def test_lost_seconds_of_the_slices_are_those_of_the_report(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    sums: dict[str, float] = defaultdict(float)
    for piece in written(run)["run", "GPU seconds by cause"]:
        seconds = (piece.end_ns - piece.start_ns) / 1e9
        assert piece.notes["gpu_seconds"] == pytest.approx(4 * seconds, abs=1e-6)
        assert piece.notes["lost"] == ("yes" if piece.name in LOST else "no")
        sums[piece.name] += 4 * seconds
    expected = gpu_seconds(load(run).series)
    assert dict(sums) == pytest.approx(expected, abs=1e-6)
    assert sum(seconds for cause, seconds in sums.items() if cause in LOST) == pytest.approx(lost(expected), abs=1e-6)


def test_a_flow_connects_the_requests_of_one_trajectory_and_a_request_is_in_no_slot_while_it_waits_at_the_gate(
    tmp_path: Path,
) -> None:
    tracks = written(a_run(tmp_path))
    slots = {name: pieces for (group, name), pieces in tracks.items() if group == "engine s"}
    requests = sorted((piece for pieces in slots.values() for piece in pieces), key=lambda piece: piece.start_ns)
    assert set(slots) == {"slot 1", "slot 2"}
    (mine,) = {tuple(piece.flows) for piece in requests if piece.name == "row 17, trajectory 1"}
    assert len(mine) == 1
    assert [
        (each.notes["uid"], each.flows, each.ends_flow) for each in requests if each.name != "prompt b, trajectory 1"
    ] == [
        ("a", [*mine], False),
        ("a", [*mine], False),
        ("a", [*mine], True),
    ]
    assert next(each for each in requests if each.notes["uid"] == "b").flows == []
    # Asked for at 6.1 and 16.1 s, while the gate was closed until 10 and 20 s.
    assert [each.start_ns / 1e9 for each in requests if each.notes["uid"] == "a"] == pytest.approx([1.0, 10.0, 20.0])
    closed = tracks["run", "gate"]
    assert not any(
        each.start_ns < band.end_ns and each.end_ns > band.start_ns + 5e8 for each in requests for band in closed
    )


def test_updates_choices_and_faults_are_on_tracks_of_their_own(tmp_path: Path) -> None:
    more = (
        Choice(t=START_S + 1, step=0, key="k", before="auto", after=2, reason="why"),
        Warned(t=START_S + 2, text="<b>"),
        Fault(t=START_S + 3, role="engine core", name="replica 1", text="died"),
    )
    tracks = written(a_run(tmp_path, *more))
    names = [piece.name for piece in tracks["run", "messages"]]
    assert names == ["choice: k", "warning", "fault: engine core replica 1"]
    assert [piece.name for piece in tracks["run", "weights"]] == ["weights 1"]


def test_a_metrics_file_of_verls_own_modes_is_a_trace_of_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "data": {"timing_s/step": 4.0, "timing_s/gen": 3.0}} for step in (1, 2)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert trace_command.main([str(path)]) == 0
    tracks = read_back(tmp_path / "run.pftrace")
    assert [(piece.name, piece.start_ns) for piece in tracks["run", "steps"] if not piece.depth] == [
        ("step 1", 0),
        ("step 2", 4_000_000_000),
    ]


def test_what_is_no_run_and_a_missing_package_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trace_command.main([str(tmp_path / "nowhere")]) == 2
    assert "neither events nor metrics" in capsys.readouterr().err
    run = a_run(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "perfetto"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perfetto", None)
    assert trace_command.main([str(run)]) == 2
    assert "`pip install perfetto`" in capsys.readouterr().err
    assert sorted(each.name for each in run.iterdir()) == ["events"]


def test_a_gate_that_a_killed_start_left_closed_is_open_in_the_next_start() -> None:
    lanes = Lanes()
    for event in (
        gate(1.0, 1, is_open=False),
        StageBegan(t=START_S + 5, number=1, total=5, name="configuration"),
        segment("a", 9.0, 3.0),
    ):
        lanes.add(event)
    assert [bar.start_s - START_S for bar in lanes.bars] == [6.0]
