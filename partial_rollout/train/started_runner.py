"""A task runner that has to start in time: verl waits for its actor without a bound."""

from __future__ import annotations

from typing import Any

from partial_rollout.errors import ClusterError, WaitTimeout
from partial_rollout.runtime.remote_call import wait_for
from partial_rollout.runtime.termination import heed_termination


class StartedRunner:
    """Stands in for the actor class that `run_ppo` makes its task runner of."""

    def __init__(self, actor_class: Any, timeout_s: float) -> None:
        """`actor_class`: of `ray.remote`; `timeout_s`: from asking for the actor to its being ready."""
        self._actor_class, self._timeout_s = actor_class, timeout_s

    def options(self, **options: Any) -> StartedRunner:
        """As Ray's."""
        return StartedRunner(self._actor_class.options(**options), self._timeout_s)

    def remote(self) -> Any:
        """The actor, which runs. From now on SIGTERM is a KeyboardInterrupt, as Ctrl-C is.

        Raises:
            ClusterError: it has not started in time.
            ray.exceptions.RayError: it died at its start.
        """
        heed_termination()
        runner = self._actor_class.remote()
        who_waits = "the driver waits for the task runner's process to start"
        try:
            wait_for(runner.__ray_ready__.remote(), timeout_s=self._timeout_s, who_waits=who_waits)
        except WaitTimeout as error:
            raise ClusterError(
                f"{error}: no node may have room for it, or the machine be too busy; the reason is "
                "in raylet.out below /tmp/ray/session_latest/logs, the bound is partial_rollout.timeouts.start_s"
            ) from None
        return runner
