"""The trainer's weight update of all engines: send; relaunch engines that failed, and send everything to all again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import ray

from partial_rollout.errors import EnginesLost, WaitTimeout, WeightUpdateError
from partial_rollout.runtime.bounded import Wait
from partial_rollout.runtime.remote_call import root_cause

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from partial_rollout.train.fleet import ReplicaFleet

logger = logging.getLogger(__name__)


def update_engines(
    send: Callable[[], Sequence[ray.ObjectRef[Any]]],
    engines: ReplicaFleet,
    *,
    version: int,
    relaunches: int,
    timeout_s: float,
    before_resend: Callable[[], Any],
    sound_s: float = 0.0,
) -> int:
    """Bring all engines to weight version `version`; return how many had to be relaunched for it.

    Args:
        send: starts the update on every training rank; a rank answers when it has finished its part.
        engines: all engines, of which those that failed are relaunched.
        relaunches: how often engines that an update failed in are started again before this training gives up.
        timeout_s: the longest time that one update of all engines may take.
        sound_s: what one may take without a warning.
        before_resend: puts all engines into the state in which an update finds them.

    Raises:
        EnginesLost: an update failed in an engine after the last relaunch; names replicas and reasons.
        WeightUpdateError: an update failed, but in no engine.
        WaitTimeout: training ranks did not answer.
        Exception: what a rank raised that has nothing to do with engines.
    """
    num_relaunched = 0
    for attempts_left in reversed(range(relaunches + 1)):
        waiting = Wait(f"trainer waits for weight version {version} to reach the engines", timeout_s, sound_s)
        failure = _first_failure(send(), waiting)
        if failure is None:
            break
        failed = engines.failed_updates()
        reasons = "; ".join(f"replica {rank}: {reason}" for rank, reason in failed.items()) or str(failure)
        if not (failed and attempts_left):
            raise (EnginesLost if failed else WeightUpdateError)(
                f"{_subject(failed)} not taken weight version {version} ({num_relaunched} were relaunched, "
                f"partial_rollout.weights.relaunches={relaunches}): {reasons}"
            ) from failure
        logger.warning("weight version %s: engines are relaunched and sent all weights again: %s", version, reasons)
        # A new engine has no weights and the others may have half an update, so all are sent everything.
        engines.relaunch(failed)
        before_resend()
        num_relaunched += len(failed)
    return num_relaunched


def _subject(failed: Collection[int]) -> str:
    match sorted(failed):
        case []:
            return "some replica has"
        case [rank]:
            return f"replica {rank} has"
        case ranks:
            return f"replicas {', '.join(map(str, ranks))} have"


def _first_failure(refs: Sequence[ray.ObjectRef[Any]], waiting: Wait) -> WeightUpdateError | None:
    """Wait for every rank, because none may still be sending when the next update begins."""
    late, failure = list(refs), None
    while late:
        done, late = ray.wait(late, timeout=waiting.step_s())
        if done:
            failure = failure or _failure(done[0])
            continue
        silent = ", ".join(str(rank) for rank, ref in enumerate(refs) if ref in late)
        if waiting.is_over:
            raise WaitTimeout(
                f"{waiting.who_waits}: of {len(refs)} ranks no answer within {waiting.timeout_s:g} s from {silent}"
            )
        waiting.look(f"ranks {silent} of {len(refs)}")
    return failure


def _failure(ref: ray.ObjectRef[Any]) -> WeightUpdateError | None:
    try:
        ray.get(ref)
    except WeightUpdateError as error:
        return cast("WeightUpdateError", root_cause(error))  # Ray's wrapper has the remote traceback in its text
    return None
