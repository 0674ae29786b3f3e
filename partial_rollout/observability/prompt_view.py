"""What a run has told of one prompt: its events as rows of text, and the responses that a dump has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from partial_rollout.observability.events import (
    AnyEvent,
    BatchTaken,
    EventReader,
    PhaseBegan,
    PromptDropped,
    SegmentEnded,
    TrajectoryEnded,
)
from partial_rollout.observability.record import INTERRUPTED, events_folder_of
from partial_rollout.observability.waits import WHAT

if TYPE_CHECKING:
    from pathlib import Path

DUMPS = "rollouts"
"""Folder in the run's folder where `trainer.rollout_data_dir` is looked for."""
MAX_EVENTS, MAX_CHARACTERS = 400, 20_000


def prompt_view(run: Path, uid: str) -> dict[str, object]:
    """Events with the seconds since the first one; texts of the prompt's responses where a dump has them."""
    events = EventReader(events_folder_of(run)).about(f'"{uid}"')
    first_s = events[0].t if events else 0.0
    rows = [[f"{event.t - first_s:.1f} s", *told] for event in events if (told := _told(event))]
    step = next((event.step for event in events if isinstance(event, BatchTaken)), None)
    return {
        "uid": uid,
        "events": rows[:MAX_EVENTS],
        "left_out": max(0, len(rows) - MAX_EVENTS),
        "texts": [] if step is None else _texts(run / DUMPS / f"{step}.jsonl", uid),
    }


def _told(event: AnyEvent) -> list[str]:
    """Which trajectory, and what happened; empty for events of no interest here."""
    match event:
        case PhaseBegan():
            what = (
                "failed or was cancelled"
                if event.phase == "ended"
                else f"waits for {WHAT.get(event.phase, event.phase)}"
            )
            attempt = f", attempt {event.attempt}" if event.attempt > 1 else ""
            return [f"trajectory {event.session}", f"{what}, response {event.response}{attempt}"]
        case SegmentEnded():
            end = "was interrupted" if event.reason == INTERRUPTED else "ended"
            tokens = f"{event.tokens} {event.unit} after {event.prompt_tokens}, {event.reused_tokens} of them reused"
            return [f"trajectory {event.session}", f"{end} at {event.server}: {tokens}, weights {event.version}"]
        case TrajectoryEnded():
            waits = f"engine {event.engine_seconds:.1f} s, reward {event.reward_seconds:.1f} s"
            return [f"trajectory {event.session}", f"complete after {event.seconds:.1f} s ({waits})"]
        case BatchTaken():
            return ["", f"taken for step {event.step}"]
        case PromptDropped():
            return ["", f"dropped: {event.reason}"]
        case _:
            return []


def _texts(path: Path, uid: str) -> list[list[str]]:
    """Score, weight versions, prompt and response of each trajectory, as verl's dump has them."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if uid in line:
            row = json.loads(line)
            if str(row.get("uid", "")).startswith(uid):
                versions = ", ".join(
                    f"{count} tokens of weights {version}" for version, count in row.get("weight_versions", [])
                )
                texts = [str(row.get(name, ""))[:MAX_CHARACTERS] for name in ("input", "output")]
                found.append([f"score {row.get('score')}", versions, *texts])
    return found
