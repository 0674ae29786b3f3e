"""What the engines did, slot by slot, from the segments of a run's event stream; the last minutes drawn as SVG."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from partial_rollout.observability.charts import COLOURS, add, make_svg, text
from partial_rollout.observability.events import (
    TOKENS,
    AnyEvent,
    CommandEnded,
    GateMoved,
    PhaseBegan,
    RequestSent,
    SegmentEnded,
    StageBegan,
    StepEnded,
    TrajectoryEnded,
    WeightsUpdated,
)
from partial_rollout.observability.record import INTERRUPTED
from partial_rollout.observability.step_line import STEP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

WINDOW_S = 120.0
"""Seconds that the lanes show, unless asked for others."""
TICKS = 6
MAX_SEGMENTS = 4000
"""Segments that are kept; with 512 slots some eight a slot."""
MAX_PROMPTS = 20_000
"""Prompts whose row of the data set is remembered; twice what a run of the largest size has in flight."""
WIDTH, LABEL, ROW, GAP, TOP = 1120, 90, 5, 18, 42
LINE = 13
"""From one line of a lane's label to the next."""
MAX_ROWS = 64
"""Slots of an engine that are drawn; requests in further ones are counted in the label."""
RUNNING = "running"
"""What a request that has not ended says of its end."""
NOWHERE = "no engine yet"
"""The lane of requests that wait until the load balancer names their engine."""
ENGINE = "engine"
"""The phase of a trajectory that waits for an engine."""
SILENT_S = 10.0
"""An engine with requests, of which none has begun or ended for longer, says so beside its lane."""
STEP_WIDTH = 24
"""From the number of one step above the lanes to the next; steps between them have none."""
GREY = "#777777"
VERSION_COLOURS = tuple(colour for colour in COLOURS if colour != GREY)
"""Without grey, which says that the gate was closed."""
GATE_COLOUR, DRAIN_COLOUR, UPDATE_COLOUR = "#999999", "#cc0000", "#6a3d9a"


@dataclass(frozen=True, slots=True)
class Bar:
    """A request in an engine, without its wait at the gate."""

    server: str
    start_s: float
    end_s: float
    version: int
    tokens: int
    uid: str
    session: int
    row: str
    reused_tokens: int
    prompt_tokens: int
    reason: str
    unit: str = TOKENS

    @property
    def label(self) -> str:
        """Which trajectory it is of."""
        return f"{f'row {self.row}' if self.row else f'prompt {self.uid}'}, trajectory {self.session}"

    @property
    def interrupted(self) -> bool:
        """Whether the trajectory goes on in another request."""
        return self.reason == INTERRUPTED


