"""A policy loss that hangs for ever in one step, and in a later one makes TransferQueue's controller hang.

Rank and controller go on to give signs of life. A job imports it by `actor_rollout_ref.model.external_lib` and asks for
it by `policy_loss.loss_mode=hanging`.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import ray
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss

from partial_rollout.observability.events import BatchTaken, EventReader
from partial_rollout.train.resources import TRANSFER_QUEUE
from tests.e2e.hangs_in import QUEUE_IN, RANK_IN


@register_policy_loss("hanging")
def hanging(*args: Any, **kwargs: Any) -> Any:
    """Compute verl's vanilla loss; each of the two steps hangs once."""
    folder = Path(os.environ["VERL_FILE_LOGGER_PATH"]).parent
    taken = [event for event in EventReader(folder / "events").read() if isinstance(event, BatchTaken)]
    hung = folder / f"hung-{taken[-1].step}"
    if taken[-1].step in (RANK_IN, QUEUE_IN) and not hung.exists():
        hung.touch()
        if taken[-1].step == RANK_IN:
            threading.Event().wait()
        name, namespace = TRANSFER_QUEUE
        controller: Any = ray.get_actor(name, namespace=namespace)
        ray.get(controller.__ray_call__.remote(answer_nothing), timeout=60.0)
    return get_policy_loss_fn("vanilla")(*args, **kwargs)


def answer_nothing(controller: Any) -> None:
    """Run inside the controller: its thread for requests hangs with the next one."""
    controller._handle_request = lambda *_: threading.Event().wait()
