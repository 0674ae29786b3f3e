"""The live page: who may see it, that its numbers are the stream's, that it stays small; a browser draws it."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import tracemalloc
from typing import TYPE_CHECKING, cast

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from partial_rollout import view
from partial_rollout.errors import DataError
from partial_rollout.main_diffusion import as_step, begin
from partial_rollout.observability import lanes as lanes_module
from partial_rollout.observability.advice import next_step
from partial_rollout.observability.events import (
    AnyEvent,
    BatchTaken,
    CommandEnded,
    EventWriter,
    GateMoved,
    PhaseBegan,
    QueueMoved,
    RequestSent,
    SegmentEnded,
    StageBegan,
    StepEnded,
    TrajectoryEnded,
    Warned,
    WeightsUpdated,
)
from partial_rollout.observability.lanes import MAX_ROWS, Lanes
from partial_rollout.observability.prompt_view import MAX_TEXTS, NO_TEXT, SO_FAR, prompt_view
from partial_rollout.observability.record import RunRecord, load
from partial_rollout.observability.report import lost_rows
from partial_rollout.observability.summary import summary_lines
from partial_rollout.observability.waits import describe
from partial_rollout.view import RunState, make_app

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

TOKEN = "the-token"
METRICS: dict[str, float | None] = {
    "critic/score/mean": 0.5,
    "timing_s/step": 8.0,
    "timing_s/gen": 5.0,
    "perf/total_num_tokens": 800.0,
    "partial_rollout/queue/pending": 3.0,
    "partial_rollout/queue/taken": 16.0,
    "actor/entropy": 0.1,
}
EVIL = "<img src=x onerror=alert(1)>"


def step(number: int, total: int = 9) -> StepEnded:
    return StepEnded(t=100.0 + number, step=number, total=total, metrics=METRICS)


def phase(uid: str, what: str, t: float) -> PhaseBegan:
    return PhaseBegan(t=t, uid=uid, session=0, phase=what, response=1, row=f"row-{uid}")


def segment(uid: str, t: float, seconds: float = 1.0, server: str = "s") -> SegmentEnded:
    return SegmentEnded(t=t, uid=uid, session=0, server=server, version=2, seconds=seconds, prompt_tokens=5, tokens=7)


def write(run: Path, *events: AnyEvent, role: str = "trainer") -> Path:
    writer = EventWriter(run / "events", role, keep_all=True, clock=lambda: 90.0)
    for event in events:
        writer.write(event)
    writer.close()
    return run


def a_run(folder: Path, *more: AnyEvent) -> Path:
    gates = [
        GateMoved(t=95.0, step=1, version=0, is_open=False, seconds=1.0),
        GateMoved(t=99.0, step=1, version=1, is_open=True),
    ]
    waits = [phase("a", "agent", 90.0), phase("a", "engine", 91.0), segment("a", 94.0), phase("a", "tool", 94.0)]
    return write(folder, *waits, *gates, step(1), step(2), Warned(t=103.0, text=EVIL), *more)


def an_image_run(folder: Path) -> Path:
    """A step, with one image that was held over its update, and one that is unfinished."""
    measured = {"generate_s": 4.0, "interrupt_s": 0.5, "train_s": 2.0, "update_s": 0.25, "step_s": 7.0}
    counts = {"ongoing": 2.0, "done": 0.0, "taken": 4.0}
    metrics = {"step": 1.0, "reward/mean": 0.5, **{f"timing/{name}": seconds for name, seconds in measured.items()}}
    metrics |= {f"partial_rollout/queue/{state}": count for state, count in counts.items()}

    def images(t: float, version: int, before: int, steps: int, reason: str) -> SegmentEnded:
        return SegmentEnded(
            t=t, uid="group-0", session=0, server="images 0", version=version, seconds=3.0, prompt_tokens=before,
            reused_tokens=before, tokens=steps, reason=reason, unit="denoise steps",
        )  # fmt: skip

    waits = [PhaseBegan(t=91.0, uid=uid, session=0, phase="engine", response=1, row="1") for uid in ("group-0", "g")]
    gates = [
        GateMoved(t=95.0, step=1, version=0, is_open=False, seconds=0.5, interrupted=2),
        GateMoved(t=96.0, step=1, version=1, is_open=True),
    ]
    segments = [images(95.0, 0, 0, 6, "aborted"), images(99.0, 1, 6, 4, "stop")]
    ended = msgspec.structs.replace(as_step(metrics, 9), t=97.0)
    complete = TrajectoryEnded(uid="group-0", session=0, seconds=8.0, engine_seconds=8.0, tokens=10, interruptions=1)
    return write(folder, *waits, *gates, ended, *segments, msgspec.structs.replace(complete, t=99.0))


def test_an_image_job_is_told_nothing_of_language_models(tmp_path: Path) -> None:
    state = RunState(an_image_run(tmp_path), clock=lambda: 100.0)
    assert state.shown["head"] == [["steps done", "1/9"], ["now", "step 2 for 3 s, usually 7 s"], ["gate", "open"],
        ["weights", "1"], ["left", "about 56 s"], ["health", "running, last event 1 s ago"]]  # fmt: skip
    assert "PARTIAL_ROLLOUT=0" in str(state.shown["advice"])
    assert "async_training" not in str(state.shown["advice"])
    assert state.why(1) == [
        "step 1 took 7.0 s: generating, waiting included 4.0, drain 0.5, training 2.0, updates 0.2, idle 0.2",
        "its end interrupted 2 images. Cost: 0.50 s until engines stood; no denoise step is computed again",
    ]
    assert [(wait.uid, wait.tokens) for wait in state.waits.now()] == [("g", None)]
    seen = str(prompt_view(tmp_path, "group-0")["events"])
    assert "was interrupted at images 0: 6 new denoise steps by weights 0; 0 done before" in seen
    assert "ended at images 0: 4 new denoise steps by weights 1; 6 done before" in seen
    assert "PARTIAL_ROLLOUT=1" in next_step(RunRecord(steps={1: step(1)}, unit="denoise steps"))


def test_a_run_of_verls_own_modes_has_a_page_without_gate_and_queue(tmp_path: Path) -> None:
    verls = {"critic/score/mean": 0.5, "timing_s/step": 8.0, "timing_s/gen": 5.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": verls}) + "\n")
    now = iter(range(200, 300, 10))
    state = RunState(tmp_path, clock=lambda: float(next(now)))
    assert state.shown["head"][0] == ["steps done", "1/?"]  # pyright: ignore[reportIndexIssue]
    assert (len(state.shown["head"]), state.shown["flow"]) == (2, [])  # pyright: ignore[reportArgumentType]
    assert "+async_training.partial_rollout=True" in str(state.shown["advice"])


def test_a_run_of_verls_own_modes_goes_on_as_long_as_its_metrics_do(tmp_path: Path) -> None:
    """The events of such a run are those of its start, which may be long ago."""
    run = write(tmp_path, StageBegan(t=91.0, number=1, total=5, name="configuration"))
    metrics = run / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 1, "data": {"timing_s/step": 8.0}}) + "\n")
    os.utime(metrics, (5_000.0, 5_000.0))
    health = [RunState(run, clock=lambda at_s=at_s: at_s).shown["head"][-1] for at_s in (5_030.0, 5_610.0)]  # pyright: ignore[reportIndexIssue]
    assert health == [
        ["health", "running, last event 30 s ago"],
        ["health", "last event 10 min 10 s ago: it trains, saves or validates for long, stands still, or was killed"],
    ]


def test_a_run_has_a_page_as_soon_as_it_has_a_log(tmp_path: Path) -> None:
    """The command that shows the page is told before the first event."""
    (tmp_path / "run.log").touch()
    now = iter(range(200, 300, 10))
    state = RunState(tmp_path, clock=lambda: float(next(now)))
    assert state.shown["head"] == [["steps done", "0/?"], ["health", "starting, nothing is told yet"]]
    write(tmp_path, step(1))
    state.look()
    assert state.shown["step"] == 1


def test_an_image_job_that_starts_has_a_page_though_its_metrics_are_none_of_verls(tmp_path: Path) -> None:
    now = iter(range(200, 300, 10))
    begin("engines", writer := EventWriter(tmp_path / "events", "trainer", clock=lambda: 150.0))
    (tmp_path / "metrics.jsonl").write_text("")
    state = RunState(tmp_path, clock=lambda: float(next(now)))
    assert dict(state.shown["head"])["health"] == "starting, engines for 50 s"  # pyright: ignore[reportArgumentType, reportCallIssue]
    writer.write(step(1))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    state.look()
    assert state.shown["step"] == 1


async def test_a_wrong_token_is_refused_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with TestClient(TestServer(make_app(RunState(a_run(tmp_path)), TOKEN))) as client:
        for path in ("/", "/state", "/?token=wrong", "/state?token=", "/nowhere"):
            assert (await client.get(path)).status == 403
        assert (await client.get(f"/nowhere?token={TOKEN}")).status == 404
        page = await client.get(f"/?token={TOKEN}")
        assert page.status == 200
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert not re.findall(r"https?://", await page.text())
    assert caplog.text.count("the token is wrong or missing") == 5


async def test_the_numbers_are_those_of_the_stream_and_new_events_come_with_the_next_look(tmp_path: Path) -> None:
    now = iter(range(200, 300, 10))
    state = RunState(a_run(tmp_path), clock=lambda: float(next(now)))
    async with TestClient(TestServer(make_app(state, TOKEN))) as client:
        first = await (await client.get(f"/state?token={TOKEN}")).json()
        write(tmp_path, step(3), CommandEnded(t=110.0, code=0), role="driver")
        second = await (await client.get(f"/state?token={TOKEN}")).json()
    record = load(tmp_path)
    expected = [line.split(maxsplit=1) for line in summary_lines(record)]
    assert second["summary"] == expected
    assert second["advice"] == next_step(record)
    assert [tuple(row) for row in second["causes"]] == lost_rows(record.series)
    assert dict(first["head"])["steps done"] == "2/9"
    assert dict(first["head"])["left"] == "about 56 s"
    assert first["flow"][0] == ["pending", "3"]
    assert first["waits"][0][:2] == ["a", "row-a"]
    assert first["waits"][0][3] == "2 min 00 s ago"
    assert first["waits"][0][6:] == ["a tool or its agent loop", "1 min 56 s", "7", "0"]
    assert first["messages"] == [["warning", EVIL, "", ""]]
    assert (second["step"], dict(second["head"])["health"]) == (3, "ended")
    assert (
        second["waiting"] == "The run has ended: nobody waits. Cut off by its end, with the times until then: 1 prompt"
    )
    assert second["waits"][0][:3] == first["waits"][0][:3]
    assert (second["waits"][0][3], second["waits"][0][7]) == ("20 s before", "16 s")
    assert (first["flow_of"], first["flow"]) == (second["flow_of"].replace("3", "2"), second["flow"])


def moved(t: float, pending: int, **more: int) -> QueueMoved:
    counts = {"ongoing": 4, "deferred": 0, "done": 1, "taken": 16, "slots_in_use": 31, "slots_total": 32}
    return QueueMoved(t=t, step=2, pending=pending, **{**counts, **more})


def test_the_flow_is_that_of_the_moment_while_the_run_goes_on_and_of_the_last_step_after_its_end(
    tmp_path: Path,
) -> None:
    now = iter([110.0, 112.0, 114.0, 116.0, 10_000.0])
    write(tmp_path, moved(90.0, 0), StageBegan(t=91.0, number=1, total=5, name="configuration"), step(1))
    state = RunState(tmp_path, clock=lambda: next(now))
    assert state.shown["flow_of"] == "Prompts at the end of step 1:"  # the queue is that of an earlier start
    assert state.shown["flow"] == [["pending", "3"], ["taken", "16"]]
    write(tmp_path, moved(111.0, 7), role="queue")
    state.look()
    assert (state.shown["flow_of"], "slots taken", "31 of 32") == (
        "Prompts now, as told once a second:",
        *state.shown["head"][2],  # pyright: ignore[reportIndexIssue]
    )
    assert state.shown["flow"] == [["pending", "7"], ["ongoing", "4"], ["done", "1"], ["taken", "16"]]
    assert ["now", "step 2 for 11 s, usually 8 s"] in state.shown["head"]  # pyright: ignore[reportOperatorIssue]
    write(tmp_path, moved(113.0, 6, deferred=2), role="queue-2")
    state.look()
    assert state.shown["flow"] == [
        ["pending", "6"], ["ongoing", "4"], ["deferred", "2"], ["done", "1"], ["taken", "16"]]  # fmt: skip
    write(tmp_path, CommandEnded(t=115.0, code=0), role="driver")
    state.look()
    assert state.shown["flow_of"] == "Prompts at the end of step 1:"
    assert dict(state.shown["head"]).keys() == {"steps done", "health"}  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_an_ended_run_tells_how_long_its_trajectories_waited_until_each_was_cut_off(tmp_path: Path) -> None:
    """The end of the command may come long after that."""
    run = write(tmp_path, phase("a", "engine", 91.0), step(8), phase("a", "ended", 109.0), step(9))
    write(tmp_path, CommandEnded(t=130.0, code=0), role="driver")
    state = RunState(run, clock=lambda: 700.0)
    assert state.shown["waits"] == [
        ["a", "row-a", "a", "18 s before", "trajectory 0", "response 1", "tokens of an engine", "18 s", "", ""]
    ]
    assert "for tokens of an engine since 18 s, begun 18 s ago" in describe(state.waits, 700.0)
    assert state.shown["flow_of"] == (
        "Prompts at the end of step 9 (workers had stopped: prompts that they had begun count as pending again):"
    )


def test_a_step_that_goes_on_says_what_it_does_and_of_which_step_the_parts_are(tmp_path: Path) -> None:
    now = iter([112.0, 114.0, 116.0, 118.0])
    state = RunState(write(tmp_path, step(8)), clock=lambda: next(now))
    assert (
        state.why(None)[0] == "step 9 goes on for 4 s: its parts are known when it has ended. What follows is of step 8"
    )
    for t, is_open, what in (
        (111.0, True, "open for 3 s, so engines generate"),
        (115.0, False, "closed for 1 s, so the model is trained, or weights are sent"),
    ):
        write(tmp_path, GateMoved(t=t, step=9, version=8, is_open=is_open), role=f"gate-{t:.0f}")
        state.look()
        assert f": the gate is {what}; its parts" in state.why(None)[0]
    assert state.why(8)[0].startswith("step 8 took")
    write(tmp_path, CommandEnded(t=117.0, code=0), role="driver")
    state.look()
    assert state.why(None)[0].startswith("step 8 took")


def test_a_run_that_stands_still_has_the_flow_that_it_told_last(tmp_path: Path) -> None:
    state = RunState(write(tmp_path, step(1), moved(102.0, 7)), clock=lambda: 10_000.0)
    assert state.shown["flow_of"] == "Prompts, as it told last:"
    assert "now" not in dict(state.shown["head"])  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert state.drawn_s == 102.0


def test_a_run_that_is_silent_for_long_may_have_been_killed_and_in_one_that_ended_nobody_waits(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    health = [dict(RunState(run, clock=lambda at_s=at_s: at_s).shown["head"])["health"] for at_s in (700.0, 710.0)]  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert health == [
        "running, last event 9 min 57 s ago",
        "last event 10 min 07 s ago: it trains, saves or validates for long, stands still, or was killed",
    ]
    assert RunState(run, clock=lambda: 700.0).shown["waiting"] == (
        "1 prompt. Prompts that are pending wait for a free slot, and are not in the table."
    )
    write(tmp_path, CommandEnded(t=110.0, code=0), role="driver")
    assert str(RunState(run, clock=lambda: 700.0).shown["waiting"]).startswith("The run has ended: ")


def test_the_files_are_read_at_most_once_a_second(tmp_path: Path) -> None:
    state = RunState(a_run(tmp_path), clock=lambda: 50.0)
    state.look()
    write(tmp_path, step(3), role="driver")
    state.look()
    assert max(state.record.steps) == 2


def test_no_two_requests_of_a_slot_overlap_and_the_gate_is_a_band() -> None:
    lanes = Lanes()
    for event in (
        segment("a", 10.0, 5.0),
        segment("b", 12.0, 5.0),
        segment("c", 11.0, 1.0),
        segment("d", 10.0, 1, "t"),
    ):
        lanes.add(event)
    lanes.add(GateMoved(t=12.0, step=1, version=0, is_open=False, seconds=1.0))
    svg = lanes.svg()
    tops = [float(top) for top in re.findall(r'<rect x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="4.0"', svg)]
    assert len(tops) == 4
    assert len(set(tops)) == 3  # c runs in the slot that a has left; b beside it; d at the other server
    assert "gate closed for 1.0 s" in svg
    assert "trajectory 0: 7 tokens in 5.0 s, weights 2, ended" in svg
    assert "interrupted" not in svg
    lanes.add(msgspec.structs.replace(segment("e", 10.9), reason="aborted"))
    assert "prompt e, trajectory 0: 7 tokens in 1.0 s, weights 2, interrupted" in lanes.svg()
    assert Lanes().svg() == ""


def test_a_long_run_with_many_prompts_stays_small(tmp_path: Path) -> None:
    def events() -> Iterable[AnyEvent]:
        for number in range(1, 10_001):
            yield step(number, 10_000)
        for number in range(5_000):
            yield phase(f"p{number}", "engine", 10_000.0 + number)
            yield segment(f"p{number}", 10_100.0, 0.5, f"s{number % 4}")

    state = RunState(write(tmp_path, *events()))
    state.look()
    drawn = state.lanes.svg()
    assert len(json.dumps(state.shown) + drawn) < 900_000
    assert len(state.shown["waits"]) == view.NUM_OLDEST  # pyright: ignore[reportArgumentType]
    assert drawn.count("trajectory 0: 7 tokens") <= 4 * MAX_ROWS
    assert all("actor/entropy" not in each.metrics for each in state.record.steps.values())


def test_what_is_no_run_and_a_port_that_is_taken_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="neither events nor metrics"):
        RunState(tmp_path / "nowhere")
    assert view.main([str(tmp_path / "nowhere")]) == 2
    (tmp_path / "metrics.jsonl.gz").write_bytes(b"\x1f\x8b")
    assert view.main([str(tmp_path / "metrics.jsonl.gz")]) == 2
    assert "is a file: give the folder of the run" in capsys.readouterr().err
    with pytest.raises(DataError, match="is no file of verl's file logger, which is text"):
        load(tmp_path / "metrics.jsonl.gz")
    with view.socket.create_server((view.HOST, 0)) as taken:
        assert view.main([str(a_run(tmp_path)), "--port", str(taken.getsockname()[1])]) == 2
    assert "error: [Errno 98] Address already in use" in capsys.readouterr().err
    for port in ("70000", "-1", "http"):
        with pytest.raises(SystemExit, match="2"):
            view.main([str(tmp_path), f"--port={port}"])
    assert "70000 is not allowed: 0 (a free one) to 65535" in capsys.readouterr().err


def test_a_run_of_a_later_release_is_refused_and_a_cut_record_is_left_for_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "later/events").mkdir(parents=True)
    (tmp_path / "later/events/trainer-n-1-1.0.jsonl").write_text(
        '{"event": "opened", "format": 99, "role": "trainer", "node": "n", "pid": 1}\n'
    )
    assert view.main([str(tmp_path / "later")]) == 2
    assert "99" in capsys.readouterr().err
    now = iter(range(200, 300, 10))
    state = RunState(a_run(tmp_path / "cut"), clock=lambda: float(next(now)))
    file = next((tmp_path / "cut/events").iterdir())
    whole = json.dumps({"event": "step", "t": 104.0, "step": 3, "total": 9, "metrics": {"timing_s/step": 1.0}}) + "\n"
    for part, last in ((whole[:30], 2), (whole[30:], 3)):
        with file.open("a") as stream:
            stream.write(part)
        state.look()
        assert max(state.record.steps) == last


def test_bands_are_closed_gates_drains_and_updates_and_the_window_can_be_moved() -> None:
    lanes = Lanes()
    for event in (
        segment("a", 10.0, 5.0),
        GateMoved(t=11.0, step=1, version=0, is_open=False, seconds=1.0),
        WeightsUpdated(t=13.0, step=1, version=1, seconds=0.5),
        GateMoved(t=14.0, step=1, version=1, is_open=True),
        segment("b", 100.0, 3.0),
    ):
        lanes.add(event)
    whole = lanes.svg()
    assert "gate closed for 4.0 s" in whole
    assert "drain of 1.00 s" in whole
    assert "weights 1 sent in 0.50 s" in whole
    assert [uid in whole for uid in ('data-uid="a"', 'data-uid="b"')] == [True, True]
    zoomed = lanes.svg(window_s=10.0)
    assert ("prompt a" in zoomed, "prompt b" in zoomed, "gate closed for" in zoomed) == (False, True, False)
    earlier = lanes.svg(window_s=10.0, back_s=88.0)
    assert ("prompt a" in earlier, "prompt b" in earlier) == (True, False)
    assert lanes.svg(window_s=10.0, back_s=40.0) == ""


def test_a_request_that_has_not_ended_is_a_pale_bar_from_the_gate_on_until_its_end_is_known() -> None:
    lanes = Lanes()
    for event in (
        segment("a", 10.0, 5.0),
        phase("b", "engine", 11.0),
        phase("c", "engine", 8.0),
        phase("c", "tool", 9.0),
        GateMoved(t=12.0, step=1, version=0, is_open=False, seconds=0.5),
        segment("b", 12.0, 1.0),  # interrupted
        phase("d", "engine", 13.0),
        GateMoved(t=14.0, step=1, version=1, is_open=True),
        phase("e", "engine", 15.0),
        step(-80),  # at 20.0
    ):
        lanes.add(event)
    assert sorted((bar.uid, bar.start_s, bar.end_s) for bar in lanes.running()) == [
        ("b", 14.0, 20.0),
        ("d", 14.0, 20.0),
        ("e", 15.0, 20.0),
    ]
    assert "row row-d, trajectory 0: for 6.0 s, weights 1, has not ended" in lanes.svg()
    lanes.add(segment("d", 21.0, 7.0))
    lanes.add(GateMoved(t=22.0, step=1, version=1, is_open=False, seconds=0.5))
    lanes.add(segment("b", 22.0, 1.0))
    assert [(bar.uid, bar.end_s) for bar in lanes.running()] == [("d", 21.5), ("e", 21.5)]  # b waits for the gate
    lanes.add(CommandEnded(t=23.0, code=0))
    assert lanes.running() == []


def sent(uid: str, t: float, server: str) -> RequestSent:
    return RequestSent(t=t, uid=uid, session=0, server=server)


def labels(drawn: str) -> list[str]:
    """The texts beside the lanes."""
    return [found for found in re.findall(r'<text x="8.0"[^>]*>([^<]*)(?=<)', drawn) if found]


def test_a_request_that_has_not_ended_is_in_the_lane_of_its_engine_so_that_a_hung_one_is_seen() -> None:
    lanes = Lanes()
    for event in (
        segment("a", 5.0, 4.0, "s1"),
        segment("b", 5.0, 4.0, "s2"),
        *(phase("c", "engine", 6.0), sent("c", 6.0, "s1")),
        *(phase("d", "engine", 6.0), sent("d", 6.5, "s2")),
        *(phase("e", "engine", 6.0), sent("e", 7.0, "s2")),
        segment("c", 60.0, 54.0, "s1"),
        *(sent("c", 60.0, "s1"), phase("f", "engine", 70.0)),
    ):
        lanes.add(event)
    running = {(bar.uid, bar.server, bar.start_s) for bar in lanes.running(71.0)}
    assert running == {("c", "s1", 60.0), ("d", "s2", 6.5), ("e", "s2", 7.0), ("f", "no engine yet", 70.0)}
    assert labels(lanes.svg(now_s=75.0)) == [
        *("engine 1", "1 running", "silent 15 s"),
        *("engine 2", "2 running", "silent 68 s"),
        *("no engine yet", "1 waiting"),
    ]
    lanes.add(phase("e", "tool", 76.0))
    lanes.add(msgspec.structs.replace(segment("d", 77.0, 70.0, "s2")))
    assert "2 running" not in labels(lanes.svg())
    assert labels(lanes.svg(window_s=20.0, back_s=40.0)) == [
        "engine 1",
        "engine 2",
        "no engine yet",
    ]  # each keeps its number
    lanes.add(GateMoved(t=78.0, step=1, version=0, is_open=False))
    assert labels(lanes.svg()) == ["engine 1", "engine 2", "no engine yet"]  # nothing runs at a closed gate
    lanes.add(CommandEnded(t=79.0, code=1))
    assert lanes.running() == []


def test_steps_stand_above_the_lanes_where_there_is_room() -> None:
    lanes = Lanes()
    for number in (1, 2, 3, 40):
        lanes.add(step(number))
    lanes.add(segment("a", 141.0, 1.0))
    drawn = lanes.svg(window_s=60.0)
    assert [f">{number}<" in drawn for number in (1, 2, 3, 40)] == [True, True, False, True]
    assert drawn.count("<line") == 5  # the ends, and the begin of the first


def test_the_first_step_of_a_start_begins_with_its_timer_and_not_with_the_drawing() -> None:
    lanes = Lanes()
    for event in (step(20), StageBegan(t=150.0, number=1, total=5, name="configuration"), step(80), step(84)):
        lanes.add(event)
    lanes.add(segment("a", 185.0, 1.0))
    drawn = lanes.svg(window_s=60.0)
    at = {number: float(x) for x, number in re.findall(r'<text x="([\d.]+)"[^>]*>(\d+)<', drawn)}
    by_s = (1120 - 90 - 20) / 60.0
    assert at["80"] == pytest.approx(90 + by_s * (176.0 - 125.0), abs=0.1)  # from 172 s to 180 s
    assert at["84"] == pytest.approx(90 + by_s * (182.0 - 125.0), abs=0.1)


def test_no_weight_version_has_the_colour_of_a_closed_gate() -> None:
    lanes = Lanes()
    for version in range(9):
        lanes.add(msgspec.structs.replace(segment(f"p{version}", 100.0 + version), version=version))
    assert (lanes.svg().count("#777777"), len(set(re.findall(r'fill="(#[0-9a-f]+)"', lanes.svg())))) == (0, 7)


def test_a_request_that_was_on_its_way_when_the_gate_closed_began_with_the_weights_that_it_has() -> None:
    lanes = Lanes()
    for event in (
        GateMoved(t=11.0, step=1, version=1, is_open=False, seconds=0.5),
        GateMoved(t=14.0, step=1, version=2, is_open=True),
        segment("a", 15.0, 4.6),  # asked for at 10.4, just before the gate closed at 10.5; its weights are 2
    ):
        lanes.add(event)
    assert [bar.start_s for bar in lanes.bars] == [14.0]


def dumped(run: Path) -> Path:
    """A dump of step 1, as verl writes it, with our column."""
    (run / "rollouts").mkdir(parents=True)
    row = {"uid": "a_0_0", "input": "what?", "output": EVIL, "score": 1.0, "weight_versions": [[2, 4], [3, 3]]}
    other = row | {"uid": "b_0_0", "output": "not mine"}
    (run / "rollouts/1.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (row, other)))
    return run


async def test_a_line_of_a_dump_that_is_cut_is_left_out(tmp_path: Path) -> None:
    """The last line is cut while verl writes the dump."""
    run = dumped(a_run(tmp_path, taken(96.0)))
    with (run / "rollouts/1.jsonl").open("ab") as file:
        file.write(b'{"uid": "a_1_0", "input": "what?", "output": "\xf0\x9f')
    async with TestClient(TestServer(make_app(RunState(run), TOKEN))) as client:
        answer = await client.get(f"/prompt?token={TOKEN}&uid=a")
        assert (answer.status, len((await answer.json())["texts"])) == (200, 1)


def test_the_end_of_a_line_within_a_text_ends_no_row_of_a_dump(tmp_path: Path) -> None:
    """verl writes what JSON need not escape as it is, U+2028 too."""
    run = dumped(a_run(tmp_path, taken(96.0)))
    row = {"uid": "a_1_0", "input": "what?", "output": "one\u2028two\u0085three"}
    with (run / "rollouts/1.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
    assert [texts[-1] for texts in _texts_of(run)] == [EVIL, row["output"]]


def _texts_of(run: Path) -> list[list[str]]:
    return cast("list[list[str]]", prompt_view(run, "a")["texts"])


def taken(t: float) -> BatchTaken:
    return BatchTaken(t=t, step=1, uids=["a"], source_index=["row-a"], deferrals=[0], interruptions=[0])


async def test_a_prompt_has_its_events_and_its_text_where_a_dump_has_it(tmp_path: Path) -> None:
    run = dumped(a_run(tmp_path, taken(96.0), phase("other", "agent", 97.0)))
    async with TestClient(TestServer(make_app(RunState(run), TOKEN))) as client:
        seen = await (await client.get(f"/prompt?token={TOKEN}&uid=a")).json()
        assert (await client.get(f"/prompt?token={TOKEN}")).status == 400
        assert (await client.get("/prompt?token=wrong&uid=a")).status == 403
        assert (await client.get(f"/state?token={TOKEN}&window=x")).status == 400
        nobody = await (await client.get(f"/prompt?token={TOKEN}&uid=nobody")).json()
    assert seen["texts"] == [["score 1.0", "4 tokens of weights 2, 3 tokens of weights 3", "what?", EVIL]]
    assert [row[0] for row in seen["events"]] == ["0.0 s", "1.0 s", "4.0 s", "4.0 s", "6.0 s"]
    assert seen["events"][0][2] == "waits for its agent loop, response 1"
    assert seen["events"][2][2] == (
        "ended at s: 7 new tokens by weights 2; context 5 tokens, 0 of them found in the KV cache"
    )
    assert seen["events"][-1] == ["6.0 s", "", "taken for step 1"]
    assert (nobody["events"], nobody["texts"]) == ([], [])


def unfinished(folder: Path) -> Path:
    """Prompt `u`: its first trajectory was interrupted in its second response, its second has told nothing."""

    def request(t: float, tokens: int, text: str, count: int, reason: str) -> SegmentEnded:
        return SegmentEnded(
            t=t, uid="u", session=0, server="s", version=int(t) - 90, seconds=1.0, prompt_tokens=5, tokens=tokens,
            text=text, text_tokens=count, reason=reason,
        )  # fmt: skip

    def asks(t: float, session: int, what: str, response: int, text: str = "") -> PhaseBegan:
        return PhaseBegan(t=t, uid="u", session=session, phase=what, response=response, text=text)

    return write(
        folder,
        step(1),
        *(asks(80.0, 0, "agent", 0, "of an attempt that failed"), request(80.5, 9, "gone", 9, "stop")),
        *(asks(90.0, 0, "agent", 0, "what is <b>2</b> + 2?"), asks(91.0, 0, "engine", 1)),
        *(request(92.0, 300, "of it", 2, "aborted"), request(93.0, 2, " four", 2, "stop")),
        *(asks(94.0, 0, "engine", 2), request(95.0, 2, EVIL, 2, "aborted")),
        *(asks(90.0, 1, "agent", 0), asks(91.0, 1, "engine", 1)),
        *(phase("silent", "agent", 90.0), segment("silent", 92.0)),
    )


def test_an_unfinished_prompt_has_its_text_so_far(tmp_path: Path) -> None:
    seen = prompt_view(unfinished(tmp_path), "u")
    text = f"[... 298 tokens ...]of it four\n[response 2]\n{EVIL}"
    assert seen["texts"] == [["trajectory 0", "304 tokens so far, of weights 2, 3, 5", "what is <b>2</b> + 2?", text]]
    assert seen["note"] == SO_FAR
    silent = prompt_view(tmp_path, "silent")
    assert (silent["texts"], silent["note"]) == ([], NO_TEXT)
    assert prompt_view(an_image_run(tmp_path / "images"), "group-0")["note"] == ""


def test_the_text_so_far_is_bounded(tmp_path: Path) -> None:
    long = [msgspec.structs.replace(segment("u", 91.0), text="x" * 4_000, text_tokens=7) for _ in range(50)]
    starts = [PhaseBegan(t=90.0, uid="u", session=number, phase="agent", text="p") for number in range(100)]
    seen = prompt_view(write(tmp_path, *starts, *long), "u")
    assert len(json.dumps(seen)) < 60_000
    assert len(seen["texts"]) == MAX_TEXTS  # pyright: ignore[reportArgumentType]


async def test_two_runs_at_once_have_two_pages_that_know_nothing_of_each_other(tmp_path: Path) -> None:
    runs = {"one": a_run(tmp_path / "one"), "two": write(tmp_path / "two", step(7), phase("z", "engine", 90.0))}
    states = {name: RunState(run, clock=lambda: 200.0) for name, run in runs.items()}
    async with (
        TestClient(TestServer(make_app(states["one"], "token of one"))) as one,
        TestClient(TestServer(make_app(states["two"], "token of two"))) as two,
    ):
        assert one.port != two.port
        seen = [await (await page.get("/state", params={"token": f"token of {name}"})).json() for page, name in
                ((one, "one"), (two, "two"))]  # fmt: skip
        assert [(now["name"], now["step"], [wait[0] for wait in now["waits"]]) for now in seen] == [
            ("one", 2, ["a"]),
            ("two", 7, ["z"]),
        ]
        assert (await one.get("/state", params={"token": "token of two"})).status == 403
        assert (await (await two.get("/prompt", params={"token": "token of two", "uid": "a"})).json())["events"] == []


def a_step_of_many(number: int) -> Iterable[AnyEvent]:
    """100 trajectories that begin, are interrupted, go on and end; the step has as many metrics as verl's have."""
    for uid in (f"p{number}-{each}" for each in range(100)):
        yield phase(uid, "agent", 100.0 + number)
        yield phase(uid, "engine", 100.0 + number)
        yield msgspec.structs.replace(segment(uid, 100.0 + number), reason="aborted")
        yield segment(uid, 100.5 + number)
        ended = TrajectoryEnded(uid=uid, session=0, seconds=4.0, engine_seconds=3.0, tokens=14, interruptions=1)
        yield msgspec.structs.replace(ended, t=100.5 + number)
    yield GateMoved(t=100.6 + number, step=number, version=number - 1, is_open=False, interrupted=100)
    yield GateMoved(t=100.7 + number, step=number, version=number, is_open=True)
    more = {f"partial_rollout/a_metric_with_a_name_as_long_as_usual/{each}": 0.1 * each * number for each in range(100)}
    yield StepEnded(t=100.8 + number, step=number, total=9_999, metrics={**METRICS, **more})


