"""What a shell shows of a run while it goes on: stages, one line a step, every warning and error once."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from typing import TYPE_CHECKING, TextIO

from partial_rollout.observability.events import Choice, CommandEnded, Fault, StageBegan, StepEnded, Warned
from partial_rollout.observability.foreign import Message
from partial_rollout.observability.pipe import mute
from partial_rollout.observability.step_line import STEP_SECONDS, step_line
from partial_rollout.observability.summary import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from partial_rollout.observability.events import AnyEvent
    from partial_rollout.observability.record import RunRecord

CLEAR_LINE = "\r\x1b[2K"
DIM, RED, PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[0m"
MAX_CHARACTERS = 400
"""Characters of a message in a file; a terminal shows what fits into a line. The log has the whole text."""
LAST_STEPS = 5
"""Steps whose mean time says how long the rest will take."""


class Screen:
    """Lines that stay, and on a terminal a last line that is drawn again and again."""

    def __init__(self, out: TextIO) -> None:
        """`out` is a terminal, or a file, which gets plain lines only."""
        self._out = out
        self.is_terminal = out.isatty()
        self._bottom = ""
        self.reader_left = False
        """Whether nobody reads any more what is written, as after `| head`; from then on it goes nowhere."""

    def line(self, text: str, style: str = "") -> None:
        """Write a line that stays."""
        styled = f"{style}{text}{PLAIN}" if style and self.is_terminal else text
        self._write(f"{CLEAR_LINE if self._bottom else ''}{styled}\n{self._bottom}")

    def bottom(self, text: str) -> None:
        """Replace the last line of a terminal; a file does not get it."""
        if self.is_terminal and text != self._bottom:
            self._bottom = text[: self.width - 1]
            self._write(CLEAR_LINE + self._bottom)

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            self.reader_left = True
            mute(self._out)

    @property
    def width(self) -> int:
        """Characters of a line."""
        return shutil.get_terminal_size().columns if self.is_terminal else MAX_CHARACTERS


class LiveView:
    """Shows what is new of a run: `add` takes in events, `say` messages, `tick` brings the last line up to date."""

    def __init__(
        self,
        screen: Screen,
        record: RunRecord,
        usual_s: Mapping[str, tuple[float, float]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`usual_s` says for some stages how long they took in earlier runs, at least and at most."""
        self._screen, self._record, self._usual_s, self._clock = screen, record, usual_s, clock
        self._counts: Counter[str] = Counter()
        self._num_shown = 0
        self._stage: StageBegan | None = None

    def add(self, event: AnyEvent) -> None:
        """Take in an event, and show what it says."""
        self._record.add(event)
        match event:
            case StageBegan():
                self._begin(event)
            case StepEnded():
                self._step(event)
            case Warned():
                self.say(Message(event.text, is_error=event.level == "error"))
            case Fault():
                what = f"{event.role} {event.name}: {event.text}" + (f" ({event.action})" if event.action else "")
                self.say(Message(what, is_error=True))
            case Choice() if event.before == event.after:
                self._screen.line(f"left: {event.key} = {event.after}: {event.reason}")
            case Choice():
                self._screen.line(f"chosen: {event.key} {event.before} -> {event.after}: {event.reason}")
            case CommandEnded() if event.text:
                self.say(Message(event.text, is_error=True))
            case _:
                pass

    def is_new(self, message: Message) -> bool:
        """Whether `say` would show it."""
        return message.key not in self._counts

    def say(self, message: Message) -> None:
        """Show a warning or an error, once, wherever it comes from."""
        self._counts[message.key] += 1
        if self._counts[message.key] > 1:
            return
        self._num_shown += 1
        kind = "error" if message.is_error else "warning"
        head = f"{kind} ({message.source}): " if message.source else f"{kind}: "
        text = " ".join((head + message.text).split())
        limit = MAX_CHARACTERS if message.is_error else self._screen.width
        shown = text if len(text) <= limit else text[: limit - 1] + "…"
        self._screen.line(shown, RED if message.is_error else DIM)

    def tick(self) -> None:
        """Bring the last line of a terminal up to date."""
        if self._stage is not None:
            self._screen.bottom(self._stage_text(self._stage, self._clock() - self._stage.t))
        elif self._record.steps and self._record.ended is None:
            self._screen.bottom(self._progress())

    def close(self, lines: Sequence[str]) -> None:
        """End the last line, and write the summary."""
        self._end_stage(self._clock())
        self._screen.bottom("")
        for line in lines:
            self._screen.line(line)

    @property
    def repeated(self) -> str:
        """How many messages there were, for the summary."""
        if not self._num_shown:
            return "none"
        return f"{self._num_shown} different ones, {sum(self._counts.values())} in all"

    def _begin(self, event: StageBegan) -> None:
        if self._stage is not None and event.number <= self._stage.number:
            return
        self._end_stage(event.t)
        self._stage = event
        if not self._screen.is_terminal:
            self._screen.line(self._stage_text(event, None))

    def _end_stage(self, at_s: float) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            self._screen.line(self._stage_text(stage, at_s - stage.t))

    def _stage_text(self, stage: StageBegan, elapsed_s: float | None) -> str:
        usual = self._usual_s.get(stage.name)
        took = f", {elapsed_s:.0f} s" if elapsed_s is not None else " ..."
        known = ""
        if usual:
            least, most = (f"{seconds:.0f}" for seconds in usual)
            known = f" (usually {least} to {most})" if least != most else f" (usually {least})"
        return f"[{stage.number}/{stage.total}] {stage.name}{took}{known}"

    def _step(self, event: StepEnded) -> None:
        self._end_stage(event.t)
        metrics = {name: value for name, value in event.metrics.items() if value is not None}
        self._screen.line(step_line(event.step, event.total or None, metrics))

    def _progress(self) -> str:
        record = self._record
        last = max(record.steps)
        if last == record.total:
            return f"step {last}/{last} is done; the run ends"
        since_s = self._clock() - record.steps[last].t
        times = record.values(STEP_SECONDS)[-LAST_STEPS:]
        mean_s = sum(times) / len(times) if times else 0.0
        left = f", about {duration(mean_s * (record.total - last))} left" if record.total and times else ""
        gate = "" if record.gate is None else f", gate {'open' if record.gate.is_open else 'closed'}"
        return f"step {last + 1}/{record.total or '?'} for {since_s:.0f} s (usually {mean_s:.0f}){gate}{left}"
