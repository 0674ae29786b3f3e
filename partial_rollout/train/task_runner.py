"""The Ray actor in which the trainer runs, for both modes."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from partial_rollout.integrations.verl_compat import TaskRunnerBase
from partial_rollout.observability import stages
from partial_rollout.observability.choices import tell
from partial_rollout.observability.events import EventWriter, events_folder
from partial_rollout.observability.log import configure_logging, report_to
from partial_rollout.runtime.death_watch import own_process
from partial_rollout.runtime.processes import TASK_RUNNER
from partial_rollout.runtime.run_watch import Interruption, note_found
from partial_rollout.runtime.runner_watch import send_signs
from partial_rollout.runtime.start_watch import StartWatch
from partial_rollout.settings.derived import read_block
from partial_rollout.settings.flag import is_enabled
from partial_rollout.settings.retention import saves_by_time
from partial_rollout.train.nodes import require_equal_nodes
from partial_rollout.train.resources import require_own_transfer_queue, require_resources
from partial_rollout.train.start_choices import choose_on_cluster

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from ray.actor import ActorHandle


logger = logging.getLogger(__name__)


def _register(*, enabled: bool) -> None:
    """Tell verl of our replicas, and with the flag of our trainers. Here, since the driver needs no vLLM."""
    from partial_rollout.rollout.replica import register_replicas

    register_replicas(partial_rollout=enabled)
    if enabled:
        import partial_rollout.train.separate  # noqa: F401 (registers the trainer modes)


class TaskRunner(TaskRunnerBase):
    """verl's task runner, which first checks the cluster and registers our replica and trainer classes."""

    _start: StartWatch | None = None

    def run(self, config: DictConfig, witness: ActorHandle | None = None) -> None:
        """Train to the end, and send signs of life to `witness` meanwhile.

        Raises:
            ResourcesUnavailable: the cluster cannot give what the run needs, or carries another run.
            VersionError: a node lacks a package, or has another version of it.
        """
        block = read_block(config)
        if witness is not None:
            send_signs(witness, block.timeouts.claim_s, doing=self._doing, ends_with=self._ends_with)
        configure_logging()
        report_to(EventWriter(events_folder(block), "task_runner", keep_all=True))
        note_found(own_process(TASK_RUNNER.role, TASK_RUNNER.role))
        stages.begin(stages.TRAINING)
        enabled = is_enabled(config)
        timeout_s = block.timeouts.resources_s
        require_own_transfer_queue(timeout_s)
        require_resources(config, timeout_s)
        require_own_transfer_queue(0.0)  # another run may have started while this one waited for resources
        folders = {"checkpoints": Path(config.trainer.default_local_dir).absolute(), "events": events_folder(block)}
        if folders["checkpoints"] in require_equal_nodes(folders, block.timeouts.start_s) and saves_by_time(config):
            config.partial_rollout.save_minutes = None
            logger.warning(
                "nothing is saved by time (partial_rollout.save_minutes): the nodes do not share "
                "trainer.default_local_dir, so none of them would have a whole checkpoint. Set trainer.save_freq to "
                "save nevertheless"
            )
        _register(enabled=enabled)
        if enabled:
            tell(choose_on_cluster(config))
        interruption = Interruption(block.timeouts.stop_s)
        self._start = StartWatch(interruption, start_s=block.timeouts.start_s, claim_s=block.timeouts.claim_s)
        self._start.begin()
        try:
            super().run(config)
        except Exception as error:
            named = self._start.explain(error)
            if named is error:
                raise
            raise named from error
        finally:
            # First: `end` waits for a thread that gives the start up, whose next signal would leave out what follows.
            interruption.begin_end()
            self._start.end()
            # `fit` ends what it uses; here an error between the start of the first engine and `fit` is cleaned up.
            if enabled and self.trainer is not None:
                from partial_rollout.train.shutdown import shutdown_run

                shutdown_run(self.trainer)
                self.trainer.watch.ended()
            interruption.ended()

    def init_agent_loop_manager(self) -> None:
        """Start the agent-loop workers, as the last processes; `fit` watches all of them in another way."""
        watch = getattr(self.trainer, "watch", None)  # verl's own trainers have none
        with watch.stops_at_an_error() if watch is not None else contextlib.nullcontext():
            super().init_agent_loop_manager()
        if self._start is not None:
            self._start.end()

    def _ends_with(self) -> str:
        return getattr(self.trainer, "ends_with", "")

    def _doing(self) -> str:
        started = self._start is None or self._start.is_over
        return getattr(self.trainer, "doing", "was starting") if started else f"was starting: {stages.latest()}"
