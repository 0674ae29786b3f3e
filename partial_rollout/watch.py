"""`python -m partial_rollout.watch RUN [-- COMMAND ...]`: what a run does, in this shell.

With a command it starts the command, whose own output goes to RUN/run.log, and ends with the command's exit code;
Ctrl-C reaches the command. Without one it shows a run that goes on, or has ended.

All that is shown comes from the run's event stream, with two exceptions: warnings and errors of other packages come
from the log, and the steps of verl's own modes from the file of verl's `file` logger.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from partial_rollout.errors import DataError
from partial_rollout.observability.advice import next_step
from partial_rollout.observability.events import EventReader, StepEnded
from partial_rollout.observability.foreign import LogMessages, LogTail
from partial_rollout.observability.live import LiveView, Screen
from partial_rollout.observability.record import LOG, RunRecord, check_is_no_file, events_folder_of, metrics_steps
from partial_rollout.observability.report import REPORT
from partial_rollout.observability.stages import usual_seconds
from partial_rollout.observability.summary import summary_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    StageSeconds = Mapping[str, tuple[float, float]]

CLOCK_S = 2.0
"""A process may have started, as the system tells it, a little before it was asked for, as the clock tells it."""
LOOK_S = 0.5
"""Between two looks at the files; nobody sees a difference below."""
NUM_LAST_LINES = 5
"""Lines at the end of the log, shown when the command failed."""
METRICS_VARIABLE = "VERL_FILE_LOGGER_PATH"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Watch:
    """Reads the files of one run, and hands what is new to the view."""

    def __init__(self, run: Path, screen: Screen, *, since_s: float = 0.0, first_s: StageSeconds | None = None) -> None:
        """Events before `since_s`, in seconds since 1970, are those of earlier starts of the run.

        `first_s` says what stages usually take, at least and at most, where no earlier start tells it.
        """
        self.run, self.record, self._since_s = run, RunRecord(run.resolve().name), since_s
        self._screen = screen
        self._events = EventReader(events_folder_of(run))
        self.log = run / LOG
        self._tail, self._messages = LogTail(self.log, from_end=since_s > 0), LogMessages()
        self.metrics = _metrics_file(run)
        self._num_rows = 0
        self._has_events, self._is_past = False, not since_s
        usual_s = {**(first_s or {}), **usual_seconds(events_folder_of(run), before_s=since_s or time.time())}
        self.view = LiveView(screen, self.record, usual_s)

    def look(self) -> None:
        """Show what is new; what the log has may belong before it, since only events have a time."""
        for event in self._events.read():
            if event.t >= self._since_s:
                self._has_events = self._has_events or isinstance(event, StepEnded)
                self.view.add(event)
        if not self._has_events:
            self._look_at_metrics()
        self._look_at_log()
        self.view.tick()

    def _look_at_log(self) -> None:
        """Warnings and errors of other packages; those of a run that was not watched until now have a head."""
        found = [message for line in self._tail.read() if (message := self._messages.feed(line)) is not None]
        if self._is_past and any(map(self.view.is_new, found)):
            self._screen.line(f"from {LOG}:")
        self._is_past = False
        for message in found:
            self.view.say(message)

    def _look_at_metrics(self) -> None:
        """Steps of verl's own modes."""
        if self.metrics is None or not self.metrics.exists() or self.metrics.stat().st_mtime < self._since_s:
            return
        try:
            steps = metrics_steps(self.metrics)
        except DataError as error:
            self._screen.line(f"warning: {error}")
            self.metrics = None
            return
        for step in steps[self._num_rows :]:
            self.view.add(StepEnded(t=time.time(), step=step.step, total=0, metrics=step.metrics))
        self._num_rows = len(steps)

    def close(self, code: int | None) -> None:
        """Show what came last, and the summary."""
        self.look()
        lines = summary_lines(self.record)
        if lines:
            lines = ["", *lines, f"{'warnings':<12} {self.view.repeated}", f"{'files':<12} {self._files()}"]
            lines += [f"{'page':<12} {self.page}", f"{'next':<12} {next_step(self.record)}"]
        if code:
            lines.append(f"error: the command ended with code {code}; the end of {self.log}:")
            lines += [f"  {line}" for line in list(LogTail(self.log).read())[-NUM_LAST_LINES:]]
        self.view.close(lines)

    def _files(self) -> str:
        events = events_folder_of(self.run)
        found = {"report": events.parent / REPORT, "log": self.log, "metrics": self.metrics, "events": events}
        shown = [f"{name} {path}" for name, path in found.items() if path is not None and path.exists()]
        return ", ".join(shown)

    @property
    def page(self) -> str:
        """The command that shows this run in a browser."""
        return f"{sys.executable} -m partial_rollout.view {self.run}"


def _metrics_file(run: Path) -> Path | None:
    if METRICS_VARIABLE in os.environ:
        return Path(os.environ[METRICS_VARIABLE])
    return max(run.glob("metrics*.jsonl"), key=lambda path: path.stat().st_mtime, default=None)


def follow(command: Sequence[str], run: Path, screen: Screen, first_s: StageSeconds | None = None) -> int:
    """Run `command` with its output in the run's log; returns its exit code, 128 + number for a signal.

    `first_s` says what the stages of its start usually take, at least and at most, where no earlier start tells it.
    """
    run.mkdir(parents=True, exist_ok=True)
    watch = Watch(run, screen, since_s=time.time() - CLOCK_S, first_s=first_s)
    screen.line(f"starting; the raw output is in {watch.log}")
    screen.line(f"to see this run in a browser, from another shell: {watch.page}")
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def receive(received: int, _frame: object) -> None:
        if process is None:
            early.append(received)
        else:
            _forward(process, received, screen)

    # Before the command starts: what is ignored here, as Ctrl-C is in a shell script's background, it would ignore too.
    for number in FORWARDED:
        signal.signal(number, receive)
    with watch.log.open("ab") as log:
        # In a session of its own a signal reaches the command once: from here.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    for received in early:
        _forward(process, received, screen)
    while process.poll() is None:
        watch.look()
        try:
            process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            continue
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    watch.close(code)
    return code


def _forward(process: subprocess.Popen[bytes], received: int, screen: Screen) -> None:
    screen.line(f"{signal.Signals(received).name}: the run is told to end, which may take a minute")
    process.send_signal(signal.SIGTERM if received == signal.SIGHUP else received)


def attend(run: Path, screen: Screen) -> int:
    """Show a run that somebody else has started, from its beginning until it ends; returns 0."""
    watch = Watch(run, screen)
    watch.look()
    if not (watch.record.stages or watch.record.steps):
        raise DataError(f"{run} has no events and no metrics yet: give the folder of a run, as its recipe names it")
    try:
        while watch.record.ended is None and watch.record.stages and not screen.reader_left:
            time.sleep(LOOK_S)
            watch.look()
    except KeyboardInterrupt:
        pass
    watch.close(None)
    return 0


def main(words: list[str] | None = None) -> int:
    """The command."""
    given = sys.argv[1:] if words is None else words
    command = given[given.index("--") + 1 :] if "--" in given else []
    parser = argparse.ArgumentParser(prog="python -m partial_rollout.watch", description=__doc__)
    parser.usage = "%(prog)s RUN [-- COMMAND ...]"
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    options = parser.parse_args(given[: given.index("--")] if "--" in given else given)
    screen = Screen(sys.stdout)
    try:
        check_is_no_file(options.run)
        return follow(command, options.run, screen) if command else attend(options.run, screen)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