class Lanes:
    """Keeps the latest segments and the times in which the gate was closed."""

    def __init__(self, max_segments: int | None = MAX_SEGMENTS) -> None:
        """`max_segments`: how many are kept; None: all of them."""
        self.bars: deque[Bar] = deque(maxlen=max_segments)
        self.closed: deque[tuple[float, float | None]] = deque(maxlen=max_segments)
        """From when to when; None: it is closed now."""
        self.drains: deque[tuple[float, float]] = deque(maxlen=max_segments)
        self.updates: deque[tuple[float, float, int]] = deque(maxlen=max_segments)
        """From when to when, and the version of the weights that came."""
        self.steps: deque[tuple[float, int, float | None]] = deque(maxlen=max_segments)
        """When steps have ended, their numbers, and of the first of a start when it began."""
        self._has_steps = False
        """Whether this start has ended a step."""
        self._running: dict[tuple[str, int], float] = {}
        """Since when trajectories have waited for an engine, the gate included."""
        self._sent: dict[tuple[str, int], str] = {}
        """Engines that these trajectories' requests went to."""
        self._opened: dict[int, float] = {}
        """When the gate was first opened for a weight version."""
        self._rows: dict[str, str] = {}
        """Row of the data set by uid, of the prompts that moved last."""
        self.now_s = 0.0
        """Time of the latest event."""

    def add(self, event: AnyEvent) -> None:
        """Take in one event."""
        self.now_s = max(self.now_s, event.t)
        match event:
            case SegmentEnded():
                self._end_request(event)
            case GateMoved(is_open=False):
                self.closed.append((event.t - event.seconds, None))
                self.drains.append((event.t - event.seconds, event.t))
            case WeightsUpdated():
                self.updates.append((event.t - event.seconds, event.t, event.version))
            case GateMoved():
                self._end_closed(event.t)
                self._opened.setdefault(event.version, event.t)
                if len(self._opened) > MAX_SEGMENTS:
                    del self._opened[next(iter(self._opened))]
            case StepEnded():
                first = None if self._has_steps else event.t - (event.metrics.get(STEP_SECONDS) or 0.0)
                self.steps.append((event.t, event.step, first))
                self._has_steps = True
            case CommandEnded() | StageBegan(number=1):
                self._has_steps = False
                self._end_closed(event.t)
                self._opened.clear()
                self._running.clear()
                self._sent.clear()
            case RequestSent():
                key = (event.uid, event.session)
                self._running[key], self._sent[key] = event.t, event.server
            case PhaseBegan():
                self._begin_phase(event)
            case TrajectoryEnded():
                self._leave((event.uid, event.session))
            case _:
                pass

    def running(self, now_s: float | None = None) -> list[Bar]:
        """Requests that are in an engine now, by default at the latest event."""
        since = [(key, self._in_engine_since(since_s)) for key, since_s in self._running.items()]
        last_s = self.closed[-1][0] if self.is_closed else self.now_s if now_s is None else now_s
        version = max(self._opened, default=0)
        return [
            Bar(
                server=self._sent.get((uid, session), NOWHERE),
                start_s=since_s,
                end_s=last_s,
                version=version,
                tokens=0,
                uid=uid,
                session=session,
                row=self._rows.get(uid, ""),
                reused_tokens=0,
                prompt_tokens=0,
                reason=RUNNING,
            )
            for (uid, session), since_s in since
            if since_s is not None and since_s < last_s
        ]

    @property
    def is_closed(self) -> bool:
        """Whether the gate is closed, so that no request runs."""
        return bool(self.closed) and self.closed[-1][1] is None

    def _in_engine_since(self, asked_s: float) -> float | None:
        """Since when a request that was made at `asked_s` is in its engine; None: the request waits at the gate."""
        for closed_s, opened_s in reversed(self.closed):
            if opened_s is not None and opened_s <= asked_s:
                break
            if closed_s <= asked_s:
                return opened_s
        return asked_s

    def _begin_phase(self, event: PhaseBegan) -> None:
        key = (event.uid, event.session)
        if event.phase == ENGINE:
            self._running[key] = event.t
        else:
            self._leave(key)
        if event.row:
            self._rows.pop(event.uid, None)
            self._rows[event.uid] = event.row
            if len(self._rows) > MAX_PROMPTS:
                del self._rows[next(iter(self._rows))]

    def _end_request(self, event: SegmentEnded) -> None:
        key = (event.uid, event.session)
        self._sent.pop(key, None)
        if key in self._running:
            self._running[key] = event.t
        if (bar := self._bar(event)) is not None:
            self.bars.append(bar)

    def _leave(self, key: tuple[str, int]) -> None:
        self._running.pop(key, None)
        self._sent.pop(key, None)

    def _end_closed(self, at_s: float) -> None:
        if self.is_closed:
            self.closed[-1] = (self.closed[-1][0], at_s)

    def _bar(self, event: SegmentEnded) -> Bar | None:
        """The bar of a segment; None: the request was refused at the gate."""
        start_s = self._entered_s(event.t - event.seconds, event.version)
        if start_s is None or start_s >= event.t:
            return None
        return Bar(
            server=event.server,
            start_s=start_s,
            end_s=event.t,
            version=event.version,
            tokens=event.tokens,
            uid=event.uid,
            session=event.session,
            row=self._rows.get(event.uid, ""),
            reused_tokens=event.reused_tokens,
            prompt_tokens=event.prompt_tokens,
            reason=event.reason,
            unit=event.unit,
        )

    def _entered_s(self, asked_s: float, version: int) -> float | None:
        """When a request that was made at `asked_s` passed the gate; None: the gate has not been opened since.

        A request that was on its way when the gate closed has none but the weights that the next opening brought.
        """
        return self._in_engine_since(max(asked_s, self._opened.get(version, asked_s)))

    def svg(self, window_s: float = WINDOW_S, back_s: float = 0.0, now_s: float | None = None) -> str:
        """The `window_s` seconds that end `back_s` before now; empty if no request ran in them.

        `now_s` is by default the latest event's time: in a run that goes on, one that hangs tells no event.
        """
        return _Drawing(self, window_s, back_s, self.now_s if now_s is None else now_s).svg()


