"""Who waits for what, since when, in a run that goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from partial_rollout import status
from partial_rollout.observability.events import (
    AnyEvent,
    BatchTaken,
    CommandEnded,
    EventWriter,
    GateMoved,
    PhaseBegan,
    PromptDropped,
    StageBegan,
    TrajectoryEnded,
)
from partial_rollout.observability.waits import NUM_SHOWN, Waits, format_waits

if TYPE_CHECKING:
    from pathlib import Path


def phase(uid: str, session: int, what: str, t: float, response: int = 1) -> PhaseBegan:
    return PhaseBegan(t=t, uid=uid, session=session, phase=what, response=response, row=f"r{uid}")


def closed(t: float) -> GateMoved:
    return GateMoved(t=t, step=1, version=0, is_open=False)


def told(*events: AnyEvent) -> list[tuple[str, str, tuple[int, ...], float]]:
    waits = Waits()
    waits.add(events)
    return [(wait.uid, wait.what, wait.sessions, wait.since_s) for wait in waits.now()]


def test_trajectories_of_a_prompt_that_wait_for_the_same_are_one_wait_and_the_oldest_is_first() -> None:
    phases = [phase("a", 0, "engine", 5.0), phase("a", 1, "engine", 4.0), phase("b", 0, "tool", 2.0)]
    assert told(*phases) == [("b", "tool", (0,), 2.0), ("a", "engine", (0, 1), 4.0)]


@pytest.mark.parametrize(
    "end",
    [
        TrajectoryEnded(t=9.0, uid="a", session=0, seconds=1, engine_seconds=1, tokens=1, interruptions=0),
        phase("a", 0, "ended", 9.0),
        BatchTaken(t=9.0, step=1, uids=["a"], source_index=[None], deferrals=[0], interruptions=[0]),
        CommandEnded(t=9.0, code=1),
    ],
)
def test_a_trajectory_that_has_ended_waits_for_nothing(end: AnyEvent) -> None:
    assert told(phase("a", 0, "engine", 5.0), end) == []


def test_what_the_end_of_a_run_has_cut_off_is_known_afterwards() -> None:
    waits = Waits()
    waits.add(
        [
            *(phase(uid, 0, "engine", float(t)) for t, uid in enumerate("abcdef")),
            phase("a", 0, "tool", 8.9),  # its request was cancelled, and a moment later its agent loop
            phase("a", 0, "ended", 9.0),
            phase("f", 0, "tool", 7.0),
            phase("f", 0, "ended", 9.0),
            phase("c", 0, "ended", 9.0),
            phase("c", 0, "agent", 9.5),  # it had failed, and began again
            phase("d", 0, "ended", 9.0),
            PromptDropped(t=9.6, uid="d", source_index="d", reason="failed"),
            TrajectoryEnded(t=9.0, uid="e", session=0, seconds=1, engine_seconds=1, tokens=1, interruptions=0),
        ]
    )
    assert [wait.uid for wait in waits.now()] == ["b", "c"]
    waits.add([CommandEnded(t=10.0, code=1)])
    assert waits.now() == []
    assert [(wait.uid, wait.what, wait.since_s) for wait in waits.left()] == [
        ("a", "engine", 0.0),
        ("b", "engine", 1.0),
        ("c", "agent", 9.5),
        ("f", "tool", 7.0),
    ]
    waits.add([StageBegan(t=11.0, number=1, total=5, name="configuration")])
    assert waits.left() == []


def test_the_oldest_prompt_is_the_one_that_was_begun_first_whatever_it_waits_for() -> None:
    """A prompt of several turns waits for a tool since a moment only, and is older than all the others."""
    waits = Waits()
    waits.add(
        [
            phase("turns", 0, "agent", 0.0, 0),
            phase("turns", 1, "agent", 0.0, 0),
            phase("turns", 1, "ended", 100.0),  # an attempt that failed
            phase("fresh", 0, "engine", 201.0),
            phase("turns", 1, "agent", 250.0, 0),
            phase("turns", 0, "tool", 300.0, 7),
        ]
    )
    assert [(wait.uid, wait.begun_s, wait.since_s) for wait in waits.now()] == [
        ("turns", 0.0, 250.0),
        ("turns", 0.0, 300.0),
        ("fresh", 201.0, 201.0),
    ]
    assert "for a tool or its agent loop since 10 s, begun 5 min 10 s ago" in format_waits(waits.now(), 310.0)


def test_of_a_prompt_that_has_left_nothing_is_remembered() -> None:
    waits = Waits()
    for number, uid in enumerate(["taken", "complete", "dropped"]):
        waits.add([phase(uid, session, "engine", float(number)) for session in (0, 1)])
    waits.add([BatchTaken(t=9.0, step=1, uids=["taken"], source_index=[None], deferrals=[0], interruptions=[0])])
    waits.add([PromptDropped(t=9.0, uid="dropped", source_index="", reason="failed")])
    for session in (0, 1):
        assert "complete" in waits._prompts
        done = TrajectoryEnded(uid="complete", session=session, seconds=1, engine_seconds=1, tokens=1, interruptions=0)
        waits.add([done])
    assert waits._prompts == {}


def test_why_of_a_run_that_has_ended_says_what_its_end_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = EventWriter(tmp_path / "events", "worker")
    for event in (phase("a", 0, "engine", 10.0), CommandEnded(t=25.0, code=130, text="Ctrl-C")):
        writer.write(event)
    assert status.main(["--why", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "the run has ended; then 1 trajectories waited: 1 for tokens of an engine",
        "  row ra, prompt a: trajectory 0, at response 1, for tokens of an engine since 15 s, begun 15 s ago",
    ]
    done = TrajectoryEnded(t=24.0, uid="a", session=0, seconds=1, engine_seconds=1, tokens=1, interruptions=0)
    writer.write(done)
    writer.close()
    assert status.main(["--why", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "the run has ended; no trajectory was unfinished\n"


def test_a_request_at_a_closed_gate_waits_for_the_gate() -> None:
    asked = [phase("a", 0, "engine", 5.0), phase("b", 0, "tool", 6.0)]
    assert [wait[1] for wait in told(*asked, closed(7.0))] == ["gate", "tool"]
    opened = GateMoved(t=8.0, step=1, version=1, is_open=True)
    assert [wait[1] for wait in told(*asked, closed(7.0), opened)] == ["engine", "tool"]


def test_the_text_says_row_prompt_response_and_since_when(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waits = Waits()
    waits.add([phase("a", 0, "tool", 10.0, 2), phase("a", 1, "agent", 11.0, 0), phase("a", 2, "agent", 12.0, 0)])
    assert format_waits(waits.now(), 51.0).splitlines() == [
        "3 trajectories wait: 1 for a tool or its agent loop, 2 for its agent loop",
        "  row ra, prompt a: trajectory 0, at response 2, for a tool or its agent loop since 41 s, begun 41 s ago",
        "  row ra, prompt a: 2 trajectories, before their first response, for its agent loop since 40 s, "
        "begun 41 s ago",
    ]
    assert format_waits([], 0.0) == "no trajectory is unfinished"
    many = Waits()
    many.add(phase(str(number), 0, "engine", 1.0) for number in range(NUM_SHOWN + 3))
    assert format_waits(many.now(), 2.0).splitlines()[-1] == "  ... and 3 more"

    writer = EventWriter(tmp_path / "events", "worker")
    writer.write(phase("a", 0, "reward", 1.0))
    writer.close()
    assert status.main(["--why", str(tmp_path)]) == 0
    assert "prompt a: trajectory 0, at response 1, for its reward since" in capsys.readouterr().out
    assert status.main(["--why", str(tmp_path / "nowhere")]) == status.EXIT_NOT_FOUND
    assert "is not on this machine" in capsys.readouterr().err
