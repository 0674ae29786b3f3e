"""What the engines did, slot by slot, from the segments of a run's event stream; the last minutes drawn as SVG."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from partial_rollout.observability.charts import COLOURS, add, make_svg, text
from partial_rollout.observability.events import (
    AnyEvent,
    CommandEnded,
    GateMoved,
    PhaseBegan,
    SegmentEnded,
    StageBegan,
)
from partial_rollout.observability.record import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Iterable

WINDOW_S = 120.0
"""Seconds that the lanes show."""
MAX_SEGMENTS = 4000
"""That are kept; with 512 slots some eight a slot."""
MAX_PROMPTS = 20_000
"""Whose row of the data set is remembered; twice what a run of the largest size has in flight."""
WIDTH, LABEL, ROW, GAP, TOP = 1120, 90, 5, 18, 26
MAX_ROWS = 64
"""Slots of an engine that are drawn; what runs beyond them is counted in the label."""
GATE_COLOUR = "#999999"


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
        self._rows: dict[str, str] = {}
        """Row of the data set by uid, of the prompts that moved last."""
        self.now_s = 0.0
        """Time of the latest event."""

    def add(self, event: AnyEvent) -> None:
        """Take in one event."""
        self.now_s = max(self.now_s, event.t)
        match event:
            case SegmentEnded():
                if (bar := self._bar(event)) is not None:
                    self.bars.append(bar)
            case GateMoved(is_open=False):
                self.closed.append((event.t - event.seconds, None))
            case GateMoved() | CommandEnded() | StageBegan(number=1) if self.closed and self.closed[-1][1] is None:
                self.closed[-1] = (self.closed[-1][0], event.t)
            case PhaseBegan(row=row) if row:
                self._rows.pop(event.uid, None)
                self._rows[event.uid] = row
                if len(self._rows) > MAX_PROMPTS:
                    del self._rows[next(iter(self._rows))]
            case _:
                pass

    def _bar(self, event: SegmentEnded) -> Bar | None:
        """None: it was refused at the gate."""
        start_s = self._entered_s(event.t - event.seconds)
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
        )

    def _entered_s(self, asked_s: float) -> float | None:
        """When a request that was made at `asked_s` passed the gate; None: the gate has not been opened since."""
        for closed_s, opened_s in reversed(self.closed):
            if opened_s is not None and opened_s <= asked_s:
                break
            if closed_s <= asked_s:
                return opened_s
        return asked_s

    def svg(self) -> str:
        """The last `WINDOW_S` before the latest event; empty if no request ended in them."""
        first_s = self.now_s - WINDOW_S
        bars = [bar for bar in self.bars if bar.end_s > first_s]
        if not bars:
            return ""
        servers = sorted({bar.server for bar in bars})
        slots = {server: packed([bar for bar in bars if bar.server == server]) for server in servers}
        heights = {server: ROW * min(MAX_ROWS, max(slots[server].values()) + 1) for server in servers}
        height = TOP + sum(heights.values()) + GAP * len(servers) + 14
        svg = make_svg(WIDTH, height, f"requests in the engines, the last {WINDOW_S:.0f} s, coloured by weight version")
        self._draw_bands(svg, first_s, height)
        top = TOP
        for server in servers:
            text(svg, _short(server), 8, top + 10, "start")
            for bar, slot in slots[server].items():
                if slot < MAX_ROWS:
                    self._draw_bar(svg, bar, top + ROW * slot, first_s)
            top += heights[server] + GAP
        for seconds in range(0, int(WINDOW_S) + 1, 20):
            left = self._x(self.now_s - seconds, first_s)
            text(svg, f"-{seconds} s" if seconds else "now", left, height - 3, "middle")
        return ElementTree.tostring(svg, encoding="unicode")

    def _draw_bands(self, svg: ElementTree.Element, first_s: float, height: float) -> None:
        for start_s, end_s in self.closed:
            left, right = self._x(start_s, first_s), self._x(end_s or self.now_s, first_s)
            if right > LABEL:
                left = max(left, LABEL)
                band = add(svg, "rect", x=left, y=TOP, width=max(right - left, 1), height=height - TOP - 16)
                band.attrib |= {"fill": GATE_COLOUR, "opacity": "0.25"}
                ElementTree.SubElement(band, "title").text = f"gate closed for {(end_s or self.now_s) - start_s:.1f} s"

    def _draw_bar(self, svg: ElementTree.Element, bar: Bar, top: float, first_s: float) -> None:
        left = max(self._x(bar.start_s, first_s), LABEL)
        box = add(svg, "rect", x=left, y=top, width=max(self._x(bar.end_s, first_s) - left, 0.5), height=ROW - 1)
        box.attrib["fill"] = COLOURS[bar.version % len(COLOURS)]
        end = "interrupted" if bar.interrupted else "ended"
        ElementTree.SubElement(
            box, "title"
        ).text = f"{bar.label}: {bar.tokens} tokens in {bar.end_s - bar.start_s:.1f} s, weights {bar.version}, {end}"

    @staticmethod
    def _x(at_s: float, first_s: float) -> float:
        return LABEL + (WIDTH - LABEL - 20) * (at_s - first_s) / WINDOW_S


def packed(bars: Iterable[Bar]) -> dict[Bar, int]:
    """A slot for each bar such that no two of a slot overlap: the first one that is free when the bar begins."""
    free_s: list[float] = []
    slots: dict[Bar, int] = {}
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        slot = next((index for index, end_s in enumerate(free_s) if end_s <= bar.start_s), len(free_s))
        if slot == len(free_s):
            free_s.append(0.0)
        free_s[slot], slots[bar] = bar.end_s, slot
    return slots


def _short(server: str) -> str:
    return server if len(server) <= 14 else f"…{server[-13:]}"
