"""The trace of a job, read back by its protos: tracks nest, flows connect, and lost seconds are the report's."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability.events import EventReader, SegmentEnded
from partial_rollout.observability.record import INTERRUPTED, events_folder_of
from partial_rollout.observability.report import REPORT
from partial_rollout.trace import write_trace
from tests.unit.observability.test_trace import read_back

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tests.unit.observability.test_trace import Read

TRAINING = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


def check_trace(run: Path, steps: Sequence[Mapping[str, Any]]) -> None:
    """Check the trace of a job on one device; `steps` are its metrics as verl's logger has them."""
    write_trace(run, run / "t.pftrace")
    tracks = read_back(run / "t.pftrace")
    _check_nesting(tracks)
    requests = [piece for (group, _), pieces in tracks.items() if group.startswith("engine ") for piece in pieces]
    assert requests
    _check_flows(requests, run)
    causes = tracks["run", "GPU seconds by cause"]
    lost_s = sum(piece.end_ns - piece.start_ns for piece in causes if piece.notes["lost"] == "yes") / 1e9
    # By hand from verl's timers, with nothing of the code that divides a step into causes.
    assert lost_s == pytest.approx(sum(map(_lost_seconds, steps)), abs=0.001 * len(causes))
    assert f"<td>{lost_s:,.1f}</td>" in _row_of_the_report(run / REPORT, "lost in all")


def _check_nesting(tracks: Mapping[tuple[str, str], Sequence[Read]]) -> None:
    """No two requests of a slot overlap; phases are within their steps, and within another phase only the drain."""
    for (group, name), pieces in tracks.items():
        if group.startswith("engine ") or name in ("GPU seconds by cause", "gate", "weights"):
            assert {piece.depth for piece in pieces} == {0}, (group, name)
    around: list[Read] = []
    for piece in tracks["run", "steps"]:
        around = [*around[: piece.depth], piece]
        assert piece.name.startswith("step ") == (piece.depth == 0)
        assert piece.depth < 2 or piece.name == "drain"
        for outer in around[:-1]:
            assert outer.start_ns <= piece.start_ns <= piece.end_ns <= outer.end_ns


def _check_flows(requests: Iterable[Read], run: Path) -> None:
    """A flow connects all requests of one trajectory in their order, and ends with the last one."""
    flows: dict[int, list[Read]] = defaultdict(list)
    for piece in sorted(requests, key=lambda piece: piece.start_ns):
        for flow in piece.flows:
            flows[flow].append(piece)
    assert flows
    for pieces in flows.values():
        assert len(pieces) > 1
        assert len({(piece.notes["uid"], piece.name) for piece in pieces}) == 1
        assert [piece.ends_flow for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert all(one.end_ns <= other.start_ns for one, other in zip(pieces, pieces[1:], strict=False))
        assert {piece.notes["ended"] for piece in pieces[:-1]} == {INTERRUPTED}
    segments = [event for event in EventReader(events_folder_of(run)).read() if isinstance(event, SegmentEnded)]
    # One that was refused at the gate has no tokens, and may have no slice.
    several = Counter((event.uid, event.session) for event in segments if event.tokens)
    assert len(flows) >= sum(number > 1 for number in several.values())


def _lost_seconds(step: Mapping[str, Any]) -> float:
    """Seconds of a step in which the engines did not generate new tokens, and nothing trained."""
    drain_s = step["timing_s/drain"]
    busy_s = (step["timing_s/gen"] - drain_s) * min(1.0, step["partial_rollout/slot_utilisation"])
    pass_s = step["timing_s/old_log_prob"] if "actor/entropy" in step else step["timing_s/update_actor"] / 3
    one_s = pass_s / step["perf/total_num_tokens"]
    again_s = min(busy_s, step["partial_rollout/reprefilled_tokens"] * one_s)
    trained_s = sum(step.get(f"timing_s/{timer}", 0.0) for timer in TRAINING)
    return step["timing_s/step"] - (busy_s - again_s) - trained_s


def _row_of_the_report(path: Path, label: str) -> str:
    row = next(part for part in path.read_text().split("<tr>") if f">{label}<" in part)
    return row.partition("</tr>")[0]
