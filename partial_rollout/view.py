"""`python -m partial_rollout.view RUN [--port PORT]`: a page that shows a run while it goes on, and afterwards.

The page is served on this machine only, under an address with a token, by this process: the run knows nothing of it.
All that it shows comes from the run's event stream, which is read on as long as somebody looks.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import logging
import math
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from partial_rollout.errors import DataError
from partial_rollout.observability.events import EventReader
from partial_rollout.observability.lanes import WINDOW_S, Lanes
from partial_rollout.observability.page import PAGE
from partial_rollout.observability.prompt_view import prompt_view
from partial_rollout.observability.record import RunRecord, events_folder_of, load
from partial_rollout.observability.report import STYLE, is_shown, lost_rows, message_rows, step_charts
from partial_rollout.observability.step_line import PREFIX, step_line
from partial_rollout.observability.summary import duration, next_step, summary_lines
from partial_rollout.observability.waits import WHAT, Waits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from partial_rollout.observability.waits import Wait

logger = logging.getLogger("partial_rollout.view")
HOST = "127.0.0.1"
MIN_WINDOW_S = 1.0
LOOK_S = 1.0
"""The files are read at most once in this time, however many pages are open."""
NUM_OLDEST = 20
STATES = ("pending", "ongoing", "deferred", "done", "taken")


class RunState:
    """What is known of the run; `look` reads on."""

    def __init__(self, run: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises DataError if there is no run at `run`."""
        load(run)
        self._clock, self._looked_s = clock, 0.0
        self.shown: dict[str, object] = {}
        """What the page shows, as of the last look."""
        self.run, self.record = run, RunRecord(run.resolve().name, keep=is_shown)
        self._reader, self.waits, self.lanes = EventReader(events_folder_of(run)), Waits(), Lanes()
        self._charts = ""
        """As of the last step: with thousands of steps they take a while to draw."""

    def look(self) -> None:
        """Take in what is new, at most once in `LOOK_S`."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        events = self._reader.read()
        self.waits.add(events)
        num_steps = len(self.record.steps)
        for event in events:
            self.record.add(event)
            self.lanes.add(event)
        if not self.record.steps:  # verl's own modes
            steps = load(self.run).steps.values()
            for step in steps:
                self.record.add(step)
        if len(self.record.steps) > num_steps:
            self._charts = "".join(f"<figure>{chart}</figure>" for chart in step_charts([self.record]))
        self.shown = self._state()

    def _state(self) -> dict[str, object]:
        record, waits = self.record, self.waits.now()
        step = max(record.steps, default=0)
        metrics = record.last
        return {
            "name": record.name,
            "step": step,
            "head": self._head(step),
            "flow": [[state, f"{metrics.get(f'{PREFIX}/queue/{state}', 0):.0f}"] for state in STATES],
            "line": step_line(step, record.total or None, metrics) if step else "no step has ended",
            "waits": [_row(wait, self._now_s) for wait in waits[:NUM_OLDEST]],
            "charts": self._charts,
            "advice": next_step(record) if record.steps else "nothing yet, no step has ended",
            "causes": [list(row) for row in lost_rows(record.series)],
            "summary": [line.split(maxsplit=1) for line in summary_lines(record)],
            "messages": [list(row) for row in message_rows(record)],
        }

    @property
    def _now_s(self) -> float:
        """The present; of a run that has ended its last moment."""
        return self.lanes.now_s if self.record.ended is not None else self._clock()

    def _head(self, step: int) -> list[list[str]]:
        record = self.record
        ended = record.ended
        if ended is not None:
            health = "ended" if ended.code == 0 else f"ended with code {ended.code}: {ended.text}"
        elif record.stages and not record.steps:
            health = f"starting, {record.stages[-1].name} for {duration(self._now_s - record.stages[-1].t)}"
        else:
            health = f"last event {duration(self._now_s - self.lanes.now_s)} ago"
        times = record.values("timing_s/step")[-5:]
        left_s = sum(times) / len(times) * (record.total - step) if times and record.total and ended is None else 0.0
        gate = "" if record.gate is None else "open" if record.gate.is_open else "closed"
        head = [["step", f"{step}/{record.total or '?'}"], ["gate", gate], ["weights", str(record.version)]]
        return [*head, *([["left", f"about {duration(left_s)}"]] if left_s else []), ["health", health]]


def _row(wait: Wait, now_s: float) -> list[str]:
    """The uid that a click asks for, then the cells of the table."""
    row = f"row {wait.row}" if wait.row else ""
    since = duration(now_s - wait.since_s)
    what = f"for {WHAT.get(wait.what, wait.what)}"
    has = f"{wait.tokens} tokens, {wait.interruptions} interruptions"
    return [wait.uid, row, wait.uid, wait.who, f"response {wait.response}", what, since, has]


def _seconds(request: web.Request, name: str, default: float) -> float:
    try:
        seconds = float(request.query.get(name, default))
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise web.HTTPBadRequest(text=f"{name}={request.query[name]} is not allowed: seconds of at least 0")
    return seconds


def make_app(state: RunState, token: str) -> web.Application:
    """The server; every request needs the token."""

    @web.middleware
    async def with_token(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not hmac.compare_digest(request.query.get("token", "").encode(), token.encode()):
            logger.warning("refused %s from %s: the token is wrong or missing", request.path, request.remote)
            raise web.HTTPForbidden(text="the token is wrong or missing: use the whole address that was printed")
        return await handler(request)

    async def page(_request: web.Request) -> web.Response:
        nonce = secrets.token_urlsafe(16)
        text = PAGE.replace("STYLE", STYLE).replace("NONCE", nonce).replace("NAME", "partial rollout")
        policy = f"default-src 'none'; connect-src 'self'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
        headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def now(request: web.Request) -> web.Response:
        state.look()
        window_s, back_s = _seconds(request, "window", WINDOW_S), _seconds(request, "back", 0.0)
        shown = state.shown | {"lanes": state.lanes.svg(max(MIN_WINDOW_S, window_s), back_s)}
        return web.json_response(shown, headers={"Cache-Control": "no-store"})

    async def prompt(request: web.Request) -> web.Response:
        uid = request.query.get("uid", "")
        if not uid:
            raise web.HTTPBadRequest(text="uid is missing")
        found = await asyncio.to_thread(prompt_view, state.run, uid)
        return web.json_response(found, headers={"Cache-Control": "no-store"})

    app = web.Application(middlewares=[with_token])
    app.add_routes([web.get("/", page), web.get("/state", now), web.get("/prompt", prompt)])
    return app


def main(words: list[str] | None = None) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m partial_rollout.view", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--port", type=int, default=0, help="of this machine (a free one)")
    options = parser.parse_args(words)
    token = secrets.token_urlsafe(24)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s:%(asctime)s:%(message)s")

    try:
        app = make_app(RunState(options.run), token)
        with socket.create_server((HOST, options.port)) as served:
            print(f"http://{HOST}:{served.getsockname()[1]}/?token={token}   (Ctrl-C ends it)", flush=True)
            web.run_app(app, sock=served, print=None, access_log=None)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