class _Drawing:
    """The lanes of some seconds as SVG."""

    def __init__(self, lanes: Lanes, window_s: float, back_s: float, now_s: float) -> None:
        self._lanes, self._window_s, self._now_s = lanes, window_s, now_s
        self._first_s, self._last_s = now_s - back_s - window_s, now_s - back_s

    def svg(self) -> str:
        known = [*self._lanes.bars, *self._lanes.running(self._now_s)]
        bars = [bar for bar in known if bar.end_s > self._first_s and bar.start_s < self._last_s]
        if not bars:
            return ""
        # All that are known, in every window: an engine keeps its number, and one that does nothing has an empty lane.
        known_of, bars_of = _by_server(known), _by_server(bars)
        servers = sorted(known_of, key=lambda server: (server == NOWHERE, server))
        slots = {server: packed(bars_of.get(server, ())) for server in servers}
        labels = {
            server: self._label(server, number, known_of[server], slots[server])
            for number, server in enumerate(servers, 1)
        }
        heights = {
            server: max(ROW * min(MAX_ROWS, max(slots[server].values(), default=0) + 1), LINE * len(labels[server]))
            for server in servers
        }
        height = TOP + sum(heights.values()) + GAP * len(servers) + 14
        title = f"requests in the engines, {self._window_s:.0f} s, a colour for each weight version, pale: not ended"
        svg = make_svg(WIDTH, height, f"{title}; grey: gate closed, red: drain, violet: weight update")
        self._draw_bands(svg, height)
        self._draw_steps(svg, height)
        top = TOP
        for server in servers:
            for line, said in enumerate(labels[server]):
                text(svg, said, 8, top + 10 + LINE * line, "start")
                ElementTree.SubElement(svg[-1], "title").text = server
            for bar, slot in slots[server].items():
                if slot < MAX_ROWS:
                    self._draw_bar(svg, bar, top + ROW * slot)
            top += heights[server] + GAP
        for tick in range(TICKS + 1):
            at_s = self._first_s + self._window_s * tick / TICKS
            before_s = self._now_s - at_s
            text(svg, f"-{before_s:.0f} s" if before_s > 0.5 else "now", self._x(at_s), height - 3, "middle")
        return ElementTree.tostring(svg, encoding="unicode")

    def _label(self, server: str, number: int, own: Sequence[Bar], slots: Mapping[Bar, int]) -> list[str]:
        """Name of an engine; its requests now, and for how long none has begun or ended; bars not drawn."""
        now = [] if self._lanes.is_closed else [bar for bar in own if bar.reason == RUNNING]
        said = [NOWHERE if server == NOWHERE else f"engine {number}"]
        if now and self._last_s == self._now_s:
            quiet_s = self._now_s - max(bar.start_s if bar.reason == RUNNING else bar.end_s for bar in own)
            said += [f"{len(now)} {'waiting' if server == NOWHERE else 'running'}"] + (
                [f"silent {quiet_s:.0f} s"] if quiet_s >= SILENT_S else []
            )
        hidden = sum(slot >= MAX_ROWS for slot in slots.values())
        return said + ([f"{hidden} bars not drawn"] if hidden else [])

    def _draw_bands(self, svg: ElementTree.Element, height: float) -> None:
        lanes, now_s = self._lanes, self._now_s
        bands = [
            (start_s, end_s or now_s, GATE_COLOUR, f"gate closed for {(end_s or now_s) - start_s:.1f} s")
            for start_s, end_s in lanes.closed
        ]
        bands += [
            (start_s, end_s, DRAIN_COLOUR, f"drain of {end_s - start_s:.2f} s") for start_s, end_s in lanes.drains
        ]
        bands += [
            (start_s, end_s, UPDATE_COLOUR, f"weights {version} sent in {end_s - start_s:.2f} s")
            for start_s, end_s, version in lanes.updates
        ]
        for start_s, end_s, colour, what in bands:
            if end_s > self._first_s and start_s < self._last_s:
                left, right = self._x(start_s), self._x(end_s)
                band = add(svg, "rect", x=left, y=TOP, width=max(right - left, 1.5), height=height - TOP - 16)
                band.attrib |= {"fill": colour, "opacity": "0.25" if colour == GATE_COLOUR else "0.6"}
                ElementTree.SubElement(band, "title").text = what

    def _draw_steps(self, svg: ElementTree.Element, height: float) -> None:
        begun_s, told = self._first_s, -STEP_WIDTH
        for ended_s, number, first_s in self._lanes.steps:
            if first_s is not None:  # what was before it is no part of a step
                begun_s = max(begun_s, first_s)
                if self._first_s < first_s < self._last_s:
                    left = self._x(first_s)
                    add(svg, "line", x1=left, y1=TOP - 14, x2=left, y2=height - 16, stroke=GATE_COLOUR)
            if ended_s > self._first_s and begun_s < self._last_s:
                left, right = self._x(begun_s), self._x(ended_s)
                add(svg, "line", x1=right, y1=TOP - 14, x2=right, y2=height - 16, stroke=GATE_COLOUR)
                if (middle := (left + right) / 2) >= told + STEP_WIDTH:
                    told = middle
                    text(svg, str(number), middle, TOP - 4, "middle")
            begun_s = ended_s
        text(svg, "step" if told > 0 else "", 8, TOP - 4, "start")

    def _draw_bar(self, svg: ElementTree.Element, bar: Bar, top: float) -> None:
        left = self._x(bar.start_s)
        box = add(svg, "rect", x=left, y=top, width=max(self._x(bar.end_s) - left, 0.5), height=ROW - 1)
        box.attrib |= {"fill": VERSION_COLOURS[bar.version % len(VERSION_COLOURS)], "data-uid": bar.uid}
        end = "interrupted" if bar.interrupted else "ended"
        took = f"{bar.tokens} {bar.unit} in {bar.end_s - bar.start_s:.1f} s"
        if bar.reason == RUNNING:
            end, took = "has not ended", f"for {bar.end_s - bar.start_s:.1f} s"
            box.attrib |= {"fill-opacity": "0.35"}
        ElementTree.SubElement(box, "title").text = f"{bar.label}: {took}, weights {bar.version}, {end}"

    def _x(self, at_s: float) -> float:
        inside_s = min(max(at_s, self._first_s), self._last_s)
        return LABEL + (WIDTH - LABEL - 20) * (inside_s - self._first_s) / self._window_s


def _by_server(bars: Iterable[Bar]) -> dict[str, list[Bar]]:
    found: dict[str, list[Bar]] = {}
    for bar in bars:
        found.setdefault(bar.server, []).append(bar)
    return found


def packed(bars: Iterable[Bar]) -> dict[Bar, int]:
    """A slot for each bar such that no two of a slot overlap: the first one that is free when the bar begins."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    slots: dict[Bar, int] = {}
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        while busy and busy[0][0] <= bar.start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        # All slots so far are busy if none is free.
        slots[bar] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (bar.end_s, slots[bar]))
    return slots
