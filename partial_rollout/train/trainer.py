"""verl's v1 trainer with mode `partial_rollout`: the tail of every batch is interrupted, and resumed in the next step.

Who is who in the task runner's process, where the training loop runs:

    PartialRolloutTrainer           here                        verl's loop; says when gates close and open
    PartialRolloutReplayBuffer      replay_buffer.py            waits for finished prompt groups: the next batch
    ReplicaFleet                    fleet.py                    one call to all engines: drain, resume, statistics
    SlotTuner                       slot_tuning.py              follows the engines' load with the number of slots
    DepthTuner                      depth_tuning.py             lets more prompts in where slots run idle
    CheckpointKeeper                checkpoints.py              says which checkpoints are whole; removes old ones
    RunLog                          rollout_log.py              logs batches; replays them after a new start
    EngineRecovery                  engine_recovery.py          brings engines back that die while they generate
    RunWatch                        ../runtime/run_watch.py     hears of dead actors; goes on or ends the run
    PhaseWatch                      ../runtime/phase_watch.py   ends a phase of a step that does not go on
    update_engines                  ../weights/update.py        sends weights; starts failed engines again
    PartialRolloutAgentLoopManager  ../agent_loop/manager.py    makes the workers; admits prompts; runs validation

Who is who among the actors:

    RolloutPromptManager            ../runtime/prompt_manager.py    the prompt queue: uids and counts, never tensors
    PartialRolloutAgentLoopWorker   ../agent_loop/worker.py         claims prompts, runs n trajectories for each
    ResumingLLMServerClient         ../rollout/client.py            in a worker: asks an engine for tokens, and again
                                                                    after an interruption
    PartialRolloutServer            ../rollout/server.py            one engine (vLLM) behind a gate
    TransferQueue                   verl's                          prompt rows; tensors of finished trajectories
    Witness                         ../runtime/runner_watch.py      keeps this process' signs of life for the driver

The loops, and what passes between them:

                   admit                              claim, finish
    training step ---------> prompt manager <------------------------ claim loop, one in each worker
     |    ^    |                (uids, counts)                          |   ^
     |    |    +- take_batch -> of the queue                     prompt v   | has ended
     |    |                                                       trajectory, one in each slot
     |    |        tensors                   tensors                |       |   ^
     |    +----------------- TransferQueue <------------------------+       |   | tokens
     |                                                                      v   |
     +------------ drain, weights, resume ------------------------> request: at the gate, then in the engine

| loop          | consumes           | produces                  | waits for             | unblocked by             |
|---------------|--------------------|---------------------------|-----------------------|--------------------------|
| training step | finished groups    | admitted prompts, weights | batch, drain, update  | finish; the engines      |
| claim loop    | pending prompts,   | trajectories; finish, if  | a prompt that fits    | admit, give_back; the    |
|               | ended trajectories | all n of a prompt ended   | its free slots        | end of a trajectory      |
| trajectory    | a prompt, tokens   | tensors                   | tokens, a reward      | the engine               |
| request       | prompt and tokens  | tokens up to the end or   | the gate, the engine  | resume; a decode step,   |
|               | so far             | an interruption           |                       | drain                    |

Each wait ends after a time of `partial_rollout.timeouts`, or of a constant beside the wait, with an error that says who
waited for whom. verl's own waits (log-probs, advantages, update, checkpoint, metrics) have no limit of their own: the
PhaseWatch ends them.

One step, on the trainer's thread; workers and engines generate meanwhile:

    prepare_step    begin_round: the tail policy plans, admit       gate open
    sample          take_batch: wait for enough whole groups        gate open, slots kept full
    on_sample_end   close the gate, drain, release engine memory    gate closed
    (verl)          log-probs, advantages, update, checkpoint       gate closed
    on_step_end     send weights, open the gate                     gate open: interrupted trajectories go on
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, cast

import ray
from verl.trainer.ppo.v1 import PPOTrainer, register_trainer
from verl.utils.debug import marked_timer
from verl.utils.tensordict_utils import assign_non_tensor_stack

from partial_rollout.errors import DataError, EngineDead, WaitTimeout
from partial_rollout.observability import stages
from partial_rollout.observability.events import (
    CheckpointSaved,
    Choice,
    EventWriter,
    GateMoved,
    StepEnded,
    WeightsUpdated,
    events_folder,
)
from partial_rollout.observability.metrics import TrainerMetrics, run_name
from partial_rollout.packing.batch import make_batch_packer
from partial_rollout.rollout.balancer import make_restarted
from partial_rollout.rollout.client import ResumingLLMServerClient
from partial_rollout.runtime.bounded import UNUSUAL, call_bounded
from partial_rollout.runtime.phase_watch import PhaseWatch
from partial_rollout.runtime.placement import on_this_node
from partial_rollout.runtime.processes import (
    PROMPT_MANAGER,
    TASK_RUNNER,
    TRAINING_RANK,
    TRANSFER_QUEUE_CONTROLLER,
    TRANSFER_QUEUE_STORAGE,
)
from partial_rollout.runtime.prompt_manager import create_manager
from partial_rollout.runtime.remote_call import wait_for
from partial_rollout.runtime.run_restarts import DEATHS
from partial_rollout.runtime.run_watch import Interruption, RunWatch, manager_limit_s
from partial_rollout.settings.auto import DEPTH_KEY
from partial_rollout.settings.block import BLOCK
from partial_rollout.settings.derived import depth_bounds, depth_may_move, ignored_limit, read_settings
from partial_rollout.settings.drafts import seldom_drafts
from partial_rollout.settings.flag import TRAINER_MODE
from partial_rollout.train.checkpoints import CheckpointKeeper
from partial_rollout.train.depth_tuning import DepthTuner
from partial_rollout.train.engine_recovery import EngineRecovery
from partial_rollout.train.fleet import ReplicaFleet
from partial_rollout.train.last_checkpoint import LastCheckpoint
from partial_rollout.train.metrics import curves, numbers, queue_metrics
from partial_rollout.train.nodes import remove_elsewhere
from partial_rollout.train.queue_checkpoint import (
    forget_validation,
    load_queue,
    load_tokens,
    restore_queue,
    save_queue,
    save_tokens,
)
from partial_rollout.train.restarts import Restarts
from partial_rollout.train.roles import other_actors, training_ranks, transfer_queue_actors
from partial_rollout.train.rollout_log import RunLog, logs_rollouts, prompt_digest, remove_log_after
from partial_rollout.train.save_cadence import SaveCadence
from partial_rollout.train.shutdown import shutdown_run
from partial_rollout.train.slot_tuning import SlotTuner
from partial_rollout.train.uncorrected import UncorrectedTokens
from partial_rollout.train.workers import use_workers
from partial_rollout.weights.update import update_engines

if TYPE_CHECKING:
    from collections.abc import Sequence, Sized
    from pathlib import Path

    from omegaconf import DictConfig
    from tensordict import TensorDict
    from transfer_queue import KVBatchMeta

    from partial_rollout.agent_loop.manager import PartialRolloutAgentLoopManager
    from partial_rollout.agent_loop.trajectory import Saved
    from partial_rollout.core.depth import DepthDecision
    from partial_rollout.core.queue.tail import RoundPlan
    from partial_rollout.core.slots import SlotDecision
    from partial_rollout.rollout.replica import PartialRolloutReplica
    from partial_rollout.train.replay_buffer import PartialRolloutReplayBuffer

logger = logging.getLogger(__name__)

NEEDED_TO_SAVE = (TASK_RUNNER, TRAINING_RANK, PROMPT_MANAGER, TRANSFER_QUEUE_CONTROLLER, TRANSFER_QUEUE_STORAGE)
"""Without these processes no checkpoint can be saved."""
LOG_SHARE = 0.1
"""Share of `timeouts.stop_s` for putting the log of rollouts on the disk."""
SERVER_MODULE = "partial_rollout.rollout.server"
"""Where the class of engine servers is, which imports vLLM."""
TRAIN, SAVE, VALIDATE, REPORT = "train", "save", "validate", "report"
"""Kinds of phases of a step that the PhaseWatch limits; all else has a limit of its own."""
ADMIT_TIMEOUT_S = 600.0
"""Long, because the first fetch starts the dataloader's workers, and rows with images are large."""


