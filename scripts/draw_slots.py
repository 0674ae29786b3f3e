"""Draw the documents' pictures of slots over time. They explain; they are computed from invented lengths.

    python -m scripts.draw_slots    # writes docs/img/explain_*.png

One row is one trajectory slot. One bar is one response. A response is drawn in the colour of the batch of prompts that
it came with, so a bar that goes on in the next step keeps its colour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUT = Path(__file__).resolve().parents[1] / "docs/img"
SLOTS = 8
LENGTHS = (3.0, 4.2, 2.4, 8.6, 3.3, 2.1, 4.4, 3.1, 6.2, 2.7, 3.7, 2.9, 9.6, 2.2, 3.4, 4.1, 2.6, 6.6, 3.2, 4.3)
"""Decode time of each response, in the order in which prompts come; one in five is long."""
TRAINING = 2.0
"""Time from the end of a rollout to the next one: log-probs, update, weights."""
PREFILL = 0.7
"""Time to compute an interrupted response's context again."""
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b", "#79706e")
AGAIN, TRAINED = "#222222", "#e8e8e8"


@dataclass
class Response:
    """One response on its way: the batch of prompts that it came with, and what is left of it."""

    batch: int
    left: float


@dataclass
class Timeline:
    """What happened so far: bars (slot, from, to, batch), pieces computed again, and training phases."""

    bars: list[tuple[int, float, float, int]] = field(default_factory=list)
    again: list[tuple[int, float, float]] = field(default_factory=list)
    training: list[tuple[float, float]] = field(default_factory=list)


