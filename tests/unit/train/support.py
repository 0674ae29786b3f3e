"""The trainer between two calls of verl's, for tests of one of its methods."""

from __future__ import annotations

from typing import Any

from partial_rollout.train.trainer import PartialRolloutTrainer


def bare_trainer(of: type[PartialRolloutTrainer] = PartialRolloutTrainer, **attributes: Any) -> Any:
    """A trainer of this class with these attributes and no others: its constructor starts actors."""
    trainer = object.__new__(of)
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return trainer


def noted(log: list[str], name: str) -> Any:
    """What stands for a method of the trainer's: it writes down its name when it is called."""
    return lambda *_args, **_options: log.append(name)
