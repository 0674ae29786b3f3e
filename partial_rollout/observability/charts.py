"""Line and bar charts as SVG, which a page holds without a script and without the network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777", "#b0a000")
"""Told apart by colour-blind people too (Okabe and Ito)."""
WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 48, 34
MAX_POINTS = 500
"""Points of a line; a line with more is thinned out by means."""
MAX_TICKS = 6
BAR_TOP, BAR_HEIGHT, LABEL_WIDTH = 30, 26, 190


@dataclass(frozen=True, slots=True)
class Line:
    """One run's values against its steps."""

    name: str
    colour: str
    steps: Sequence[float]
    values: Sequence[float]
    window: int = 1
    """Steps of a running mean; above 1 the band around it is one standard deviation of them to either side."""


def line_chart(title: str, lines: Sequence[Line]) -> str:
    """Lines over steps, from 0 upwards where no value is negative; of a single one the last value as a number too."""
    drawn = [(line, *_smoothed(line)) for line in lines if line.values]
    lows = [low for _, _, _, band in drawn for low, _ in band]
    highs = [high for _, _, _, band in drawn for _, high in band]
    if not lows:
        return ""
    bottom = 0.0 if min(lows) >= 0 else min(lows)
    top = max(highs) if max(highs) > bottom else bottom + 1.0
    first, last = min(steps[0] for _, steps, _, _ in drawn), max(steps[-1] for _, steps, _, _ in drawn)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - bottom) / (top - bottom)

    svg = make_svg(WIDTH, HEIGHT, title)
    for value in _ticks(bottom, top):
        add(svg, "line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), **{"class": "grid"})
        text(svg, _short(value), LEFT - 6, y(value) + 4, "end")
    for step in _ticks(first, last):
        text(svg, _short(step), x(step), HEIGHT - BOTTOM + 16, "middle")
    text(svg, "step", WIDTH - RIGHT, HEIGHT - 4, "end")
    for line, steps, means, band in drawn:
        if line.window > 1:
            edge = [(x(s), y(low)) for s, (low, _) in zip(steps, band, strict=True)]
            edge += [(x(s), y(high)) for s, (_, high) in reversed(list(zip(steps, band, strict=True)))]
            add(svg, "polygon", points=_points(edge), fill=line.colour, opacity="0.15")
        path = [(x(s), y(mean)) for s, mean in zip(steps, means, strict=True)]
        drawn_line = add(
            svg, "polyline", points=_points(path), fill="none", stroke=line.colour, **{"stroke-width": "1.8"}
        )
        ElementTree.SubElement(drawn_line, "title").text = line.name
    _legend(svg, [line for line, *_ in drawn])
    return ElementTree.tostring(svg, encoding="unicode")


def bar_chart(title: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """One bar for each run, made of its parts; the same part has the same colour in all bars."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    longest = max((sum(bar.values()) for bar in bars.values()), default=0.0)
    if not longest:
        return ""
    columns = 3
    height = BAR_TOP + BAR_HEIGHT * len(bars) + 20 * math.ceil(len(parts) / columns) + 10
    svg = make_svg(WIDTH, height, title)
    for row, (name, bar) in enumerate(bars.items()):
        left, top = float(LABEL_WIDTH), BAR_TOP + BAR_HEIGHT * row
        text(svg, _cut(name, 28), LABEL_WIDTH - 8, top + 15, "end")
        for index, part in enumerate(parts):
            width = (WIDTH - LABEL_WIDTH - 50) * bar.get(part, 0.0) / longest
            box = add(
                svg, "rect", x=left, y=top, width=width, height=BAR_HEIGHT - 6, fill=COLOURS[index % len(COLOURS)]
            )
            ElementTree.SubElement(box, "title").text = f"{name}: {part} {bar.get(part, 0.0):.3g}"
            left += width
        text(svg, f"{sum(bar.values()):.3g}", left + 5, top + 15, "start")
    for index, part in enumerate(parts):
        left = 10 + (WIDTH - 10) / columns * (index % columns)
        top = BAR_TOP + BAR_HEIGHT * len(bars) + 6 + 20 * (index // columns)
        add(svg, "rect", x=left, y=top, width=11, height=11, fill=COLOURS[index % len(COLOURS)])
        text(svg, part, left + 16, top + 10, "start")
    return ElementTree.tostring(svg, encoding="unicode")


def _smoothed(line: Line) -> tuple[list[float], list[float], list[tuple[float, float]]]:
    """Steps, running means and bands, at most `MAX_POINTS` of each."""
    moments = list(_running(line.values, line.window))
    every = max(1, math.ceil(len(moments) / MAX_POINTS))
    starts = range(0, len(moments), every)
    steps = [float(line.steps[start]) for start in starts]
    means = [_mean([mean for mean, _ in moments[start : start + every]]) for start in starts]
    widths = [_mean([width for _, width in moments[start : start + every]]) for start in starts]
    return steps, means, [(mean - width, mean + width) for mean, width in zip(means, widths, strict=True)]


def _running(values: Sequence[float], window: int) -> Iterator[tuple[float, float]]:
    """Mean and standard deviation of the last `window` values, at each of them."""
    for end in range(1, len(values) + 1):
        last = values[max(0, end - window) : end]
        mean = _mean(last)
        yield mean, math.sqrt(_mean([(value - mean) ** 2 for value in last])) if window > 1 else 0.0


def _mean(values: Sequence[float]) -> float:
    """Mean; `statistics.fmean` takes ten times as long for a few values."""
    return sum(values) / len(values)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two bounds."""
    raw = (high - low) / MAX_TICKS or 1.0
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def make_svg(width: float, height: float, title: str) -> ElementTree.Element:
    """An empty drawing with its title."""
    box = f"0 0 {width:g} {height:g}"
    svg = ElementTree.Element("svg", {"viewBox": box, "role": "img", "aria-label": title})
    text(svg, title, 10, 16, "start", **{"class": "title"})
    return svg


def add(parent: ElementTree.Element, tag: str, **attributes: float | str) -> ElementTree.Element:
    """Add a shape to a drawing."""
    texts = {name: value if isinstance(value, str) else f"{value:.1f}" for name, value in attributes.items()}
    return ElementTree.SubElement(parent, tag, texts)


def text(parent: ElementTree.Element, content: str, x: float, y: float, anchor: str, **more: str) -> None:
    """Write into a drawing; `anchor` is `start`, `middle` or `end`."""
    add(parent, "text", x=x, y=y, **{"text-anchor": anchor}, **more).text = content


def _legend(svg: ElementTree.Element, lines: Sequence[Line]) -> None:
    """Between title and lines; a chart of one run needs no names."""
    if len(lines) < 2:
        values, window = lines[0].values, lines[0].window
        said = f"last step: {_short(values[-1])}"
        if window > 1:  # the line ends elsewhere
            last = values[-window:]
            said += f", mean of the last {len(last)}: {_short(_mean(last))}"
        text(svg, said, WIDTH - RIGHT, 35, "end")
        return
    width = (WIDTH - 10) / len(lines)
    for index, line in enumerate(lines):
        left = 10 + width * index
        add(svg, "rect", x=left, y=25, width=11, height=11, fill=line.colour)
        text(svg, _cut(line.name, int(width / 6.5) - 3), left + 16, 35, "start")


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: max(1, limit - 1)]}…"
