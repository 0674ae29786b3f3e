"""A second process of a benchmark: a module with --serve, told what to do a line at a time."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "@answer "
"""Libraries print to the same stream."""
ANSWER_S = 300.0
"""An answer that takes longer is none: importing vLLM on a busy machine is the longest."""

END_S = 10.0
"""For the rest of what a killed process has said."""


class Child:
    """The process, from its parent; a context manager, which kills it."""

    def __init__(self, module: str, environment: dict[str, str] | None = None) -> None:
        """Start it and wait until it listens."""
        command = [sys.executable, "-m", module, "--serve"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="child-answers", daemon=True)
        self._reader.start()
        self.answer()

    def __enter__(self) -> Child:
        """Start nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """It is gone afterwards."""
        self.kill()

    def ask(self, action: str, **options: Any) -> None:
        """Let it begin."""
        print(json.dumps([action, options]), file=self.process.stdin, flush=True)

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """What it says next.

        Raises:
            RuntimeError: it has ended, or says nothing for so long.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise RuntimeError(f"no answer of the second process within {timeout_s:.0f} s") from None
        if line is None:
            raise RuntimeError("the second process ended")
        return json.loads(line)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.process.kill()
        self.process.wait()
        self._reader.join(END_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        try:
            for line in self.process.stdout or ():
                if line.startswith(MARK):
                    self._lines.put(line.removeprefix(MARK))
        finally:
            self._lines.put(None)


def say(answer: Any = None) -> None:
    """Tell the parent, from the child."""
    print(f"\n{MARK}{json.dumps(answer)}", flush=True)


def wait_for_the_end() -> None:
    """Until the parent kills this process, or has ended itself."""
    sys.stdin.read()


def serve(actions: dict[str, Callable[..., Any]]) -> None:
    """Main of the child: does what it is asked, and says what came of it."""
    say()
    for line in sys.stdin:
        action, options = json.loads(line)
        say(actions[action](**options))
