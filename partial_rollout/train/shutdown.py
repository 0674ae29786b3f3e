"""Ending a run: bounded, in an order in which nobody talks to the dead, and never hiding the first error."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from partial_rollout.errors import PartialRolloutError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


def shutdown_run(trainer: Any, agent_loops: Any) -> None:
    """Stop claim loops, engines and the manager, then the actors.

    A step that fails is logged and the next one still runs: after an error half of them are expected to.
    """
    _attempt("stop the agent-loop workers", agent_loops.stop)
    _attempt("shut down the engines", trainer.fleet.shutdown)
    _attempt("close the prompt manager", lambda: ray.get(trainer.manager.close.remote("run ended"), timeout=10))
    for actor in [*agent_loops.agent_loop_workers, *trainer.actor_rollout_wg.workers, trainer.manager]:
        ray.kill(actor)


def _attempt(what: str, action: Callable[[], Any]) -> None:
    try:
        action()
    except (PartialRolloutError, RayError) as error:
        logger.warning("at the end of the run, could not %s: %s", what, error)