class PartialRolloutTrainer(PPOTrainer):
    """verl's PPO/GRPO trainer; batches come from the prompt manager, unfinished trajectories go on next step."""

    # Attributes of verl's trainer; `apply_mode` has put our classes into the configuration that verl makes them from.
    agent_loop_manager: PartialRolloutAgentLoopManager
    replay_buffer: PartialRolloutReplayBuffer
    checkpoint_manager: Any
    """verl's `auto_await` makes its methods block here, although their annotations say coroutine."""
    _log: RunLog | None = None
    """From `fit` on, if the run has a log of rollouts."""

    def __init__(self, config: DictConfig) -> None:
        self.settings = read_settings(config)
        self.packer = make_batch_packer(config, self.settings.block)
        self.manager = create_manager(self.settings.block, config.data.train_batch_size, on_this_node())
        # verl's name: what its loop adds to the metrics of the step that ends next.
        self._pending_sync_metrics: dict[str, float] = {}
        self._round_kind = ""
        self._longest_update_s = 0.0
        self._version = 0
        """Weight version that the engines were sent last."""
        self._checkpoints = CheckpointKeeper(config, self._remove_elsewhere if config.trainer.nnodes > 1 else None)
        self._events = EventWriter(events_folder(self.settings.block), "trainer", keep_all=True)
        self._ray_metrics = TrainerMetrics(run_name(events_folder(self.settings.block)))
        self._uncorrected = UncorrectedTokens(config)
        self.is_shut_down = False
        self._phase = PhaseWatch(self.settings.block.timeouts.train_s, "was starting")
        self._cadence = SaveCadence(self.settings.block.minutes_between_saves)
        interruption = Interruption(self.settings.block.timeouts.stop_s)
        self._last_checkpoint = LastCheckpoint(interruption.left)
        self.ends_with = ""
        """Error that ends the run, if no death is its cause."""
        self.watch = RunWatch(
            self.manager,
            interruption,
            doing=lambda: self._phase.doing,
            step=lambda: getattr(self, "global_steps", None),
            start_s=self.settings.block.timeouts.start_s,
            answer_s=self.settings.block.timeouts.call_s,
            handles_need=SERVER_MODULE,
        )
        self.watch.start(transfer_queue_actors())
        with self.watch.stops_at_an_error():
            super().__init__(config)
        for remark_on in (ignored_limit, seldom_drafts):  # verl's own modes warn of the first too
            if remark := remark_on(self.config):
                logger.warning("%s", remark)

    @property
    def doing(self) -> str:
        """What the trainer does, as a sentence about the past: it is said of a trainer that has died."""
        return self._phase.doing

    # ---- verl's hooks ----

    def get_llm_client(self) -> ResumingLLMServerClient:
        """Return the client that resumes interrupted generations by itself; agent loops use it as any verl client."""
        make_restarted(self.llm_server_manager, self.settings.num_slots)
        client = self.llm_server_manager.get_client(client_cls=ResumingLLMServerClient)
        return cast("ResumingLLMServerClient", client)

    def on_init_end(self) -> None:
        """Send the loaded weights to the engines. Their gates are open from the start."""
        replicas = cast("Sequence[PartialRolloutReplica]", self.llm_server_manager.get_replicas())
        self.fleet = ReplicaFleet(replicas, self.settings.block.timeouts, self.watch)
        self._send_weights(self.global_steps)
        self._report_step("open")

    def fit(self, agent_loop_manager: PartialRolloutAgentLoopManager) -> None:
        """Train with verl's loop; whatever ends it, shut the run down within bounded time."""
        is_complete = False
        try:
            with self.watch.interrupts():
                self._prepare(agent_loop_manager)
                super().fit(agent_loop_manager)
            self.watch.complete()
            is_complete = True
        except Exception as error:
            self.watch.bound_end(error)
            # A dead actor shows here as whatever its caller met; the watch may know who died, and of what.
            named = self.watch.explain(error)
            self.ends_with = "" if isinstance(named, DEATHS) else f"{type(named).__name__}: {named}"
            self._save_last_checkpoint()
            if named is error:
                raise
            raise named from error
        finally:
            self._ray_metrics.close()
            if self._log is not None:
                self._log.end(is_complete=is_complete, timeout_s=self.watch.left.share(LOG_SHARE))
            shutdown_run(self)

    def _prepare(self, agent_loop_manager: PartialRolloutAgentLoopManager) -> None:
        """Make what takes part in the training, and watch who does."""
        self.slot_tuner = self._make_slot_tuner(agent_loop_manager)
        self.depth_tuner = self._make_depth_tuner()
        look = self.slot_tuner.look if self.slot_tuner else None
        engines = EngineRecovery(self.fleet, self._bring_back, step=lambda: self.global_steps)
        agent_loop_manager.engines = engines
        if logs_rollouts(self.config, self.settings.block):
            self._log = RunLog(self.config, agent_loop_manager)
        models = self.config.actor_rollout_ref
        mini_batch = models.actor.ppo_mini_batch_size * models.rollout.n
        self.replay_buffer.bind(
            self.manager,
            agent_loop_manager,
            self.settings.block,
            mini_batch=mini_batch,
            look=look,
            on_taken=self._last_checkpoint.taken,
            events=self._events,
            engines=engines,
            log=self._log,
            elsewhere=self._phase.elsewhere,
        )
        restarts = Restarts(self, agent_loop_manager, step=lambda: self.global_steps)
        self.watch.react(restarts.reactions())
        # Training ranks wait for a dead TransferQueue for ever; without it they can save nothing.
        self.watch.release({kind.role: self._end_ranks for kind in (TRANSFER_QUEUE_CONTROLLER, TRANSFER_QUEUE_STORAGE)})
        self.watch.watch(other_actors(self, agent_loop_manager))
        self._phase.begin("prepared to train", REPORT)
        self._phase.start(self.watch, self.manager, lambda: training_ranks(self))

    def _end_ranks(self) -> None:
        for _, rank in training_ranks(self):
            ray.kill(rank)

    def close_manager(self) -> None:
        """End all waits at the prompt manager."""
        self._ask(self.manager.close.remote("run ended"))

    def on_train_begin(self) -> None:
        """Start the workers' claim loops; the prompts of a restored queue are admitted by now."""
        stages.begin(stages.FIRST_STEP)
        num_taken, saved_step = self._ask(self.manager.statistics.remote()).taken, self.global_steps - 1
        self._last_checkpoint.begin(saved_step, num_taken)
        self._cadence.begin(saved_step)
        self.agent_loop_manager.start()

    def on_validate_begin(self) -> None:
        """Say what the trainer does; also before training."""
        self._phase.begin(f"validated the weights of step {self._version}", VALIDATE)

    def on_validate_end(self) -> None:
        """What follows are metrics and logs."""
        self._phase.begin(f"reported step {self.global_steps}", REPORT)

    def prepare_step(self) -> dict[str, float]:
        """Begin a round: the tail policy says which deferred prompts go on and how many new prompts are admitted."""
        self._begin_wait(f"generated the batch of step {self.global_steps}")
        return {"partial_rollout/resumed_groups": float(self._begin_round())}

    def _begin_wait(self, doing: str) -> None:
        self._phase.begin(doing)
        if self.depth_tuner is not None:
            self.depth_tuner.begin_wait()

    def _begin_round(self) -> int:
        """Begin a round; returns how many deferred prompts go on."""
        tuners = [tuner for tuner in (self.slot_tuner, self.depth_tuner) if tuner is not None]
        statistics = self.fleet.statistics() if tuners else ()
        for tuner in tuners:
            tuner.begin(statistics)
        plan = cast("RoundPlan", self._ask(self.manager.begin_round.remote()))
        self._round_kind = plan.kind
        if plan.num_fresh > 0:
            self._add_prompts_to_generate(plan.num_fresh)
        return plan.num_resumed

    def on_sample_end(self) -> None:
        """Interrupt unfinished requests and release the engines' memory."""
        self._phase.begin(f"interrupted the engines in step {self.global_steps}")
        # Before the drain: afterwards engines hold nothing that tells how full they were.
        self._tune()
        self._interrupt()
        self.fleet.sleep()
        self._phase.begin(f"trained step {self.global_steps}", TRAIN)
        if self.curr_step_profile:
            self._stop_rollout_profiling()

    def _interrupt(self) -> None:
        """Close all gates; unfinished requests leave the engines or stay there, as the interrupt mode says."""
        with marked_timer("drain", self.timing_raw, color="red"):
            interrupted = self.fleet.drain()
        self._note_gate(is_open=False, seconds=self.timing_raw["drain"], interrupted=interrupted)
        self._pending_sync_metrics["partial_rollout/interrupted"] = interrupted
        self._pending_sync_metrics["partial_rollout/deferred_groups"] = self.replay_buffer.num_deferred
        self._report_step("closed")

    def on_step_end(self) -> None:
        """Send weights, then open the gates: interrupted requests go on. After the last step none of them goes on."""
        self._save_by_time()
        self._phase.begin(f"sent the weights of step {self.global_steps} to the engines")
        # Before the gates open: after the last step parked requests would begin responses that nobody trains.
        if self.global_steps >= self.total_training_steps:
            self.agent_loop_manager.stop()
            self.fleet.reject_parked()
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self._send_weights(self.global_steps)
        with marked_timer("resume", self.timing_raw, color="red"):
            self._resume()
        self._note_gate(is_open=True, seconds=self.timing_raw["resume"])
        self._report_step("open")
        self.agent_loop_manager.forget_claimed()
        if self._log is not None:
            self._log.forget_claimed()
        self._last_checkpoint.step_ended(self.global_steps)
        self._phase.begin(f"reported step {self.global_steps}", REPORT)

    # ---- verl methods without a hook ----

    def init(self) -> None:
        """Missing hook: an error. verl's task runner closes TransferQueue before anybody is told of it."""
        with self.watch.stops_at_an_error():
            super().init()

    def _init_dataloader(self) -> None:
        """Missing hook: a check of the data. verl divides by zero if there is less than one batch."""
        super()._init_dataloader()
        if self.steps_per_epoch < 1:
            data, num_rows = self.config.data, len(cast("Sized", self.train_dataset))
            raise DataError(
                f"data.train_files has {num_rows} rows with prompts of up to data.max_prompt_length="
                f"{data.max_prompt_length} tokens; at least data.train_batch_size={data.train_batch_size} are needed "
                "(give more data, lower data.train_batch_size or raise data.max_prompt_length)"
            )

    def _add_prompts_to_generate(self, *args: Any, **kwargs: Any) -> Any:
        """Missing hook: a deadline. verl waits for dataloader workers and for TransferQueue without one."""
        admit = super()._add_prompts_to_generate
        # A prompt between dataloader and queue would be in no checkpoint.
        step, self._last_checkpoint.step = self._last_checkpoint.step, None
        try:
            admitted = call_bounded(
                lambda: admit(*args, **kwargs),
                timeout_s=ADMIT_TIMEOUT_S,
                who_waits="trainer waits for the dataloader and TransferQueue to take in prompts",
            )
        except WaitTimeout:
            self.replay_buffer.require_answer()  # otherwise it is the dataloader that is silent
            raise
        self._last_checkpoint.step = step
        return admitted

    def _init_resource_pool_mgr(self) -> None:
        """Missing hook: the class of the training workers."""
        super()._init_resource_pool_mgr()
        use_workers(self.role_worker_mapping, packed=self.packer is not None, channel=self.settings.uses_channel)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> KVBatchMeta:
        """Missing hook: which rank trains which trajectory. verl's method, which pads the batch, runs first."""
        sampled = list(batch.keys)
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)
        if self.packer is not None:
            self.packer.require_ranks(max(self.actor_rollout_wg._dispatch_info["actor"]) + 1)
            self.packer.arrange(batch, sampled, metrics)
        return batch

    def _reissue_inflight_prompts(self, partition_id: str = "train") -> int:
        """Missing hook: restored prompts. verl pushes them to workers again; here they go back to the prompt queue."""
        step, num_prompts = self.global_steps - 1, 0
        snapshot = load_queue(self.config, step)
        tokens: Saved = {}
        if snapshot is not None:
            snapshot, num_prompts = restore_queue(snapshot, self._ask, self.manager, partition_id)
            # After the queue: nobody would ever claim a prompt that was dropped there, and forget its tokens.
            tokens = load_tokens(snapshot, self.config, step)
            logger.info("%d unfinished trajectories have tokens in the checkpoint", len(tokens))
        if self._log is not None:
            tokens |= self._log.begin(step, snapshot, tokens)
        if tokens:
            self.agent_loop_manager.restore_tokens(tokens)
        return num_prompts

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        """Missing hook: the names of prompts. What the log of rollouts has of a prompt is found by its name."""
        if self._log is not None:
            uids: Any = list(batch["uid"])
            asked = zip(batch["index"], batch["raw_prompt"], strict=True)
            assign_non_tensor_stack(batch, "uid", self._log.name_prompts(uids, [prompt_digest(each) for each in asked]))
        return super()._submit_batch_to_rollout(batch)

    def _load_checkpoint(self) -> None:
        """Missing hook: before load. verl trusts its tracker file, which may be empty or name a torn checkpoint.

        And after it: a last checkpoint may have been saved in the middle of a validation.
        """
        self._checkpoints.before_load()
        super()._load_checkpoint()
        if self.global_steps:
            forget_validation()

    def _save_checkpoint(self) -> None:
        """Missing hook: before and after a save. Tokens and queue are written before TransferQueue and tracker file.

        In this order a prompt that finishes between two writes is at worst generated again; it is never lost.
        """
        is_last = self.global_steps >= self.total_training_steps
        if self._replays and not is_last:
            logger.info("step %d is not saved: logged batches are still to be trained", self.global_steps)
            return
        self._phase.begin(f"saved the checkpoint of step {self.global_steps}", SAVE)
        started_s = time.monotonic()
        self._checkpoints.before_save(self.global_steps)
        # First of all: what workers finish from now on may be in none of the checkpoint's parts.
        if self._log is not None:
            self._log.before_save(self.global_steps)
        else:
            remove_log_after(self.config, self.global_steps)
        # Tokens before the queue: a group that finishes in between is done in the queue, and needs no tokens. The other
        # way round its prompt would be ongoing in the queue, and its tokens forgotten.
        tokens, missing = self.agent_loop_manager.tokens_in_flight()
        if missing:
            logger.warning(
                "the checkpoint has no tokens of %s. Weights and prompts are whole: a run that goes on from it "
                "generates these unfinished responses again",
                "; ".join(missing),
            )
        save_tokens(tokens, self.config, self.global_steps)
        snapshot = self._ask(self.manager.snapshot.remote())
        save_queue(snapshot, self.config, self.global_steps)
        if self._log is not None and not is_last:
            self._log.carry(self.global_steps, snapshot)
        super()._save_checkpoint()
        num_bytes = self._checkpoints.after_save(self.global_steps)
        if self._log is not None:
            self._log.after_save(self.global_steps)
        self._last_checkpoint.saved(self.global_steps)
        seconds = time.monotonic() - started_s
        self._cadence.saved(self.global_steps, seconds)
        self._events.write(CheckpointSaved(step=self.global_steps, seconds=seconds, num_bytes=num_bytes))
        # Last of all: a run that ends has little time, and the new checkpoint is whole without it.
        self._checkpoints.remove_old()

    def _remove_elsewhere(self, folders: Sequence[Path]) -> None:
        remove_elsewhere([rank for _, rank in training_ranks(self)], folders, self.settings.block.timeouts.call_s)

    @property
    def _replays(self) -> bool:
        """Whether logged batches are still to be trained: a checkpoint now would separate them from the others."""
        return self._log is not None and self._log.is_replaying

    def _save_by_time(self) -> None:
        """Save where `save_minutes` says so, at the place in a step at which verl saves by steps."""
        if not self._cadence.is_due(self.global_steps, is_last=self.global_steps >= self.total_training_steps):
            return
        if self._replays:
            return
        if lack := self._checkpoints.lack_of_room():
            logger.warning(
                "step %d is not saved: %s. Make room below trainer.default_local_dir, or set %s.save_minutes=null",
                self.global_steps,
                lack,
                BLOCK,
            )
            self._cadence.put_off()
            return
        with marked_timer("save_checkpoint", self.timing_raw, color="green"):
            self._save_checkpoint()

    def _save_last_checkpoint(self) -> None:
        """The run ends before its time: save what the steps so far have trained, if it is in one piece."""

        def drain() -> None:
            self.fleet.drain()
            self.fleet.sleep()

        def num_taken() -> int:
            # First: a call for a batch that this trainer has left would take one between the count and the snapshot.
            self._ask(self.manager.request_stop.remote("the run ends before its time"))
            return self._ask(self.manager.statistics.remote()).taken

        last = self._last_checkpoint
        self._phase.begin("saved its last checkpoint")
        if not last.is_due or self.watch.has_lost(*NEEDED_TO_SAVE):
            return
        if self._replays:
            logger.info("the run ends in a replay: the same command goes on from the last checkpoint and the log")
            return
        # verl's saving takes folder and contents by `global_steps`: here the last step that is whole.
        self.global_steps, step = last.step or 0, self.global_steps
        if last.save(drain, num_taken, self._save_checkpoint):
            logger.info("step %d is saved: the same command goes on from it", self.global_steps)
            self.global_steps = step

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        """Missing hook: metrics of the whole step. Adds those of the prompt queue, the round and the drain."""
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        metrics |= queue_metrics(self._ask(self.manager.statistics.remote()))
        for name in ("critic/score/mean", "response_length/mean"):
            metrics[f"partial_rollout/round/{self._round_kind}/{name}"] = metrics[name]
        metrics["partial_rollout/drain_ms"] = timing_raw["drain"] * 1000
        metrics["partial_rollout/resume_ms"] = timing_raw["resume"] * 1000
        self._uncorrected.look(global_steps, metrics)
        # verl adds nothing to the metrics between this call and its loggers but the time of a rollout dump.
        shown = numbers(metrics)
        self._events.write(StepEnded(step=global_steps, total=self.total_training_steps, metrics=shown))
        self._ray_metrics.update(shown)
        metrics |= curves(shown)  # not into the event stream, which has their values already

    def _log_rollout_data(self, batch: KVBatchMeta, timing_raw: dict[str, Any], rollout_data_dir: str) -> None:
        """Missing hook: how often verl writes `trainer.rollout_data_dir`; its own trainers do it in every step."""
        if self.global_steps % self.settings.block.dump_every == 0:
            super()._log_rollout_data(batch, timing_raw, rollout_data_dir)

    def _dump_generations(self, *, reward_extra_infos_dict: dict[str, Any], **texts: Any) -> None:
        """Missing hook: further columns of a dump. Adds the weight versions of each response that was trained."""
        spans = self.replay_buffer.version_spans
        keys = reward_extra_infos_dict.get("uid", [])
        is_batch = any(key in spans for key in keys)  # with rows that pad it
        columns = {"weight_versions": [spans.get(key, []) for key in keys]} if is_batch else {}
        super()._dump_generations(reward_extra_infos_dict=reward_extra_infos_dict | columns, **texts)

    def _tune(self) -> None:
        """When a batch is complete: how full slots and engines were, and what follows for slots and depth."""
        is_kv_full, kv_usage, metrics = None, 0.0, self._pending_sync_metrics
        is_replayed = self._log is not None and self._log.has_replayed  # idle slots and engines then say nothing
        if self.slot_tuner is not None:
            if not is_replayed:
                self.slot_tuner.look()
            kv_usage = self.slot_tuner.kv_usage_max
            is_kv_full = self.slot_tuner.was_full_with_few
            metrics |= self.slot_tuner.metrics()
        statistics = self.fleet.statistics()
        running = sum(each.mean_running for each in statistics)
        # By the slots at the start: adaptive slots are added until some are free, so of them some always look idle.
        used = running / self.settings.num_slots
        metrics |= {"partial_rollout/mean_running": running, "partial_rollout/slot_utilisation": used}
        metrics["partial_rollout/kv_usage"] = max([kv_usage, *(each.load.kv_usage for each in statistics)])
        if self.depth_tuner is not None:
            metrics["partial_rollout/depth"] = self.depth_tuner.depth
            status = self._ask(self.manager.status.remote())
            taken = status.mean_slots_in_use / self.settings.num_slots
            metrics["partial_rollout/slots_taken"] = taken
            if is_replayed:
                self.depth_tuner.pass_over()
            else:
                self.depth_tuner.look(statistics, taken=taken, pending=status.queue.pending, is_kv_full=is_kv_full)
                metrics["partial_rollout/waited"] = self.depth_tuner.waited

    def _make_depth_tuner(self) -> DepthTuner | None:
        block = self.settings.block
        # Where the statistics were turned off by hand, nothing would say when the KV cache is full.
        if not depth_may_move(block) or self.config.actor_rollout_ref.rollout.disable_log_stats:
            return None
        return DepthTuner(
            depth_bounds(block, block.tail.interrupt_mode),
            batch=self.settings.batch,
            set_capacity=lambda capacity: self._ask(self.manager.set_capacity.remote(capacity)),
            note=lambda decision: self._note_choice(DEPTH_KEY, decision),
        )

    def _make_slot_tuner(self, agent_loops: PartialRolloutAgentLoopManager) -> SlotTuner | None:
        if not self.settings.block.slots.are_adaptive:
            return None
        return SlotTuner(
            self.settings.num_slots,
            self.settings.slot_bounds,
            fleet=self.fleet,
            agent_loops=agent_loops,
            slots_in_use=lambda: self._ask(self.manager.status.remote()).slots_in_use,
            note=lambda decision: self._note_choice(f"{BLOCK}.num_slots", decision),
        )

    def _note_choice(self, key: str, decision: SlotDecision | DepthDecision) -> None:
        before, after, reason = decision.before, decision.after, decision.reason
        self._events.write(Choice(step=self.global_steps, key=key, before=before, after=after, reason=reason))

    def _note_gate(self, *, is_open: bool, seconds: float, interrupted: int = 0) -> None:
        # A gate closes on tokens of the weights from before this step's update.
        version = self.global_steps if is_open else self.global_steps - 1
        moved = GateMoved(
            step=self.global_steps, version=version, is_open=is_open, seconds=seconds, interrupted=interrupted
        )
        self._events.write(moved)

    def _bring_back(self, failed: dict[int, str]) -> None:
        """Relaunch engines that died while they generated; all engines are interrupted, and get the same weights."""
        doing, version = self.doing, self._version
        self._phase.begin(f"relaunched engines in step {self.global_steps}")
        started_s = time.monotonic()
        interrupted = self.fleet.drain()
        self._note_gate(is_open=False, seconds=time.monotonic() - started_s, interrupted=interrupted)
        self.fleet.relaunch(failed)
        self.fleet.sleep()
        self._send_weights(version, num_relaunched=len(failed))
        self._resume()
        self._events.write(GateMoved(step=version, version=version, is_open=True))
        self._phase.begin(doing)

    def _resume(self) -> None:
        """Open all gates. An engine that dies meanwhile is brought back by whoever waits for tokens next."""
        try:
            self.fleet.resume()
        except EngineDead as error:
            if not self.fleet.failed_updates():
                raise
            logger.warning("an engine died when its gate was to open: %s", error)

    def _send_weights(self, version: int, num_relaunched: int = 0) -> None:
        started_s = time.monotonic()
        num_relaunched += self._update_engines(version)
        self._version, seconds = version, time.monotonic() - started_s
        self._longest_update_s = max(self._longest_update_s, seconds)
        self._events.write(WeightsUpdated(step=version, version=version, seconds=seconds, relaunches=num_relaunched))
        relaunches = self._pending_sync_metrics.get("partial_rollout/engine_relaunches", 0)
        self._pending_sync_metrics["partial_rollout/engine_relaunches"] = relaunches + num_relaunched

    def _update_engines(self, version: int) -> int:
        """Send weights to all engines; returns how many engines were started again for it."""
        timeout_s = self.settings.block.timeouts.resume_s
        sound_s = UNUSUAL * self._longest_update_s
        if not self.settings.uses_channel:
            call_bounded(
                lambda: self.checkpoint_manager.update_weights(version),
                timeout_s=timeout_s,
                sound_s=sound_s,
                who_waits=f"trainer waits for weight version {version} to reach the engines",
                check=self.fleet.require_health,
            )
            return 0
        # The call that checkpoint_manager.update_weights makes too; but that stops waiting when the first rank fails.
        return update_engines(
            lambda: self._start_update(version),
            self.fleet,
            version=version,
            relaunches=self.settings.block.weights.relaunches,
            timeout_s=timeout_s,
            sound_s=sound_s,
            before_resend=self.fleet.sleep,
        )

    def _start_update(self, version: int) -> Sequence[ray.ObjectRef[Any]]:
        """Let every training rank send its part."""
        return self.actor_rollout_wg.update_weights(global_steps=version, mode="naive")

    def _report_step(self, gate: str) -> None:
        version = self.global_steps - 1 if gate == "closed" else self.global_steps
        self._ask(self.manager.report_step.remote(self.global_steps, version, gate))

    def _ask(self, ref: ray.ObjectRef[Any]) -> Any:
        timeout_s = manager_limit_s(self.settings.block.timeouts.call_s)
        with self._phase.left_out():  # it may freeze, and be started again meanwhile
            return wait_for(ref, timeout_s=timeout_s, who_waits="trainer waits for the prompt manager")


# Not as a decorator: verl's hides the class from type checkers, and from those that derive from it.
register_trainer(TRAINER_MODE)(PartialRolloutTrainer)
