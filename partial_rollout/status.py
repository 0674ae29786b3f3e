"""`python -m partial_rollout.status`: the prompt queue of a running job, in a shell that reaches its Ray cluster.

`--why` names the oldest prompts and what they wait for: at which response, for whom, since when. It reads the run's
event stream, whose folder the job tells; with `--why RUN` it needs no cluster.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from partial_rollout.errors import ClusterError, DataError
from partial_rollout.observability.events import EventReader
from partial_rollout.observability.pipe import reader_may_leave
from partial_rollout.observability.record import events_folder_of
from partial_rollout.observability.status_view import format_status, status_json
from partial_rollout.observability.waits import Waits, describe

if TYPE_CHECKING:
    from partial_rollout.types import ManagerStatus

EXIT_NOT_FOUND = 2
"""Exit code if there is no cluster, no manager or no answer; argparse uses the same for a wrong command line."""

CLEAR_SCREEN = "\x1b[H\x1b[2J"
ANSWER_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 5.0


def main(arguments: list[str] | None = None) -> int:
    """Print the status once, or again every `--watch` seconds; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if not options.why:
            _connect(options.address)
        with reader_may_leave():
            _show(options)
    except (ClusterError, DataError) as error:
        print(f"partial_rollout.status: {error}", file=sys.stderr)
        return EXIT_NOT_FOUND
    except KeyboardInterrupt:
        return 0
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m partial_rollout.status", description="Show the prompt queues of a running partial-rollout job."
    )
    parser.add_argument("--address", default="auto", help="Ray cluster, host:port (default: the one on this machine)")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")
    parser.add_argument("--watch", type=_seconds, metavar="SECONDS", help="draw it again until interrupted")
    parser.add_argument(
        "--why",
        nargs="?",
        const="",
        metavar="RUN",
        help="name the oldest prompts and what they wait for; RUN: a folder, without a cluster",
    )
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return seconds


def _connect(address: str) -> None:
    import ray

    _probe(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ClusterError(
            f"no Ray cluster at address {address!r}: {reason} (give the job's cluster with --address host:port; if "
            "that one asks for a token, set RAY_AUTH_MODE=token, which Ray does by itself only without an address)"
        ) from error


def _probe(address: str) -> None:
    """Raise ClusterError for a port where nobody listens; Ray itself would try for more than a minute."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"--address {address!r} is not allowed: must be 'auto' or host:port")
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"no Ray cluster at address {address!r}: {error}") from error


def _show(options: argparse.Namespace) -> None:
    redraws = options.watch and sys.stdout.isatty() and not options.json
    print((CLEAR_SCREEN if redraws else "") + _text(options), flush=True)
    while options.watch:
        time.sleep(options.watch)
        separator = CLEAR_SCREEN if redraws else "" if options.json else "\n"
        print(separator + _text(options), flush=True)


def _text(options: argparse.Namespace) -> str:
    if options.why:
        return _waits(events_folder_of(Path(options.why)))
    status = _fetch(options)
    if options.json:
        return status_json(status)
    shown = format_status(status)
    if options.why is None:
        return shown
    if not status.events:
        raise ClusterError("this run has no event stream (partial_rollout.events=null), so nothing tells its waits")
    return f"{shown}\n{_waits(Path(status.events))}"


def _waits(folder: Path) -> str:
    if not folder.is_dir():
        raise DataError(f"the event stream {folder} is not on this machine: give the run's folder, --why RUN")
    waits = Waits()
    waits.add(EventReader(folder).read())
    return describe(waits, time.time())


def _fetch(options: argparse.Namespace) -> ManagerStatus:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    from partial_rollout.runtime.prompt_manager import find_manager

    manager = find_manager()
    try:
        return ray.get(manager.status.remote(), timeout=ANSWER_TIMEOUT_S)
    except (RayActorError, GetTimeoutError) as error:
        raise ClusterError(
            f"the prompt manager gave no answer in {ANSWER_TIMEOUT_S:g} s: {type(error).__name__}: {error}"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
