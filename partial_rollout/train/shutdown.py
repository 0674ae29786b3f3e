"""Ending a run: bounded, in an order in which nobody talks to the dead, and never hiding the first error."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

import ray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)


class Run(Protocol):
    """What is always there of a trainer; its engines, workers and training workers may not have been made yet."""

    is_shut_down: bool
    manager: ActorHandle

    def close_manager(self) -> None:
        """End all waits at the prompt manager."""
        ...


def shutdown_run(trainer: Run) -> None:
    """Stop claim loops, engines and the manager, then kill the actors; parts that were never made are left out.

    A step that fails is logged and the next one still runs: after an error half of them are expected to fail.
    Calling it again does nothing.
    """
    if trainer.is_shut_down:
        return
    trainer.is_shut_down = True
    for what, action in _steps(trainer):
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the run's own error must reach the user, whatever goes wrong here
            logger.warning("at the end of the run, could not %s: %r", what, error)
    for actor in _actors(trainer):
        ray.kill(actor)


def _steps(trainer: Run) -> Iterator[tuple[str, Callable[[], Any]]]:
    agent_loops, fleet = getattr(trainer, "agent_loop_manager", None), getattr(trainer, "fleet", None)
    if agent_loops is not None:
        yield "stop the agent-loop workers", agent_loops.stop
    if fleet is not None:
        yield "shut down the engines", fleet.shutdown
    yield "close the prompt manager", trainer.close_manager


def _actors(trainer: Run) -> list[ActorHandle]:
    agent_loops, training = getattr(trainer, "agent_loop_manager", None), getattr(trainer, "actor_rollout_wg", None)
    workers = agent_loops.agent_loop_workers if agent_loops is not None else []
    return [*workers, *(training.workers if training is not None else []), trainer.manager]
