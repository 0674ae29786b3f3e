"""The live page: who may see it, that its numbers are the stream's, that it stays small; a browser draws it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from typing import TYPE_CHECKING

import pytest
from aiohttp.test_utils import TestClient, TestServer

from partial_rollout import view
from partial_rollout.errors import DataError
from partial_rollout.observability.events import (
    AnyEvent,
    CommandEnded,
    EventWriter,
    GateMoved,
    PhaseBegan,
    SegmentEnded,
    StepEnded,
    Warned,
)
from partial_rollout.observability.lanes import MAX_ROWS, Lanes
from partial_rollout.observability.record import load
from partial_rollout.observability.summary import summary_lines
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
    assert second["summary"][:-1] == expected
    assert dict(first["head"])["step"] == "2/9"
    assert dict(first["head"])["left"] == "about 56 s"
    assert first["flow"][0] == ["pending", "3"]
    assert first["waits"][0][0:1] == ["row row-a"]
    assert first["waits"][0][4] == "for a tool or its agent loop"
    assert first["messages"] == [["warning", EVIL, ""]]
    assert (second["step"], dict(second["head"])["health"], second["waits"]) == (3, "ended", [])


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
    shown = json.dumps(state.shown)
    assert len(shown) < 600_000
    assert len(state.shown["waits"]) == view.NUM_OLDEST  # pyright: ignore[reportArgumentType]
    assert shown.count("trajectory 0: 7 tokens") <= 4 * MAX_ROWS
    assert all("actor/entropy" not in each.metrics for each in state.record.steps.values())


def test_what_is_no_run_and_a_port_that_is_taken_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="neither events nor metrics"):
        RunState(tmp_path / "nowhere")
    assert view.main([str(tmp_path / "nowhere")]) == 2
    with view.socket.create_server((view.HOST, 0)) as taken:
        assert view.main([str(a_run(tmp_path)), "--port", str(taken.getsockname()[1])]) == 2
    assert "error: [Errno 98] Address already in use" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's package chromium")
async def test_a_browser_draws_the_page_and_shows_text_as_text(tmp_path: Path) -> None:
    async with TestServer(make_app(RunState(a_run(tmp_path)), TOKEN)) as server:
        address = str(server.make_url(f"/?token={TOKEN}"))
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom", address]
        process = await asyncio.create_subprocess_exec(
            "chromium", *words, f"--user-data-dir={tmp_path / 'profile'}", stdout=-1, stderr=-3
        )
        dom = (await asyncio.wait_for(process.communicate(), 120))[0].decode()
    assert 'data-step="2"' in dom
    assert "step <b>2/9</b>" in dom
    assert "pending <b>3</b>" in dom
    assert "row row-a, trajectory 0: 7 tokens in 1.0 s, weights 2, ended" in dom
    assert EVIL.replace("<", "&lt;").replace(">", "&gt;") in dom
    assert "onerror" not in re.sub(r"&lt;.*?&gt;", "", dom)
