"""vllm-omni's diffusion engine with a hold between denoise steps; its `engine_backend` names this class."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from vllm_omni.diffusion.diffusion_engine import DiffusionEngine

from partial_rollout.diffusion.sample import OPTIONS_KEY, SampleOptions
from partial_rollout.diffusion.scheduler import HoldableScheduler

HOLD = "hold_denoising"
RELEASE = "release_denoising"
BOUNDARY = "denoising_boundary"
"""Of the worker extension: answered between two steps."""


class HoldableEngine(DiffusionEngine):
    """Takes two calls of its own among those to the workers: AsyncOmni offers no other way to an engine.

    HOLD    from now on no step starts; answered when none is running, with the names of the requests that have not
            begun and how many steps were computed
    RELEASE steps go on

    The answer to HOLD is sure because the call behind it is worked off by the thread that takes the steps. When a
    request has come in, which AsyncOmni does not tell, `SampleOptions.on_arrival` does: the engine of a single stage
    lives in the process of its caller.
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
        """Call the workers; HOLD and RELEASE are for the scheduler."""
        if method == HOLD:
            return self._hold(timeout)
        if method == RELEASE:
            with self._cv:
                # Else the loop may wake to schedule what was aborted, whose state the worker has given away.
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
