"""The end of a run: its steps share `timeouts.stop_s`, and no step calls an actor that an earlier step has ended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import ray

from partial_rollout.runtime.bounded import call_bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)


def shutdown_run(trainer: Any) -> None:
    """End the run of a `PartialRolloutTrainer`, which verl's decorator hides from type checkers.

    Stops claim loops, engines and the manager, then kills the actors. Parts that were never made are left out. A step
    that fails is logged and the next one still runs: after an error in the run many steps fail, and the run's own error
    is the one that the user must see. A second call does nothing.
    """
    # First: the deaths of actors that end here must not be taken for the failure of the run. A signal that comes before
    # it raises, and the next call still has all steps to do.
    trainer.watch.stop()
    if trainer.is_shut_down:
        return
    # Set before the first step: an interruption of the steps may lead here again.
    trainer.is_shut_down = True
    for what, share, keep, action in _steps(trainer):
        try:
            limit_s = trainer.watch.left.share(share, keep=keep)
            call_bounded(action, timeout_s=limit_s, who_waits=f"trainer waits at the end of the run to {what}")
        except Exception as error:  # noqa: BLE001 - the run's own error must reach the user, whatever goes wrong here
            logger.warning("at the end of the run, could not %s: %r", what, error)
    # Killed in any case: an actor whose step was late still has its processes and memory.
    for actor in _actors(trainer):
        ray.kill(actor)


def _steps(trainer: Any) -> Iterator[tuple[str, float, float, Callable[[], Any]]]:
    """What to do, its share of the time that the end may take, the share that it leaves for later steps, and how."""
    agent_loops, fleet = getattr(trainer, "agent_loop_manager", None), getattr(trainer, "fleet", None)
    if agent_loops is not None:
        yield "stop the agent-loop workers", 0.25, 0.15, agent_loops.stop
    if fleet is not None:
        yield "shut down the engines", 0.5, 0.05, fleet.shutdown
    yield "close the prompt manager", 0.05, 0.0, trainer.close_manager


def _actors(trainer: Any) -> list[ActorHandle]:
    agent_loops, training = getattr(trainer, "agent_loop_manager", None), getattr(trainer, "actor_rollout_wg", None)
    workers = agent_loops.agent_loop_workers if agent_loops is not None else []
    return [*workers, *(training.workers if training is not None else []), trainer.manager]