def test_a_page_that_is_open_for_days_keeps_the_numbers_of_each_step_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all that is bounded is full, a step costs what its some 100 numbers take."""
    monkeypatch.setattr(lanes_module, "MAX_PROMPTS", 500)
    now = iter(range(200, 100_000, 2))
    state = RunState(write(tmp_path, *a_step_of_many(1)), clock=lambda: float(next(now)))
    tracemalloc.start()
    try:
        sizes = []
        for first in (2, 27, 52):
            write(
                tmp_path,
                *(event for each in range(first, first + 25) for event in a_step_of_many(each)),
                role=str(first),
            )
            state.look()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert (max(state.record.steps), state.waits.now()) == (76, [])
    assert (sizes[2] - sizes[1]) / 25 < 9_000


async def test_a_run_of_ten_thousand_steps_answers_with_bounded_work(tmp_path: Path) -> None:
    def events() -> Iterable[AnyEvent]:
        for number in range(1, 10_001):
            yield step(number, 10_000)
        for number in range(5_000):
            yield phase(f"p{number}", "engine", 10_000.0 + number)
            yield segment(f"p{number}", 10_100.0, 0.5, f"s{number % 4}")

    now = itertools.count(20_000.0, 2.0)
    state = RunState(write(tmp_path, *events()), clock=lambda: next(now))  # every request looks again
    state.look()
    write(tmp_path, step(10_001, 10_001), role="later")
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    async with TestClient(TestServer(make_app(state, TOKEN))) as client:
        sys.setprofile(count)  # counted, since seconds are those of the machine
        try:
            answer = await client.get(f"/state?token={TOKEN}")
            prompt = await client.get(f"/prompt?token={TOKEN}&uid=p77")
        finally:
            sys.setprofile(None)
        assert (await answer.json())["step"] == 10_001
        assert prompt.status == 200
    # Entries and returns of functions: 205 for each step and 410 for each response that has not ended.
    assert calls < 6_000_000
