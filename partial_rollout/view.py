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
from statistics import median
from typing import TYPE_CHECKING

from aiohttp import web

from partial_rollout.errors import DataError
from partial_rollout.observability.advice import next_step, would_help
from partial_rollout.observability.events import EventReader, StepEnded
from partial_rollout.observability.lanes import WINDOW_S, Lanes
from partial_rollout.observability.page import PAGE
from partial_rollout.observability.prompt_view import prompt_view
from partial_rollout.observability.record import LOG, RunRecord, check_is_no_file, events_folder_of, load
from partial_rollout.observability.report import STYLE, is_shown, lost_rows, message_rows, step_charts
from partial_rollout.observability.step_line import PREFIX, step_line
from partial_rollout.observability.summary import duration, summary_lines
from partial_rollout.observability.waits import WHAT, Waits
from partial_rollout.observability.why import PENDING, Interruptions, step_rows, step_why

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from partial_rollout.observability.events import QueueMoved
    from partial_rollout.observability.waits import Wait

logger = logging.getLogger("partial_rollout.view")
HOST = "127.0.0.1"
MIN_WINDOW_S = 1.0
LOOK_S = 1.0
"""The files are read at most once in this time, however many pages are open."""
NUM_OLDEST = 20
MAX_PICTURES = 8
MAX_PORT = 65535
SILENT_S, SILENT_STEPS = 600.0, 3
"""A run that has told nothing for longer, and for as many steps, stands still or was killed."""
QUEUE = {state: f"{PREFIX}/queue/{state}" for state in ("pending", "ongoing", "deferred", "done", "taken")}
"""The metric of each state; image jobs have not all of them, verl's own modes none."""


