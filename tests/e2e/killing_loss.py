"""A policy loss that kills the job's engine while the training worker updates, when no request is in it.

A job imports it by `actor_rollout_ref.model.external_lib` and asks for it by `policy_loss.loss_mode=killing`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss

from partial_rollout.observability.events import BatchTaken, EventReader
from tests.preloaded import MARK

KILLED_IN, LAST_KILLED_IN = 1, 4
"""Steps; in the last one the model is taken away too, so that the engine cannot start again."""


@register_policy_loss("killing")
def killing(*args: Any, **kwargs: Any) -> Any:
    """Compute verl's vanilla loss; in the two steps, kill the engine first."""
    folder = Path(os.environ["VERL_FILE_LOGGER_PATH"]).parent
    step = sum(isinstance(event, BatchTaken) for event in EventReader(folder / "events").read())
    model = folder / "model"
    if step == LAST_KILLED_IN and model.exists():
        model.rename(folder / "gone")
    if step in (KILLED_IN, LAST_KILLED_IN):
        _kill_engine(folder / f"killed-{step}")
    return get_policy_loss_fn("vanilla")(*args, **kwargs)


def _kill_engine(done: Path) -> None:
    if done.exists():
        return
    done.touch()
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == os.environ[MARK] and "EngineCore" in " ".join(process.cmdline()):
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
