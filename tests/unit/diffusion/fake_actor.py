"""A training model whose weights are the number of its updates."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from partial_rollout.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


class FakeActor:
    """Says what happens in `events`, which others may share."""

    device = "cpu"

    def __init__(self, events: list[str] | None = None) -> None:
        self.events, self.trained = events if events is not None else [], []
        self.num_updates, self.failure = 0, None

    def update(self, groups: Any) -> dict[str, float]:
        self.events.append("train")
        self.trained.append(groups)
        self.num_updates += 1
        return {"actor/loss": 0.0}

    def weights(self) -> list[Any]:
        return []

    def save_state(self, folder: Path) -> None:
        if isinstance(self.failure, OSError):
            raise self.failure
        (folder / "weights").write_text(json.dumps(self.num_updates))

    def check_state(self, folder: Path) -> None:
        if isinstance(self.failure, DataError):
            raise self.failure
        json.loads((folder / "weights").read_text())

    def load_state(self, folder: Path) -> None:
        self.num_updates = json.loads((folder / "weights").read_text())