class RunState:
    """What is known of the run; `look` reads on."""

    def __init__(self, run: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises DataError if there is no run at `run`."""
        check_is_no_file(run)
        self._clock, self._looked_s = clock, -math.inf
        self.shown: dict[str, object] = {}
        """What the page shows, as of the last look."""
        self.run, self.record = run, RunRecord(run.resolve().name, keep=is_shown)
        self._reader, self.waits, self.lanes = EventReader(events_folder_of(run)), Waits(), Lanes()
        self.interruptions = Interruptions()
        self._told_steps = False
        """Whether the stream has steps; that of verl's own modes has none."""
        self._metrics_s = 0.0
        """When the file of verl's `file` logger was written, as of the last look."""
        self._of_steps: dict[str, object] = {}
        """What follows from the steps: with thousands of them it takes a while."""
        self._num_events = 0
        self.look()
        if self._is_silent and not (run / LOG).is_file():
            load(run)  # says what is missing

    @property
    def _is_silent(self) -> bool:
        """Whether nothing has been told yet, as in the first seconds of a command."""
        return not self._num_events and not self.record.steps

    def look(self) -> None:
        """Take in what is new, at most once in `LOOK_S`."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        events = self._reader.read()
        self._num_events += len(events)
        self.waits.add(events)
        has_steps = any(isinstance(event, StepEnded) for event in events)
        self._told_steps = self._told_steps or has_steps
        for event in events:
            self.record.add(event)
            self.lanes.add(event)
            self.interruptions.add(event)
        if has_steps or self._look_at_metrics() or not self._of_steps:
            self._of_steps = self._state_of_steps()
        self.shown = self._of_steps | self._state()

    def _look_at_metrics(self) -> bool:
        """Take in the steps of verl's own modes, whose only record is verl's file; whether there may be new ones."""
        if self._told_steps:
            return False
        written_s = max((path.stat().st_mtime for path in self.run.glob("metrics*.jsonl")), default=0.0)
        if written_s == self._metrics_s:
            return False
        self._metrics_s = written_s
        for step in load(self.run).steps.values():
            self.record.add(step)
        return True

    def _state_of_steps(self) -> dict[str, object]:
        record = self.record
        step = max(record.steps, default=0)
        return {
            "step": step,
            "line": step_line(step, record.total or None, record.last) if step else "no step has ended",
            "charts": "".join(f"<figure>{chart}</figure>" for chart in step_charts([record])),
            "advice": next_step(record) if record.steps else "nothing yet, no step has ended",
            "helps": [[f"{what}?", said] for what, said in would_help(record)],
            "causes": [list(row) for row in lost_rows(record.series)],
            "summary": [line.split(maxsplit=1) for line in summary_lines(record)],
        }

    def _state(self) -> dict[str, object]:
        record = self.record
        waits = self.waits.now() if record.ended is None else self.waits.left()
        step, metrics = max(record.steps, default=0), record.last
        return {
            "name": record.name,
            "head": self._head(step),
            "flow": self._flow(metrics),
            "flow_of": self._flow_of(step, metrics),
            "waiting": self._waiting(waits),
            "waits": [_row(wait, self._now_s) for wait in waits[:NUM_OLDEST]],
            "steps": [list(row) for row in step_rows(record, self.interruptions)],
            "messages": [list(row) for row in message_rows(record)],
            "pictures": [[path.name, path.stat().st_mtime] for path in pictures(self.run)],
        }

    @property
    def _queue(self) -> QueueMoved | None:
        """The queue at this moment; None: it is not told, or the run has ended."""
        return self.record.queue if self.record.ended is None else None

    def _flow(self, metrics: Mapping[str, float]) -> list[list[str]]:
        if (queue := self._queue) is None:
            counts = {state: metrics[name] for state, name in QUEUE.items() if name in metrics}
        else:
            counts = {state: getattr(queue, state) for state in QUEUE}
        return [[state, f"{count:.0f}"] for state, count in counts.items() if count or state != "deferred"]

    def _flow_of(self, step: int, metrics: Mapping[str, float]) -> str:
        """What the numbers of the flow are of."""
        if self._queue is not None:
            return "Prompts now, as told once a second:" if self._goes_on else "Prompts, as it told last:"
        if all(name not in metrics for name in QUEUE.values()):
            return ""
        is_last = PENDING in metrics and step == self.record.total
        again = " (workers had stopped: prompts that they had begun count as pending again)" if is_last else ""
        return f"Prompts at the end of step {step}{again}:"

    def _waiting(self, waits: Sequence[Wait]) -> str:
        number = len({wait.uid for wait in waits})
        told = f"{number} prompt{'' if number == 1 else 's'}"
        pending = "Prompts that are pending wait for a free slot, and are not in the table."
        if len(waits) > NUM_OLDEST:
            told += f"; the first {NUM_OLDEST} of {len(waits)} rows"
        if self.record.ended is not None:
            return f"The run has ended: nobody waits. Cut off by its end, with the times until then: {told}"
        return f"{told}. {pending}"

    def why(self, step: int | None) -> list[str]:
        """Sentences about a step, by default about the last one."""
        if not self.record.steps:
            return []
        number = max(self.record.steps) if step is None else step
        said = step_why(self.record, self.interruptions, number) or [f"there is no step {number}"]
        return [*self._running_step(number), *said] if step is None else said

    def _running_step(self, last: int) -> list[str]:
        """What the step after the last one does now; empty where none goes on."""
        since_s, gate = self.record.steps[last].t, self.record.gate
        if last == self.record.total or not self._goes_on or not since_s:
            return []
        does = ""
        if gate is not None:
            what = "engines generate" if gate.is_open else "the model is trained, or weights are sent"
            state = "open" if gate.is_open else "closed"
            does = f" the gate is {state} for {duration(self._now_s - gate.t)}, so {what};"
        goes_on = f"step {last + 1} goes on for {duration(self._now_s - since_s)}:"
        return [f"{goes_on}{does} its parts are known when it has ended. What follows is of step {last}"]

    @property
    def _now_s(self) -> float:
        """The moment at which the page was looked at; the last moment of a run that has ended."""
        return self.lanes.now_s if self.record.ended is not None else self._looked_s

    @property
    def _times(self) -> list[float]:
        """Seconds of the latest steps."""
        return self.record.values("timing_s/step")[-5:]

    @property
    def _told_s(self) -> float:
        """The moment of what it told last: an event, or a step in the file of verl's own modes."""
        return max(self.lanes.now_s, self._metrics_s)

    @property
    def drawn_s(self) -> float:
        """Until when the lanes are drawn: now, while the run goes on."""
        return max(self._now_s, self.lanes.now_s) if self._goes_on else self.lanes.now_s

    @property
    def _goes_on(self) -> bool:
        """Whether it has not ended, and has told something not long ago."""
        longest_s = max([SILENT_S, *(SILENT_STEPS * each for each in self._times)])
        return self.record.ended is None and self._now_s - self._told_s <= longest_s

    def _head(self, step: int) -> list[list[str]]:
        record = self.record
        ended, times = record.ended, self._times
        if ended is not None:
            health = "ended" if ended.code == 0 else f"ended with code {ended.code}: {ended.text}"
        elif self._is_silent:
            health = "starting, nothing is told yet"
        elif record.stages and not record.steps:
            health = f"starting, {record.stages[-1].name} for {duration(self._now_s - record.stages[-1].t)}"
        else:
            last = f"last event {duration(self._now_s - self._told_s)} ago"
            health = (
                f"running, {last}"
                if self._goes_on
                else f"{last}: it trains, saves or validates for long, stands still, or was killed"
            )
        left_s = sum(times) / len(times) * (record.total - step) if times and record.total and ended is None else 0.0
        head = [["steps done", f"{step}/{record.total or '?'}"]]
        if step and step != record.total and self._goes_on and (since_s := record.steps[step].t):
            usual = f", usually {duration(median(times))}" if times else ""
            head += [["now", f"step {step + 1} for {duration(self._now_s - since_s)}{usual}"]]
        if record.gate is not None:  # verl's own modes have none
            head += [["gate", "open" if record.gate.is_open else "closed"], ["weights", str(record.version)]]
        if self._queue is not None and self._queue.slots_total:
            head += [["slots taken", f"{self._queue.slots_in_use} of {self._queue.slots_total}"]]
        return [*head, *([["left", f"about {duration(left_s)}"]] if left_s else []), ["health", health]]


def _row(wait: Wait, now_s: float) -> list[str]:
    """The uid that a click asks for, then the cells of the table."""
    until_s = wait.until(now_s)
    begun, since = duration(until_s - wait.begun_s), duration(until_s - wait.since_s)
    has = ["", ""] if wait.tokens is None else [f"{wait.tokens:,}", str(wait.interruptions)]
    turn = f"response {wait.response}" if wait.response else "before the first"
    return [
        wait.uid,
        wait.row,
        wait.uid,
        f"{begun} {'ago' if wait.until_s is None else 'before'}",
        wait.who,
        turn,
        WHAT.get(wait.what, wait.what),
        since,
        *has,
    ]


def _number(request: web.Request, name: str, default: float) -> float:
    if name not in request.query:
        return default
    try:
        number = float(request.query[name])
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise web.HTTPBadRequest(text=f"{name}={request.query[name]} is not allowed: a number of at least 0")
    return number


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: 0 (a free one) to {MAX_PORT}")
    return port


def pictures(run: Path) -> list[Path]:
    """What an image job has drawn, the latest last."""
    return sorted(run.glob("*.png"), key=lambda path: path.stat().st_mtime)[-MAX_PICTURES:]


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
        own = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
        policy = f"default-src 'none'; img-src 'self' data:; connect-src 'self'; {own}"
        headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def now(request: web.Request) -> web.Response:
        state.look()
        window_s, back_s = _number(request, "window", WINDOW_S), _number(request, "back", 0.0)
        step = int(_number(request, "step", -1.0))
        shown = state.shown | {"why": state.why(step if step >= 0 else None)}
        shown |= {"lanes": state.lanes.svg(max(MIN_WINDOW_S, window_s), back_s, state.drawn_s)}
        return web.json_response(shown, headers={"Cache-Control": "no-store"})

    async def picture(request: web.Request) -> web.FileResponse:
        name = request.query.get("name", "")
        found = next((path for path in pictures(state.run) if path.name == name), None)
        if found is None:
            raise web.HTTPNotFound(text=f"the run has no picture {name!r}")
        return web.FileResponse(found, headers={"Cache-Control": "no-store"})

    async def prompt(request: web.Request) -> web.Response:
        uid = request.query.get("uid", "")
        if not uid:
            raise web.HTTPBadRequest(text="uid is missing")
        found = await asyncio.to_thread(prompt_view, state.run, uid)
        return web.json_response(found, headers={"Cache-Control": "no-store"})

    app = web.Application(middlewares=[with_token])
    app.add_routes([web.get("/", page), web.get("/state", now), web.get("/prompt", prompt)])
    app.add_routes([web.get("/picture", picture)])
    return app


def main(words: list[str] | None = None) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m partial_rollout.view", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--port", type=_port, default=0, help="of this machine (a free one)")
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
