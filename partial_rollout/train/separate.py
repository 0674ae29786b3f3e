"""The trainer with `partial_rollout.placement=separate`: engines are on devices of their own and go on while it trains.

One step, on the trainer's thread; engines generate all the time but for the weight update:

    sample          take_batch: the batch may be whole already         gate open
    on_sample_end   begin_round: admit prompts in place of the batch   gate open
    (verl)          log-probs, advantages, update                      gate open
    (verl)          checkpoint, in some steps                          gate closed: it has the tokens of open requests
    on_step_end     close the gate, send weights, open the gate        gate open: interrupted trajectories go on

Everything else is that of `trainer.py`: queue, workers, recovery, views. The engines are verl's standalone replicas, of
our class. verl makes training ranks without an engine (its switch `_enable_hybrid_replicas`), and ranks send weights by
`weights.checkpoint_engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import ray
from verl.trainer.ppo.v1 import register_trainer
from verl.workers.rollout.llm_server import LLMServerManager

from partial_rollout.observability.step_line import ROLLOUT_GPUS
from partial_rollout.runtime.remote_call import wait_for_all
from partial_rollout.settings.derived import CHECKPOINT_ENGINE, num_rollout_devices
from partial_rollout.settings.flag import SEPARATE_MODE
from partial_rollout.train.trainer import TRAIN, PartialRolloutTrainer
from partial_rollout.weights.checkpoint_engine import Target, share_targets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transfer_queue import KVBatchMeta


class SeparateTrainer(PartialRolloutTrainer):
    """A PartialRolloutTrainer whose engines are interrupted for a weight update only."""

    _enable_hybrid_replicas = False
    _has_begun_round = False
    """Whether the prompts of the next step are admitted."""
    _generates = True
    """Whether the gates are open."""

    def prepare_step(self) -> dict[str, float]:
        """Begin a round, unless the step before has."""
        self._begin_wait(f"waited for the batch of step {self.global_steps}")
        if not self._has_begun_round:
            self._begin_round()
        self._has_begun_round = False
        return {}

    def on_sample_end(self) -> None:
        """Let the engines have prompts in place of those of the batch, and go on."""
        self._tune()
        # Now and not in the next step: engines would have less to do the longer the model trains.
        if self.global_steps < self.total_training_steps:
            self._begin_round()
            self._has_begun_round = True
        self._phase.begin(f"trained step {self.global_steps}", TRAIN)
        if self.curr_step_profile:
            self._stop_rollout_profiling()

    def on_step_end(self) -> None:
        """Interrupt, then as the parent."""
        self._interrupt_once()
        super().on_step_end()

    def _save_checkpoint(self) -> None:
        """Tokens of requests in the engines would be in no part of the checkpoint: interrupted, workers have them."""
        self._interrupt_once()
        super()._save_checkpoint()

    def _save_last_checkpoint(self) -> None:
        self._generates = False  # the parent interrupts by itself, as far as the engines still answer
        super()._save_last_checkpoint()

    def _interrupt_once(self) -> None:
        if self._generates:
            self._phase.begin(f"interrupted the engines in step {self.global_steps}")
            self._interrupt()
            self._generates = False

    def _resume(self) -> None:
        super()._resume()
        self._generates = True

    def _setup(self) -> None:
        """Start engines on devices of their own; verl has made a manager of none."""
        super()._setup()
        ray.kill(self.llm_server_manager.global_load_balancer)
        self.llm_server_manager = cast("LLMServerManager", LLMServerManager.create(config=self.config))
        targets = [
            Target(replica.replica_rank, replica.server_handle, replica.world_size)
            for replica in self.llm_server_manager.get_replicas()
        ]
        ranks = self.actor_rollout_wg
        shares = share_targets(targets, ranks.world_size)
        wait_for_all(
            ranks.execute_checkpoint_engine(["aim"] * len(shares), shares),
            timeout_s=self.settings.block.timeouts.call_s,
            who_waits="trainer waits for the training ranks to learn of their engines",
        )

    def _start_update(self, version: int) -> Sequence[ray.ObjectRef[Any]]:
        return self.actor_rollout_wg.update_weights(global_steps=version, mode=CHECKPOINT_ENGINE)

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        metrics[ROLLOUT_GPUS] = num_rollout_devices(self.config)
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)

    def _get_n_gpus_for_throughput(self) -> int:
        return super()._get_n_gpus_for_throughput() + num_rollout_devices(self.config)


register_trainer(SEPARATE_MODE)(SeparateTrainer)
