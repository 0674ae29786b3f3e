"""A second process of a benchmark: the same module with --serve, told what to do a line at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "@answer "
"""Libraries print to the same stream."""


class Child:
    """The process, from its parent."""

    def __init__(self, module: str, environment: dict[str, str] | None = None) -> None:
        """Start it and wait until it listens."""
        command = [sys.executable, "-m", module, "--serve"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        self.answer()

    def ask(self, action: str, **options: Any) -> None:
        """Let it begin."""
        print(json.dumps([action, options]), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """What it says next.

        Raises:
            RuntimeError: it has ended.
        """
        for line in self.process.stdout or ():
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError("the second process ended")

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.process.kill()
        self.process.communicate()


def say(answer: Any = None) -> None:
    """Tell the parent, from the child."""
    print(f"\n{MARK}{json.dumps(answer)}", flush=True)


def serve(actions: dict[str, Callable[..., Any]]) -> None:
    """Main of the child: does what it is asked, and says what came of it."""
    say()
    for line in sys.stdin:
        action, options = json.loads(line)
        say(actions[action](**options))
