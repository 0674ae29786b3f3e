"""A run as a trace: tracks with slices on them, and flows that connect slices. Pure; `write` puts it into a file.

    run
      steps                   a slice a step; in it its phases, by the step's timers
      GPU seconds by cause    a slice for each cause of a step (gpu_seconds.py), in the order in which they come
      gate, weights           times in which the gate was closed; weight updates
      messages                choices, warnings and faults, as slices without length
    engine ADDRESS
      slot 1, 2, ...          a slice for each request; a flow connects the requests of one trajectory

The slices of a cause have its length, not its place: which slot waited when is on the engines' tracks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from partial_rollout.observability.events import Choice, Fault, GateMoved, Warned, WeightsUpdated
from partial_rollout.observability.gpu_seconds import LOST, num_gpus, step_causes
from partial_rollout.observability.lanes import Bar, Lanes, packed
from partial_rollout.observability.step_line import STEP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import BinaryIO

    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

    from partial_rollout.observability.events import AnyEvent
    from partial_rollout.observability.record import RunRecord

PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "save_checkpoint")
"""Timers of a step that follow one another from its beginning."""
LAST_PHASES = ("update_weights", "resume")
"""Timers whose parts end with the step."""
SEQUENCE = 1
"""Number of the sequence of packets; one writer has one sequence."""
SHORTEST_NS = 1000

Note = str | int | float


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that took time; `flow` is a number that slices of one trajectory have in common."""

    name: str
    start_s: float
    end_s: float
    notes: Mapping[str, Note] = field(default_factory=dict)
    flow: int = 0
    is_last_of_flow: bool = False


@dataclass(frozen=True, slots=True)
class Track:
    """A line of slices, which lie apart or within one another."""

    group: str
    name: str
    slices: Sequence[Slice]


def make_tracks(record: RunRecord, events: Iterable[AnyEvent]) -> list[Track]:
    """All tracks of a run; a run of verl's own modes has steps without events."""
    lanes = Lanes(max_segments=None)
    opened_s: dict[int, float] = {}
    """When the gate was opened at the end of a step."""
    updates, messages = list[Slice](), list[Slice]()
    for event in events:
        lanes.add(event)
        match event:
            case GateMoved(is_open=True):
                opened_s[event.step] = event.t
            case WeightsUpdated():
                notes = {"relaunches": event.relaunches}
                updates.append(Slice(f"weights {event.version}", event.t - event.seconds, event.t, notes))
            case Choice() | Warned() | Fault():
                messages.append(_message(event))
            case _:
                pass
    times = _step_times(record, opened_s)
    found = [
        Track("run", "steps", list(_step_slices(record, times))),
        Track("run", "GPU seconds by cause", list(_cause_slices(record, times))),
        Track("run", "gate", [Slice("closed", start_s, end_s or lanes.now_s) for start_s, end_s in lanes.closed]),
        Track("run", "weights", updates),
        Track("run", "messages", messages),
        *_slot_tracks(list(lanes.bars)),
    ]
    return [track for track in found if track.slices]


