"""A file with one JSON line for each event: the prompts of each trained batch, each change of the number of slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.types import FinishedGroup


def append_event(path: str, event: str, step: int, **fields: Any) -> None:
    """Append one event of training step `step` to the file; a missing folder is made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a", encoding="utf-8") as log:
        log.write(json.dumps({"event": event, "step": step, **fields}) + "\n")


def append_batch(path: str, step: int, groups: Sequence[FinishedGroup]) -> None:
    """Append the event `taken`: the prompts of the batch that step `step` trains."""
    append_event(
        path,
        "taken",
        step,
        uids=[group.uid for group in groups],
        source_index=[group.source_index for group in groups],
        deferrals=[group.num_deferrals for group in groups],
        interruptions=[sum(t.num_interruptions for t in group.trajectories) for group in groups],
    )
