"""A scheduler that holds its requests between two denoise steps."""

from __future__ import annotations

from vllm_omni.diffusion.sched import StepScheduler
from vllm_omni.diffusion.sched.interface import CachedRequestData, DiffusionSchedulerOutput

from partial_rollout.diffusion.sample import SampleOptions


class HoldableScheduler(StepScheduler):
    """vllm-omni's step scheduler, which while held has nothing to do but to report who was aborted.

    Called with the engine's lock held, like all of a scheduler.
    """

    def __init__(self) -> None:
        """Start released."""
        super().__init__()
        self._held = False
        self._unreported: set[str] = set()
        """Finished before or while held: the worker learns of them with the next step, and drops their state."""

    def hold(self) -> None:
        """Schedule nothing until `release`; new requests wait."""
        self._held = True

    def release(self) -> None:
        """Go on with every request where it stands."""
        self._held = False

    def unstarted(self) -> list[str]:
        """Names of the requests that no step was taken of."""
        waiting = [self._request_states[request_id] for request_id in self._waiting]
        return [SampleOptions.of(state.req.sampling_params.extra_args).name for state in waiting]

    def has_requests(self) -> bool:
        """Whether `schedule` has anything to say: a held engine must sleep, not spin."""
        return bool(self._aborted()) if self._held else super().has_requests()

    def schedule(self) -> DiffusionSchedulerOutput:
        """One cycle; held, an empty one with the ids of those who were aborted since the last."""
        if not self._held:
            output = super().schedule()
            if not output.is_empty:
                output.finished_req_ids |= self._unreported
                self._unreported = set()
            return output
        aborted = self._aborted()
        self._unreported |= self._finished_req_ids
        self._finished_req_ids.clear()
        return DiffusionSchedulerOutput(
            step_id=self._step_id,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            finished_req_ids=aborted,
            num_running_reqs=len(self._running),
            num_waiting_reqs=len(self._waiting),
        )

    def _aborted(self) -> set[str]:
        """Finished requests that the engine has not answered: those that ended by themselves it has forgotten."""
        return {request_id for request_id in self._finished_req_ids if request_id in self._request_states}
