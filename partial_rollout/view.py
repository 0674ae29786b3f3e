"""`python -m partial_rollout.view RUN [--port PORT]`: a page that shows a run while it goes on, and afterwards.

The page is served on this machine only, under an address with a token, by this process: the run knows nothing of it.
All that it shows comes from the run's event stream, which is read on as long as somebody looks.
"""

from __future__ import annotations

import argparse
import hmac
import logging
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from partial_rollout.errors import DataError
from partial_rollout.observability.events import EventReader
from partial_rollout.observability.lanes import Lanes
from partial_rollout.observability.record import RunRecord, events_folder_of, load
from partial_rollout.observability.report import STYLE, is_shown, message_rows, step_charts
from partial_rollout.observability.step_line import PREFIX, step_line
from partial_rollout.observability.summary import duration, next_step, summary_lines
from partial_rollout.observability.waits import WHAT, Waits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from partial_rollout.observability.waits import Wait

logger = logging.getLogger("partial_rollout.view")
HOST = "127.0.0.1"
LOOK_S = 1.0
"""The files are read at most once in this time, however many pages are open."""
NUM_OLDEST = 20
STATES = ("pending", "ongoing", "deferred", "done", "taken")

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>NAME</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style nonce="NONCE">STYLE
#head { font-size: 1.1em } #head b { margin-right: 1.2em } #lost { color: #b00 }
.flow span { display: inline-block; margin-right: 1.6em } .flow b { font-size: 1.4em }
</style></head><body><h1 id="name"></h1>
<p><button id="pause">pause</button> <span id="lost"></span></p>
<p id="head"></p><p class="flow" id="flow"></p><div id="lanes"></div>
<h2>Who has waited longest</h2><table id="waits"></table>
<h2>Steps</h2><p id="line"></p><div class="charts" id="charts"></div>
<h2>What it showed so far</h2><table id="summary"></table>
<h2>Warnings, errors and faults</h2><table id="messages"></table>
<script nonce="NONCE">
const at = name => document.getElementById(name);
let paused = false;
at("pause").onclick = () => { paused = !paused; at("pause").textContent = paused ? "go on" : "pause"; };
function table(name, rows) {  // text is set as text: nothing of a run is ever read as HTML
  at(name).replaceChildren(...rows.map(cells => {
    const row = document.createElement("tr");
    row.append(...cells.map(cell => Object.assign(document.createElement("td"), {textContent: cell})));
    return row;
  }));
}
function pairs(name, values) {
  at(name).replaceChildren(...values.map(([label, value]) => {
    const part = document.createElement("span"), number = document.createElement("b");
    number.textContent = value; part.append(label + " ", number, " "); return part;
  }));
}
async function look() {
  if (!paused) try {
    const answer = await fetch("state" + location.search);
    if (!answer.ok) throw new Error(await answer.text());
    const now = await answer.json();
    at("name").textContent = now.name; at("line").textContent = now.line; at("lost").textContent = "";
    pairs("head", now.head); pairs("flow", now.flow);
    table("waits", now.waits); table("summary", now.summary); table("messages", now.messages);
    at("lanes").innerHTML = now.lanes; at("charts").innerHTML = now.charts;  // drawings, made with escaped texts
    document.body.dataset.step = now.step;
  } catch (error) { at("lost").textContent = "no answer from the server: " + error.message; }
  setTimeout(look, 2000);
}
look();
</script></body></html>
"""


class RunState:
    """What is known of the run; `look` reads on."""

    def __init__(self, run: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises DataError if there is no run at `run`."""
        load(run)
        self._clock, self._looked_s = clock, 0.0
        self.shown: dict[str, object] = {}
        """What the page shows, as of the last look."""
        self._run, self.record = run, RunRecord(run.resolve().name, keep=is_shown)
        self._reader, self.waits, self.lanes = EventReader(events_folder_of(run)), Waits(), Lanes()

    def look(self) -> None:
        """Take in what is new, at most once in `LOOK_S`."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        events = self._reader.read()
        self.waits.add(events)
        for event in events:
            self.record.add(event)
            self.lanes.add(event)
        if not self.record.steps:  # verl's own modes
            steps = load(self._run).steps.values()
            for step in steps:
                self.record.add(step)
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
            "lanes": self.lanes.svg(),
            "charts": "".join(f"<figure>{chart}</figure>" for chart in step_charts([record])),
            "summary": [line.split(maxsplit=1) for line in summary_lines(record)] + [["next", next_step(record)]],
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
    row = f"row {wait.row}" if wait.row else ""
    since = duration(now_s - wait.since_s)
    return [row, wait.uid, wait.who, f"response {wait.response}", f"for {WHAT.get(wait.what, wait.what)}", since]


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

    async def now(_request: web.Request) -> web.Response:
        state.look()
        return web.json_response(state.shown, headers={"Cache-Control": "no-store"})

    app = web.Application(middlewares=[with_token])
    app.add_routes([web.get("/", page), web.get("/state", now)])
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
