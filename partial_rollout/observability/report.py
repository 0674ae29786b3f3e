"""A run, or several side by side, as one HTML file: no script, nothing from the network."""

from __future__ import annotations

import logging
import os
from itertools import cycle
from typing import TYPE_CHECKING

import jinja2

from partial_rollout.errors import DataError
from partial_rollout.observability.advice import change, next_step, would_help
from partial_rollout.observability.charts import COLOURS, Line, bar_chart, line_chart
from partial_rollout.observability.comparison import (
    SKIP,
    compare,
    counted_steps,
    lost_in_all,
    lost_seconds,
    part_names,
    table,
    verdict,
)
from partial_rollout.observability.gpu_seconds import LOST, MEANS, THROUGHPUT, gpu_seconds, lost
from partial_rollout.observability.record import first_steps, load
from partial_rollout.observability.step_line import NUM_TOKENS, PREFIX, REWARD, STEP_SECONDS
from partial_rollout.observability.suggestions import suggestion
from partial_rollout.observability.summary import LABEL_WIDTH, WINDOW, summary_lines
from partial_rollout.observability.why import LONGEST_RESPONSE, PENDING, pending_at_end

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from partial_rollout.observability.record import RunRecord

logger = logging.getLogger(__name__)

CHARTS = {
    REWARD: (f"reward, mean of {WINDOW} steps and its spread", WINDOW),
    STEP_SECONDS: ("seconds a step", 1),
    "timing_s/gen": ("seconds of generation a step", 1),
    f"{PREFIX}/slot_utilisation": ("slots in use while engines generate, of those at the start", 1),
    f"{PREFIX}/staleness_steps/mean": ("staleness of the batch, steps", 1),
    f"{PREFIX}/reprefilled_tokens": ("tokens computed again a step", 1),
    f"{PREFIX}/kv_usage": ("KV cache in use when the batch is complete, fullest engine", 1),
    THROUGHPUT: ("trained tokens/s of a GPU", 1),
    "response_length/mean": ("response length, tokens", 1),
    PENDING: ("prompts pending at the end of a step", 1),
}
"""By metric: title of the chart, and steps of a running mean."""
MAX_MESSAGES = 100
MESSAGE_HEAD = ("kind", "text", "", "what to change")
REPORT = "report.html"
"""In a run's folder."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --line: #d8d8d8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181b; --line: #3a3d42; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2em auto;
       max-width: 1180px; padding: 0 1em; }
h1 { font-size: 1.4em } h2 { font-size: 1.15em; margin-top: 2em } h3 { font-size: 1em }
table { border-collapse: collapse } td, th { text-align: left; padding: .2em 1em .2em 0; vertical-align: top;
       border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums }
.scroll { overflow-x: auto } .charts { display: flex; flex-wrap: wrap; gap: 1em }
figure { margin: 0; flex: 1 1 460px; max-width: 580px } svg { width: 100%; height: auto }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink) } svg .title { font-weight: 600; font-size: 12.5px }
svg .grid { stroke: var(--line) } .verdict { font-size: 1.1em }
@media (max-width: 760px) { table { display: block; overflow-x: auto } }
"""