def simulate(steps: int, *, batches: int, prefill: float = 0.0) -> Timeline:
    """Policies `wait` (one batch in flight) and `partial` (more): a step ends when `SLOTS` responses are complete.

    Args:
        steps: training steps.
        batches: batches of prompts in flight.
        prefill: time that an interrupted response needs before it goes on.
    """
    line, now, come = Timeline(), 0.0, 0
    waiting: list[Response] = []
    slots: list[Response | None] = [None] * SLOTS
    for _ in range(steps):
        for _ in range(batches * SLOTS - len(waiting) - sum(item is not None for item in slots)):
            waiting.append(Response(come // SLOTS, LENGTHS[come % len(LENGTHS)]))
            come += 1
        ready = [now + prefill * (item is not None) for item in slots]
        line.again += [(place, now, end) for place, end in enumerate(ready) if end > now]
        now = _roll_out(line, slots, waiting, ready)
        line.training.append((now, now + TRAINING))
        now += TRAINING
    return line


def _roll_out(line: Timeline, slots: list[Response | None], waiting: list[Response], ready: list[float]) -> float:
    """Generate until `SLOTS` responses are complete, and return when that is; slot i runs from `ready[i]` on."""
    for _ in range(SLOTS):
        for place, item in enumerate(slots):
            if item is None and waiting:
                slots[place] = waiting.pop(0)
        end, done = min((ready[place] + item.left, place) for place, item in enumerate(slots) if item is not None)
        line.bars.append((done, ready[done], end, slots[done].batch))
        slots[done], ready[done] = None, end
    for place, item in enumerate(slots):
        if item is not None and end > ready[place]:
            line.bars.append((place, ready[place], end, item.batch))
            item.left -= end - ready[place]
    return end


def reorder(steps: int, *, generated: int, prefill: float) -> Timeline:
    """Policy `reorder`: more responses are generated than trained; a full batch of unfinished ones gets a step."""
    line, now, come = Timeline(), 0.0, 0
    deferred: list[Response] = []
    for _ in range(steps):
        if len(deferred) >= SLOTS:
            slots, deferred = [*deferred[:SLOTS]], deferred[SLOTS:]
            line.again += [(place, now, now + prefill) for place in range(SLOTS)]
            ready = [now + prefill] * SLOTS
        else:
            slots = [Response(come // SLOTS, LENGTHS[(come + k) % len(LENGTHS)]) for k in range(generated)]
            come, ready = come + generated, [now] * generated
        now = _roll_out(line, slots, [], ready)
        deferred += [item for item in slots if item is not None]
        line.training.append((now, now + TRAINING))
        now += TRAINING
    return line


def draw(axes: Axes, line: Timeline, title: str) -> None:
    """One panel: bars by slot, training in grey, the number of each step above it."""
    rows = 1 + max(slot for slot, *_ in line.bars)
    for number, (start, end) in enumerate(line.training, start=1):
        axes.axvspan(start, end, color=TRAINED, zorder=0)
        name = f"step {number}" if number == 1 else f"{number}"
        axes.text((start + end) / 2, rows - 0.35, name, ha="center", va="bottom", fontsize=8, color="#555555")
    for slot, start, end, batch in line.bars:
        colour = COLOURS[batch % len(COLOURS)]
        axes.barh(slot, end - start, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.8)
    for slot, start, end in line.again:
        axes.barh(slot, end - start, left=start, height=0.8, color=AGAIN)
    axes.set_title(title, fontsize=10, loc="left", pad=14)
    axes.set_ylabel("slot", fontsize=9)
    axes.set_yticks([])
    axes.set_ylim(-0.6, rows - 0.4)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def name_interruption(axes: Axes, line: Timeline) -> None:
    """Write into the bars of the longest response that lives through the first training what happens to it."""
    begun, trained = line.training[0]
    goes_on = {(slot, batch) for slot, start, _, batch in line.bars if start == trained}
    bars = [bar for bar in line.bars if bar[2] == begun and (bar[0], bar[3]) in goes_on]
    slot = min(bars, key=lambda bar: bar[1])[0]
    axes.text(begun - 0.1, slot, "interrupted", ha="right", va="center", fontsize=8, color="white")
    axes.text(trained + 0.1, slot, "goes on", ha="left", va="center", fontsize=8, color="white")


def picture(name: str, panels: list[tuple[str, Timeline]], legend: list[Patch], interrupted: int | None = None) -> None:
    """Panels one below the other on one time axis, saved as docs/img/explain_NAME.png.

    In the panel `interrupted` one interruption is named.
    """
    figure, all_axes = plt.subplots(
        len(panels), 1, figsize=(9, 2.15 * len(panels) + 0.5), sharex=True, layout="constrained", squeeze=False
    )
    for (title, line), axes in zip(panels, all_axes[:, 0], strict=True):
        draw(axes, line, title)
    if interrupted is not None:
        name_interruption(all_axes[interrupted, 0], panels[interrupted][1])
    last = all_axes[-1, 0]
    last.set_xlabel("time; lengths of responses are invented", fontsize=9)
    last.set_xticks([])
    last.set_xlim(0, max(line.training[-1][1] for _, line in panels))
    figure.legend(handles=legend, loc="outside lower center", ncol=2, fontsize=8, frameon=False)
    figure.savefig(OUT / f"explain_{name}.png", dpi=110)
    plt.close(figure)


def main() -> None:
    """Draw all of them."""
    response = Patch(color=COLOURS[0], label="a response; one colour for each batch of prompts")
    training = Patch(color=TRAINED, label="training and weight update; nothing is generated")
    again = Patch(color=AGAIN, label="tokens computed again after an interruption")
    wait = simulate(3, batches=1)
    abort = simulate(5, batches=2, prefill=PREFILL)
    kept = simulate(5, batches=2)
    short_and_long = reorder(5, generated=10, prefill=PREFILL)
    picture(
        "partial_rollout",
        [
            ("Synchronous: a step waits for its longest response while most slots are empty", wait),
            ("Partial rollout: long responses are interrupted and go on in the next step", kept),
        ],
        [response, training],
        interrupted=1,
    )
    picture(
        "modes",
        [
            ("wait: the step waits for every response of its batch", wait),
            ("partial with abort: an interrupted response computes its context again", abort),
            ("partial with reuse_kv: an interrupted response finds its KV again and goes on at once", kept),
            ("reorder: 10 responses start, 8 are trained; what is left behind fills step 5", short_and_long),
        ],
        [response, training, again],
    )


if __name__ == "__main__":
    main()