def _step_times(record: RunRecord, opened_s: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """Begin and end of each step; without times, as in verl's metrics file, one step follows the other.

    A step's timer goes on for a moment after the gate has opened, which is taken for the step's end. Where that takes
    longer than the pause before the step, on a busy machine, it would begin before the step before has ended.
    """
    times: dict[int, tuple[float, float]] = {}
    end_s = 0.0
    for number, event in sorted(record.steps.items()):
        last_s, seconds = end_s, event.metrics.get(STEP_SECONDS) or 0.0
        end_s += seconds
        if event.t:
            told_s = opened_s.get(number, event.t - (event.metrics.get("timing_s/testing") or 0.0))
            end_s = max(end_s, told_s)
        times[number] = max(last_s, end_s - seconds), end_s
    return times


def _step_slices(record: RunRecord, times: Mapping[int, tuple[float, float]]) -> Iterable[Slice]:
    for (number, (start_s, end_s)), step in zip(sorted(times.items()), record.series, strict=True):
        at_s = start_s
        numbers = {name: value for name, value in step.items() if not name.startswith("timing_s/")}
        yield Slice(f"step {number}", start_s, end_s, numbers)
        for name in PHASES:
            seconds = step.get(f"timing_s/{name}", 0.0)
            if seconds:
                yield Slice(name, at_s, at_s + seconds)
            if name == "gen" and (drain_s := step.get("timing_s/drain", 0.0)):
                yield Slice("drain", at_s + seconds - drain_s, at_s + seconds)
            at_s += seconds
        at_s = end_s - sum(step.get(f"timing_s/{name}", 0.0) for name in LAST_PHASES)
        for name in LAST_PHASES:
            if seconds := step.get(f"timing_s/{name}", 0.0):
                yield Slice(name, at_s, at_s + seconds)
            at_s += seconds


def _cause_slices(record: RunRecord, times: Mapping[int, tuple[float, float]]) -> Iterable[Slice]:
    for (start_s, end_s), step in zip(times.values(), record.series, strict=True):
        at_s, gpus = start_s, num_gpus(step)
        for cause, seconds in step_causes(step).items():
            if seconds * 1e9 < SHORTEST_NS:
                continue  # it would reach into the next one
            notes: dict[str, Note] = {"gpu_seconds": gpus * seconds, "lost": "yes" if cause in LOST else "no"}
            yield Slice(cause, at_s, min(at_s + seconds, end_s), notes)
            at_s += seconds


def _message(event: Choice | Warned | Fault) -> Slice:
    match event:
        case Choice():
            values = {"before": str(event.before), "after": str(event.after)}
            notes: dict[str, Note] = {**values, "reason": event.reason, "seen": event.seen}
            return Slice(f"choice: {event.key}", event.t, event.t, notes)
        case Fault():
            return Slice(
                f"fault: {event.role} {event.name}", event.t, event.t, {"text": event.text, "done": event.action}
            )
        case Warned():
            return Slice(event.level, event.t, event.t, {"text": event.text})


def _slot_tracks(bars: Sequence[Bar]) -> Iterable[Track]:
    last = {(bar.uid, bar.session): bar for bar in bars}
    counts: dict[tuple[str, int], int] = {}
    for bar in bars:
        counts[bar.uid, bar.session] = counts.get((bar.uid, bar.session), 0) + 1
    flows = {key: number for number, key in enumerate(last, 1) if counts[key] > 1}
    for server in sorted({bar.server for bar in bars}):
        slots: dict[int, list[Slice]] = {}
        for bar, slot in packed([bar for bar in bars if bar.server == server]).items():
            key = (bar.uid, bar.session)
            slots.setdefault(slot, []).append(_request(bar, flows.get(key, 0), is_last=last[key] is bar))
        for slot in sorted(slots):
            yield Track(f"engine {server}", f"slot {slot + 1}", slots[slot])


def _request(bar: Bar, flow: int, *, is_last: bool) -> Slice:
    notes: dict[str, Note] = {
        "uid": bar.uid,
        "weights": bar.version,
        "tokens": bar.tokens,
        "context_tokens": bar.prompt_tokens,
        "reused_tokens": bar.reused_tokens,
        "ended": bar.reason,
    }
    return Slice(bar.label, bar.start_s, bar.end_s, notes, flow, is_last_of_flow=is_last)


def write(file: BinaryIO, tracks: Sequence[Track]) -> None:
    """Write a file that Perfetto opens; its time 0 is the beginning of the first slice.

    Raises:
        ImportError: the package `perfetto` is not installed.
    """
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackDescriptor
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

    builder = StreamingTraceProtoBuilder(file)
    groups = {group: number for number, group in enumerate(dict.fromkeys(track.group for track in tracks), 1)}
    for group, uuid in groups.items():
        packet = builder.create_packet()
        packet.track_descriptor.uuid, packet.track_descriptor.name = uuid, group
        packet.track_descriptor.child_ordering = TrackDescriptor.EXPLICIT
        packet.track_descriptor.sibling_order_rank = uuid
        builder.write_packet(packet)
    for rank, track in enumerate(tracks):
        packet = builder.create_packet()
        descriptor = packet.track_descriptor
        descriptor.uuid, descriptor.parent_uuid = len(groups) + 1 + rank, groups[track.group]
        descriptor.name, descriptor.sibling_order_rank = track.name, rank
        # Perfetto would draw tracks of the same name and parent as one; no two of ours have both.
        builder.write_packet(packet)
    first_s = min((piece.start_s for track in tracks for piece in track.slices), default=0.0)
    for rank, track in enumerate(tracks):
        _write_slices(builder, len(groups) + 1 + rank, track.slices, first_s)


def _write_slices(builder: StreamingTraceProtoBuilder, uuid: int, slices: Sequence[Slice], first_s: float) -> None:
    """Begin and end of each slice, in an order in which they nest."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    open_ns: list[int] = []
    """Ends of the slices that have begun, the outermost first."""

    def end_before(at_ns: int) -> None:
        while open_ns and open_ns[-1] <= at_ns:
            packet = builder.create_packet()
            packet.timestamp, packet.trusted_packet_sequence_id = open_ns.pop(), SEQUENCE
            packet.track_event.type, packet.track_event.track_uuid = TrackEvent.TYPE_SLICE_END, uuid
            builder.write_packet(packet)

    for piece in sorted(slices, key=lambda piece: (piece.start_s, -piece.end_s)):
        start_ns, end_ns = _nanoseconds(piece.start_s - first_s), _nanoseconds(piece.end_s - first_s)
        end_before(start_ns)
        packet = builder.create_packet()
        packet.timestamp, packet.trusted_packet_sequence_id = start_ns, SEQUENCE
        event = packet.track_event
        event.type, event.track_uuid, event.name = TrackEvent.TYPE_SLICE_BEGIN, uuid, piece.name
        for name, value in piece.notes.items():
            note = event.debug_annotations.add()
            note.name = name
            if isinstance(value, str):
                note.string_value = value
            elif isinstance(value, int):
                note.int_value = value
            else:
                note.double_value = value
        if piece.flow:
            (event.terminating_flow_ids if piece.is_last_of_flow else event.flow_ids).append(piece.flow)
        builder.write_packet(packet)
        # A phase ends with its step at the latest, although timers and the clock differ by microseconds.
        end_ns = max(end_ns, start_ns + SHORTEST_NS)
        open_ns.append(min(end_ns, open_ns[-1]) if open_ns else end_ns)
    end_before(1 << 62)


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