def is_shown(metric: str) -> bool:
    """Whether a page shows a metric or something that is computed from it."""
    return (
        metric in CHARTS
        or metric in (NUM_TOKENS, THROUGHPUT, LONGEST_RESPONSE)
        or metric.startswith(("timing_s/", f"{PREFIX}/"))
    )


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title><style>
{{ style|safe }}</style></head><body>
{% macro tables() %}{% for run in runs %}<h2>{{ run.name }}</h2>
<table>{% for label, text in run.summary %}<tr><th>{{ label }}</th><td>{{ text }}</td></tr>{% endfor %}
{% for label, text in run.helps %}<tr><th>{{ label }}?</th><td>{{ text }}</td></tr>{% endfor %}
{% if run.next %}<tr><th>next</th><td>{{ run.next }}</td></tr>{% endif %}</table>
{% if run.lost %}<h3>GPU seconds by cause</h3>
<table><tr><th>cause</th><th>GPU seconds</th><th>share</th><th></th><th>what it is</th></tr>
{% for row in run.lost %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>{% endif %}
{% if run.messages %}<h3>Warnings, errors and faults</h3>
<table><tr>{% for cell in message_head %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in run.messages %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>{% endif %}{% endfor %}{% endmacro %}
<h1>{{ title }}</h1>
{% if not rows %}{{ tables() }}{% endif %}
{% for line in verdicts %}<p class="verdict">{{ line }}</p>{% endfor %}
{% if rows %}<div class="scroll"><table>
{% for row in rows %}<tr>{% for cell in row %}{% if loop.first or loop.index0 and not row[0] %}<th>{{ cell }}</th>
{% else %}<td>{{ cell }}</td>{% endif %}{% endfor %}</tr>
{% endfor %}</table></div>{% endif %}
<div class="charts">{% for chart in charts %}<figure>{{ chart|safe }}</figure>{% endfor %}</div>
{% if rows %}{{ tables() }}{% endif %}
</body></html>
"""


def report_page(records: Sequence[RunRecord], skip: int = SKIP, first: int | None = None) -> str:
    """The page; several runs are compared with the first one, by their first `first` steps or by all of them.

    Raises:
        DataError: there are several runs, and one has too few steps to be compared.
    """
    counted = records if first is None else [first_steps(record, first) for record in records]
    compared = compare(counted, skip) if len(records) > 1 else []
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    return template.render(
        style=STYLE,
        message_head=MESSAGE_HEAD,
        title=" and ".join(record.name for record in records),
        verdicts=[verdict(run, compared[0]) for run in compared[1:]],
        rows=table(compared) if compared else [],
        charts=_charts(records, counted, skip),
        runs=[
            {
                "name": record.name,
                "summary": [(line[:LABEL_WIDTH].strip(), line[LABEL_WIDTH:].strip()) for line in summary_lines(record)],
                "next": next_step(record) if len(records) == 1 else change(record),
                "helps": would_help(record),
                "lost": lost_rows(record.series),
                "messages": message_rows(record),
            }
            for record in records
        ],
    )


def write_report(path: Path, records: Sequence[RunRecord], skip: int = SKIP, first: int | None = None) -> None:
    """Write the page, whole or not at all; of the runs' steps the first `first` are compared."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(report_page(records, skip, first), encoding="utf-8")
    os.replace(new, path)


def report_at_end(events: Path) -> None:
    """Write the page of a run that has ended beside its event stream; a page that cannot be written is a warning."""
    run = events.parent
    try:
        record = load(run if events.name == "events" else events)
        if record.steps:
            write_report(run / REPORT, [record])
    except (DataError, OSError) as error:
        logger.warning("the report of this run could not be written: %s", error)


def lost_rows(steps: Sequence[Mapping[str, float]]) -> list[tuple[str, str, str, str, str]]:
    """All steps of a run: cause, GPU seconds, share of all of them, whether they are lost, what it is; the lost sum."""
    causes = gpu_seconds(step for step in steps if STEP_SECONDS in step)
    whole = sum(causes.values())
    rows = [
        (cause, f"{seconds:,.1f}", f"{seconds / whole:.1%}", "lost" if cause in LOST else "", MEANS[cause])
        for cause, seconds in causes.items()
    ]
    return [*rows, ("lost in all", lost_in_all(causes, ",.1f"), f"{lost(causes) / whole:.1%}", "", "")] if rows else []


def _charts(records: Sequence[RunRecord], counted: Sequence[RunRecord], skip: int) -> list[str]:
    causes = {record.name: lost_seconds(counted_steps(record, skip)) for record in counted if _counts(record, skip)}
    parts = part_names(causes.values())
    bars = {name: {part: bar.get(part, 0.0) for part in parts} for name, bar in causes.items()}
    found = [bar_chart("GPU seconds by cause, for 10,000 trained tokens", bars), *step_charts(records)]
    return [chart for chart in found if chart]


def step_charts(records: Sequence[RunRecord]) -> list[str]:
    """A chart for each metric of `CHARTS` that a run has."""
    found = []
    for metric, (title, window) in CHARTS.items():
        lines = [_line(record, metric, window, colour) for record, colour in zip(records, cycle(COLOURS), strict=False)]
        found.append(line_chart(title, lines))
    return [chart for chart in found if chart]


def _line(record: RunRecord, metric: str, window: int, colour: str) -> Line:
    steps = [record.steps[number] for number in sorted(record.steps)]
    values = {step.step: pending_at_end(step) if metric == PENDING else step.metrics.get(metric) for step in steps}
    known = {number: value for number, value in values.items() if value is not None}
    return Line(record.name, colour, list(known), list(known.values()), window)


def _counts(record: RunRecord, skip: int) -> bool:
    steps = record.series[skip:]
    return len(steps) > 1 and STEP_SECONDS in steps[0] and NUM_TOKENS in steps[0]


def message_rows(record: RunRecord) -> list[tuple[str, str, str, str]]:
    """Faults, then warnings and errors: kind, text, number where it is above 1, what to change. Equal texts once."""
    rows = [
        ("fault", f"{fault.role} {fault.name} {fault.node}: {fault.text} {fault.action}") for fault in record.faults
    ]
    rows += [(warned.level, warned.text) for warned in record.warnings]
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        counts[row] = counts.get(row, 0) + 1
    shown = list(counts.items())[:MAX_MESSAGES]
    return [(kind, text, f"{count} times" if count > 1 else "", suggestion(text)) for (kind, text), count in shown]
