"""Our trainer's step with nothing behind the rollout: what is timed is queue, workers, engine, drain and resume.

verl's loop (`fit`) and our trainer run as in a job: rounds are planned, prompts admitted through TransferQueue,
batches taken, gates closed and opened. Log-probs, advantages and the update are left out, and so is the transfer of
weights: the engines get a new version number and forget their caches, as after an update, and keep their weights.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass

from partial_rollout.runtime.remote_call import wait_for_all
from partial_rollout.train.fleet import ReplicaFleet
from partial_rollout.train.trainer import PartialRolloutTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omegaconf import DictConfig
    from transfer_queue import KVBatchMeta
    from verl.experimental.reward_loop import RewardLoopManager
    from verl.workers.rollout.llm_server import LLMServerManager

    from partial_rollout.rollout.replica import PartialRolloutReplica
    from partial_rollout.settings.block import PartialRolloutConfig

Record = dict[str, float]
NO_GPUS: Any = None
"""Nothing is trained, so there is no worker group."""


class SharedFleet(ReplicaFleet):
    """Engines that outlive the trainer: at its end they are empty, and their gates open."""

    def shutdown(self) -> None:
        """Interrupt what runs, turn everybody away and open the gates."""
        self.drain()
        self.reject_parked()
        self.resume()


class RolloutTrainer(PartialRolloutTrainer):
    """Generates and takes batches as its configuration says; trains nothing."""

    settings: PartialRolloutConfig

    def __init__(self, config: DictConfig, servers: LLMServerManager, on_step: Callable[[int, Record], bool]) -> None:
        """`on_step` is told of every step's number and numbers, and says whether there is to be another one."""
        self._servers, self._on_step = servers, on_step
        super().__init__(config)

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.llm_server_manager = self._servers
        engine = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        self.checkpoint_manager = CheckpointEngineManager(engine, NO_GPUS, self._servers.get_replicas())
        # With workers of its own, though none, verl asks for no reward after the rollout.
        self.reward_loop_manager = cast("RewardLoopManager", SimpleNamespace(reward_loop_worker_handles=()))
        self.global_steps = 0

    def on_init_end(self) -> None:
        """As our trainer's, with engines that stay."""
        super().on_init_end()
        self.fleet = SharedFleet(self._replicas, self.settings.timeouts)

    def start_anew(self) -> None:
        """Version 0 and no cache, whoever used the engines since this trainer was made."""
        self._send_weights()

    @property
    def _replicas(self) -> Sequence[PartialRolloutReplica]:
        return cast("Sequence[PartialRolloutReplica]", self._servers.get_replicas())

    def _send_weights(self) -> None:
        """What servers do once weights have come: forget caches, unless the mode retains KV, and set the version."""
        servers = [server for replica in self._replicas for server in replica.servers]
        limit: dict[str, Any] = {
            "timeout_s": self.settings.timeouts.call_s,
            "who_waits": "benchmark waits for a server",
        }
        wait_for_all([server.clear_kv_cache.remote() for server in servers], **limit)
        wait_for_all([server.set_global_steps.remote(self.global_steps) for server in servers], **limit)

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        """In place of metrics of training."""
        numbers = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()} | metrics
        if not self._on_step(global_steps, {name: float(value) for name, value in numbers.items()}):
            self.total_training_steps = global_steps

    # ---- what is left out ----

    def _balance_batch(self, batch: KVBatchMeta, *_: Any, **__: Any) -> KVBatchMeta:
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, *_: Any, **__: Any) -> KVBatchMeta:
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, *_: Any, **__: Any) -> KVBatchMeta:
        return batch

    def _update_actor(self, batch: KVBatchMeta, *_: Any, **__: Any) -> KVBatchMeta:
        return batch


class UninterruptedTrainer(RolloutTrainer):
    """Takes batches and never closes a gate: the slots stay full, which is the most that an engine can do.

    No version follows another one, so nothing is said of staleness.
    """

    def on_sample_end(self) -> None:
        """Everything goes on."""

    def on_step_end(self) -> None:
        """Nothing waits for it."""

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *rest: Any, **named: Any) -> None:
        known = {name: value for name, value in metrics.items() if "stale" not in name}
        super()._compute_metrics(batch, known, *rest, **named)
