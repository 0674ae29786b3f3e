"""vllm-omni's diffusion engine with a hold between denoise steps; its `engine_backend` names this class."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
from vllm_omni.diffusion.sched import StepScheduler
from vllm_omni.diffusion.sched.interface import CachedRequestData, DiffusionSchedulerOutput

from partial_rollout.diffusion.sample import OPTIONS_KEY, SampleOptions

HOLD = "hold_denoising"
RELEASE = "release_denoising"
BOUNDARY = "denoising_boundary"
"""Method of the worker extension, which answers between two denoise steps."""


class HoldableScheduler(StepScheduler):
    """vllm-omni's step scheduler, with a hold: while held it schedules nothing and only reports aborted requests.

    The engine calls each method with its own lock held.
    """

    def __init__(self) -> None:
        """Start released."""
        super().__init__()
        self._held = False
        self._unreported: set[str] = set()
        """Requests that finished before or during the hold: the worker learns of them with the next step."""

    def hold(self) -> None:
        """Schedule nothing until `release`; new requests wait."""
        self._held = True

    def release(self) -> None:
        """Schedule again; every request goes on where it stands."""
        self._held = False

    def unstarted(self) -> list[str]:
        """Names of the requests that have taken no denoise step."""
        waiting = [self._request_states[request_id] for request_id in self._waiting]
        return [SampleOptions.of(state.req.sampling_params.extra_args).name for state in waiting]

    def has_requests(self) -> bool:
        """Whether `schedule` has anything to report; if not, the engine's loop sleeps instead of spinning."""
        return bool(self._aborted()) if self._held else super().has_requests()

    def schedule(self) -> DiffusionSchedulerOutput:
        """Schedule one cycle; while held, an empty cycle with the ids of the requests aborted since the last."""
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
        """Aborted requests: the engine still knows them, and has forgotten those that ended by themselves."""
        return {request_id for request_id in self._finished_req_ids if request_id in self._request_states}


class HoldableEngine(DiffusionEngine):
    """vllm-omni's engine, which can be held between two denoise steps.

    AsyncOmni offers one way to call an engine, `collective_rpc` to its workers. Two methods of it are answered here:

    HOLD    from now on no step starts; the answer comes when no step is running, and has the names of the requests that
            have not begun and the number of computed steps
    RELEASE steps go on

    No step can be running at the answer to HOLD, because HOLD waits for BOUNDARY, which the thread that takes the steps
    works off. AsyncOmni does not tell when a request has reached the engine; `SampleOptions.on_arrival` does, which
    works because the engine of a single stage lives in the process of its caller.
    """

    def _init_scheduler(self, od_config: Any, scheduler: Any = None, *args: Any, **kwargs: Any) -> None:
        if scheduler is None and od_config.step_execution:
            scheduler = HoldableScheduler()
        super()._init_scheduler(od_config, scheduler, *args, **kwargs)

    def _add_prepared_request(self, request: Any) -> str:
        sampling = request.sampling_params
        options = SampleOptions.of(sampling.extra_args)
        sampling.extra_args = {
            **(sampling.extra_args or {}),
            OPTIONS_KEY: dataclasses.replace(options, on_arrival=None),
        }
        request_id = super()._add_prepared_request(request)
        if options.on_arrival is not None:
            options.on_arrival(lambda: self.abort(request_id))
        return request_id

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call a method of the workers; HOLD and RELEASE are answered by the scheduler."""
        if method == HOLD:
            return self._hold(timeout)
        if method == RELEASE:
            with self._cv:
                # Else the loop may schedule an aborted request, whose state the worker has given away.
                self._drain_abort_queue()
                self._holdable.release()
                self._cv.notify_all()
            return None
        return super().collective_rpc(method, timeout, args, kwargs, unique_reply_rank)

    @property
    def _holdable(self) -> HoldableScheduler:
        return cast("HoldableScheduler", self.scheduler)

    def _hold(self, timeout: float | None) -> dict[str, Any]:
        with self._cv:
            self._holdable.hold()
        counts = super().collective_rpc(BOUNDARY, timeout)
        with self._cv:
            return {"unstarted": self._holdable.unstarted(), "num_denoise_steps": counts[0]}
