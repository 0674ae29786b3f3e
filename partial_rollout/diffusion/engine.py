"""vllm-omni's diffusion engine with a hold between denoise steps; its `engine_backend` names this class."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
from vllm_omni.diffusion.sched import RequestScheduler, StepScheduler
from vllm_omni.diffusion.sched.interface import CachedRequestData, DiffusionSchedulerOutput

from partial_rollout.diffusion.sample import OPTIONS_KEY, SampleOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_omni.diffusion.request import OmniDiffusionRequest

HOLD = "hold_denoising"
RELEASE = "release_denoising"
BOUNDARY = "denoising_boundary"
"""Method of the worker extension, which answers between two denoise steps."""


class ArrivalMixin:
    """Makes a scheduler tell a request's sender that the request has come in.

    Requests come into vllm-omni's engine in another way in each version, and always pass this method of its scheduler.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        """`abort` asks the engine to end a request."""
        super().__init__()
        self._abort = abort

    def add_request(self, request: OmniDiffusionRequest) -> str:
        """Take a request; its `on_arrival` is called and stays here: workers may be other processes."""
        sampling = request.sampling_params
        options = SampleOptions.of(sampling.extra_args)
        kept = dataclasses.replace(options, on_arrival=None)
        sampling.extra_args = {**(sampling.extra_args or {}), OPTIONS_KEY: kept}
        scheduler: Any = super()
        request_id = scheduler.add_request(request)
        if options.on_arrival is not None:
            options.on_arrival(lambda: self._abort(request_id))
        return request_id


class ArrivalScheduler(ArrivalMixin, RequestScheduler):
    """vllm-omni's scheduler of whole requests."""


class HoldableScheduler(ArrivalMixin, StepScheduler):
    """vllm-omni's step scheduler, with a hold: while held it schedules nothing, and reports aborted requests.

    The engine calls each method with its own lock held.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        """Start released."""
        super().__init__(abort)
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
        return bool(self._aborted()) or (not self._held and super().has_requests())

    def schedule(self) -> DiffusionSchedulerOutput:
        """Schedule one cycle; while held, or after an abort, an empty one with the ids of those aborted since the last.

        vllm-omni 0.24 ends aborted requests at empty cycles only, and would keep them beside requests that go on.
        """
        aborted = self._aborted()
        if not self._held and not aborted:
            output = super().schedule()
            if not output.is_empty:
                output.finished_req_ids |= self._unreported
                self._unreported = set()
            return output
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

    scheduler_class: type[HoldableScheduler] = HoldableScheduler

    def __init__(self, od_config: Any, scheduler: Any = None) -> None:
        """Take the parameters of DiffusionEngine."""
        if scheduler is None:
            scheduler = (self.scheduler_class if od_config.step_execution else ArrivalScheduler)(self.abort)
        super().__init__(od_config, scheduler)

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
