"""vllm-omni's diffusion engine with a hold between denoise steps; its `engine_backend` names this class."""

from __future__ import annotations

from typing import Any, cast

from vllm_omni.diffusion.diffusion_engine import DiffusionEngine

from partial_rollout.diffusion.sample import SampleOptions
from partial_rollout.diffusion.scheduler import HoldableScheduler

HOLD = "hold_denoising"
RELEASE = "release_denoising"
BOUNDARY = "denoising_boundary"
"""Of the worker extension: does nothing, and is answered between two steps."""


class HoldableEngine(DiffusionEngine):
    """Takes two calls of its own among those to the workers: AsyncOmni offers no other way to an engine.

    HOLD    from now on no step starts; answered when none is running, with the names in `arrivals` (of all requests
            that were sent here and not answered) that have not come yet, and the names of all that have not begun.
            It must not wait for the missing ones: they would wait behind it
    RELEASE steps go on

    The answer to HOLD is sure because the call behind it is worked off by the thread that takes the steps.
    """

    def _init_scheduler(self, od_config: Any, scheduler: Any = None, *args: Any, **kwargs: Any) -> None:
        self._arrived: set[str] = set()
        if scheduler is None and od_config.step_execution:
            scheduler = HoldableScheduler()
        super()._init_scheduler(od_config, scheduler, *args, **kwargs)

    def _add_prepared_request(self, request: Any) -> str:
        with self._cv:
            self._arrived.add(SampleOptions.of(request.sampling_params.extra_args).name)
            return super()._add_prepared_request(request)

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
            return self._hold(timeout, **(kwargs or {}))
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

    def _hold(self, timeout: float | None, arrivals: list[str]) -> dict[str, list[str]]:
        expected = set(arrivals)
        with self._cv:
            self._holdable.hold()
            self._arrived &= expected
            missing = sorted(expected - self._arrived)
        super().collective_rpc(BOUNDARY, timeout)
        with self._cv:
            return {"missing": missing, "unstarted": self._holdable.unstarted()}
