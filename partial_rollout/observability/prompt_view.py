"""What a run has told of one prompt: its events as rows of text, and its responses.

Texts of a prompt that was trained come from a dump, those of any other prompt from the events, if they have texts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from partial_rollout.observability.events import (
    DENOISE_STEPS,
    AnyEvent,
    BatchTaken,
    EventReader,
    PhaseBegan,
    PromptDropped,
    RequestSent,
    SegmentEnded,
    TrajectoryEnded,
)
from partial_rollout.observability.record import INTERRUPTED, dump_lines, events_folder_of
from partial_rollout.observability.waits import WHAT

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

DUMPS = "rollouts"
"""Folder in the run's folder where `trainer.rollout_data_dir` is looked for."""
MAX_EVENTS, MAX_CHARACTERS, MAX_TEXTS = 400, 20_000, 64
SO_FAR = (
    "The text so far. What an engine generates right now is not in it: the text of a request comes when the request "
    "has ended or was interrupted. Nor is what tools have said."
)
NO_TEXT = (
    "The text is not known. Of a prompt that was not trained yet, events have it with partial_rollout.events_text=512; "
    "of a trained one, a dump in the folder `rollouts` of the run."
)


def prompt_view(run: Path, uid: str) -> dict[str, object]:
    """Events with the seconds since the first one; texts of the prompt's responses where a dump has them."""
    events = EventReader(events_folder_of(run)).about(f'"{uid}"')
    first_s = events[0].t if events else 0.0
    rows = [[f"{event.t - first_s:.1f} s", *told] for event in events if (told := _told(event))]
    step = next((event.step for event in events if isinstance(event, BatchTaken)), None)
    texts, note = [] if step is None else _texts(run / DUMPS / f"{step}.jsonl", uid), ""
    if not texts and not any(isinstance(event, SegmentEnded) and event.unit == DENOISE_STEPS for event in events):
        texts = _so_far(events)
        note = SO_FAR if texts else NO_TEXT
    return {
        "uid": uid,
        "events": rows[:MAX_EVENTS],
        "left_out": max(0, len(rows) - MAX_EVENTS),
        "texts": texts[:MAX_TEXTS],
        "note": note,
    }


def _told(event: AnyEvent) -> list[str]:
    """Which trajectory, and what happened; empty for events of no interest here."""
    match event:
        case PhaseBegan():
            what = (
                "ended before it was complete: it failed, was cancelled, or the run ended"
                if event.phase == "ended"
                else f"waits for {WHAT.get(event.phase, event.phase)}"
            )
            attempt = f", attempt {event.attempt}" if event.attempt > 1 else ""
            response = f", response {event.response}" if event.response else ""
            return [f"trajectory {event.session}", f"{what}{response}{attempt}"]
        case RequestSent():
            return [f"trajectory {event.session}", f"its request goes to {event.server}"]
        case SegmentEnded():
            end = "was interrupted" if event.reason == INTERRUPTED else "ended"
            took = f"{event.tokens} new {event.unit} by weights {event.version}"
            before = f"context {event.prompt_tokens} tokens, {event.reused_tokens} of them found in the KV cache"
            if event.unit == DENOISE_STEPS:
                before = f"{event.prompt_tokens} done before"
            return [f"trajectory {event.session}", f"{end} at {event.server}: {took}; {before}"]
        case TrajectoryEnded():
            waits = f"engine {event.engine_seconds:.1f} s, reward {event.reward_seconds:.1f} s"
            return [f"trajectory {event.session}", f"complete after {event.seconds:.1f} s ({waits})"]
        case BatchTaken():
            return ["", f"taken for step {event.step}"]
        case PromptDropped():
            return ["", f"dropped: {event.reason}"]
        case _:
            return []


def _so_far(events: Iterable[AnyEvent]) -> list[list[str]]:
    """For each trajectory: who it is, how many tokens it has, its prompt where it is known, and its text."""
    texts: dict[int, _SoFar] = {}
    for event in events:
        match event:
            case PhaseBegan(phase="agent"):  # a further attempt begins afresh
                texts[event.session] = _SoFar(prompt=event.text)
            case PhaseBegan(phase="engine") if event.session in texts:
                texts[event.session].begin(event.response)
            case SegmentEnded() if event.session in texts:
                texts[event.session].add(event)
            case _:
                pass
    told = {session: text for session, text in sorted(texts.items()) if text.prompt or text.has_text}
    return [[f"trajectory {session}", text.size, text.prompt, text.text] for session, text in told.items()]


@dataclass(slots=True)
class _SoFar:
    """The text of a trajectory as far as events tell it."""

    prompt: str
    parts: list[str] = field(default_factory=list)
    has_text: bool = False
    response: int = 1
    num_tokens: int = 0
    versions: set[int] = field(default_factory=set)

    def begin(self, response: int) -> None:
        """The trajectory's agent loop asks for a response."""
        if response > self.response:
            self.parts.append(f"\n[response {response}]\n")
        self.response = response

    def add(self, event: SegmentEnded) -> None:
        """A request of the response has ended."""
        hidden = event.tokens - event.text_tokens
        self.parts += [f"[... {hidden:,} tokens ...]"] if hidden else []
        self.parts.append(event.text)
        self.has_text = self.has_text or bool(event.text)
        self.num_tokens += event.tokens
        self.versions |= {event.version} if event.tokens else set()

    @property
    def size(self) -> str:
        versions = ", ".join(map(str, sorted(self.versions)))
        return f"{self.num_tokens:,} tokens so far" + (f", of weights {versions}" if versions else "")

    @property
    def text(self) -> str:
        return "".join(self.parts)[-MAX_CHARACTERS:]


def _texts(path: Path, uid: str) -> list[list[str]]:
    """Score, weight versions, prompt and response of each trajectory, as verl's dump has them."""
    if not path.is_file():
        return []
    found = []
    for line in dump_lines(path):
        if uid in line:
            try:
                row = json.loads(line)
            except ValueError:  # cut, as the last line is while the dump is written
                continue
            if str(row.get("uid", "")).startswith(uid):
                versions = ", ".join(
                    f"{count} tokens of weights {version}" for version, count in row.get("weight_versions", [])
                )
                texts = [str(row.get(name, ""))[:MAX_CHARACTERS] for name in ("input", "output")]
                found.append([f"score {row.get('score')}", versions, *texts])
    return found
