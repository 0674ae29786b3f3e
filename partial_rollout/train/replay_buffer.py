"""verl's replay buffer, which here waits for the prompt manager's finished groups instead of polling TransferQueue."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import ray
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, ReplayBufferAsync

from partial_rollout.core.queue.staleness import StalenessBound
from partial_rollout.core.slots import first_look_s
from partial_rollout.errors import AgentLoopBroken, ClusterError, TransferQueueSilent, WaitTimeout
from partial_rollout.observability.events import BatchTaken, EventWriter
from partial_rollout.observability.step_line import REPLAYED
from partial_rollout.runtime.bounded import UNUSUAL, call_bounded
from partial_rollout.runtime.remote_call import wait_for
from partial_rollout.runtime.run_watch import manager_limit_s
from partial_rollout.train.metrics import group_metrics
from partial_rollout.train.stale_mask import StaleTokens, mask_stale_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ray.actor import ActorHandle

    from partial_rollout.agent_loop.manager import PartialRolloutAgentLoopManager
    from partial_rollout.settings.block import PartialRolloutConfig
    from partial_rollout.train.engine_recovery import EngineRecovery
    from partial_rollout.train.rollout_log import RunLog
    from partial_rollout.types import FinishedGroup, ManagerStatus, TakeResult, TrajectorySummary

logger = logging.getLogger(__name__)

MAX_REFILL_BATCHES = 3
"""Prompts that are dropped for a failure and replaced during the wait for one batch, in batches: a broken agent loop
drops for ever."""
FILTERED_WARNING_BATCHES = 3
"""Groups without spread, in batches, after which a wait for one batch is warned of; again at each doubling."""
REPORT_INTERVAL_S = 60.0
"""How often a waiting trainer logs what it waits for."""
NUM_VALUES_SHOWN = 4
"""Metrics of dropped groups that a warning names, the most frequent ones."""


class PartialRolloutReplayBuffer(ReplayBufferAsync):
    """`sample("train")` is `take_batch` at the manager; `sample("val")` is verl's own, once validation has ended.

    verl makes the object and knows none of our parts; `bind` hands them over before the first sample.
    """

    _manager: ActorHandle
    _agent_loops: PartialRolloutAgentLoopManager
    _settings: PartialRolloutConfig
    _look: Callable[[], None] | None
    num_deferred: int = 0
    """Prompts that `take_batch` put off to a later round when it returned the last batch."""
    _longest_wait_s: float = 0.0
    """Longest of the waits that have ended."""
    _last_wait_s: float = math.inf
    """Length of the last wait; before the first one none counts as short."""
    version_spans: dict[str, list[list[int]]]
    """By key of the last batch, in their order: pairs of a weight version and the number of tokens that it sampled."""
    refill_fn: Callable[[int], Any]
    """verl's attribute; in a trainer it is never None."""

    def bind(
        self,
        manager: ActorHandle,
        agent_loops: PartialRolloutAgentLoopManager,
        settings: PartialRolloutConfig,
        *,
        mini_batch: int,
        look: Callable[[], None] | None = None,
        on_taken: Callable[[int], None] = lambda num_groups: None,
        events: EventWriter | None = None,
        engines: EngineRecovery | None = None,
        log: RunLog | None = None,
        elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Hand over the prompt manager, the workers, the run's event stream and its log of rollouts.

        `on_taken` is told of each batch as soon as it has left the queue; `mini_batch` is the number
        of trajectories in a mini-batch; `look` is called at intervals during waits, and in the middle of short ones;
        `engines` brings engines back that die meanwhile; `elsewhere` surrounds the wait for validation, which has a
        limit of its own.
        """
        self._elsewhere = elsewhere
        self._engines, self._log = engines, log
        self._events = events or EventWriter(None, "trainer")
        self._manager, self._agent_loops, self._settings, self._look = manager, agent_loops, settings, look
        self._mini_batch, self._on_taken = mini_batch, on_taken

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Take `batch_size` prompt groups; blocks until they are done.

        Raises:
            WaitTimeout: the batch was not full within partial_rollout.timeouts.batch_s.
            TransferQueueSilent: TransferQueue did not answer.
            AgentLoopBroken: prompts are dropped faster than they finish.
            ActorLost, EngineError: an agent-loop worker ended during the wait.
            ClusterError: validation ended, but not all of its prompts are in TransferQueue.
        """
        if partition_id == "val":
            with self._elsewhere():
                self._agent_loops.wait_validation(self._settings.timeouts.batch_s)
            self._require_validated(global_steps, batch_size)
            return super().sample(global_steps, partition_id, batch_size)
        # Step N trains what the weights of step N - 1 have generated last.
        groups, filtered = self._take(batch_size, global_steps - 1, partition_id)
        self._events.write(_taken(global_steps, groups))
        num_replayed = self._log.taken(global_steps, groups) if self._log else 0
        # The prompts' own rows; those of their trajectories are what is trained.
        self._clear_rows([group.uid for group in groups], partition_id)
        trajectories = [(group, trajectory) for group in groups for trajectory in group.trajectories]
        self.version_spans = {
            trajectory.key: [[span.version, span.num_tokens] for span in trajectory.version_spans]
            for _, trajectory in trajectories
        }
        batch = KVBatchMeta(
            partition_id=partition_id,
            keys=[trajectory.key for _, trajectory in trajectories],
            tags=[_tag(group, trajectory) for group, trajectory in trajectories],
        )
        metrics: dict[str, Any] = group_metrics(groups, trained_version=global_steps - 1)
        if num_replayed:
            metrics[REPLAYED] = num_replayed
        if filtered:  # under verl's names
            metrics["training/filter_groups/evicted_samples"] = filtered.total()
            metrics[DAPO_FILTERED_REWARD_COUNTS_KEY] = dict(filtered)
        if self._settings.tail.max_staleness is not None:
            members = [trajectory for _, trajectory in trajectories]
            stale = self._past_the_bound(members, global_steps - 1, partition_id)
            metrics["partial_rollout/masked_tokens"] = stale.num_masked
            metrics["partial_rollout/stale_tokens_trained"] = stale.num_trained
        return batch, metrics

    def _past_the_bound(
        self, trajectories: list[TrajectorySummary], trained_version: int, partition_id: str
    ) -> StaleTokens:
        """Masked, or only counted."""
        oldest = self._bound.oldest(trained_version)
        if not self._bound.masks:
            spans = (span for trajectory in trajectories for span in trajectory.version_spans)
            return StaleTokens(num_trained=sum(span.num_tokens for span in spans if span.version < oldest))
        return call_bounded(
            lambda: mask_stale_tokens(
                trajectories, oldest_version=oldest, partition_id=partition_id, mini_batch=self._mini_batch
            ),
            timeout_s=self._settings.timeouts.call_s,
            who_waits="trainer waits for TransferQueue to mask stale tokens",
            late=TransferQueueSilent,
        )

    def _require_validated(self, global_steps: int, num_prompts: int) -> None:
        """Raise for a missing prompt, which nobody generates any more: verl's `sample` would wait for it for ever."""
        num_ended = self.get_sampleable_count(global_steps, "val")
        if num_ended < num_prompts:
            raise ClusterError(
                f"validation of step {global_steps} ended with {num_ended} of {num_prompts} prompts in TransferQueue; "
                "the agent-loop workers' logs say what became of the others"
            )

    def require_answer(self) -> None:
        """Raise TransferQueueSilent unless TransferQueue answers."""
        call_bounded(
            tq.kv_list,
            timeout_s=self._settings.timeouts.call_s,
            who_waits="trainer waits for TransferQueue to list its rows",
            late=TransferQueueSilent,
        )

    def _clear_rows(self, keys: list[str], partition_id: str) -> None:
        if not keys:
            return
        call_bounded(
            lambda: tq.kv_clear(keys=keys, partition_id=partition_id),
            timeout_s=self._settings.timeouts.call_s,
            who_waits=f"trainer waits for TransferQueue to clear {len(keys)} rows of prompts that have left the queue",
            late=TransferQueueSilent,
        )

    def _take(
        self, num_groups: int, trained_version: int, partition_id: str
    ) -> tuple[tuple[FinishedGroup, ...], Counter[float]]:
        """A batch, and the groups without spread that were dropped meanwhile, by their metric."""
        num_failed, filtered, warn_at = 0, Counter[float](), FILTERED_WARNING_BATCHES * num_groups
        while True:
            wanted = self._log.wanted(trained_version + 1) if self._log else ()
            call = self._manager.take_batch.remote(num_groups, self._settings.timeouts.batch_s, wanted)
            result = self._wait(call)
            filtered.update(result.filtered)
            if result.groups:
                self._on_taken(len(result.groups))
                self._end_round(result, trained_version, partition_id)
                return result.groups, filtered
            if wanted and self._log:
                self._log.require_coming(trained_version + 1)
                if self._log.wanted(trained_version + 1):
                    self.refill_fn(result.num_missing)
                continue
            # Groups without spread are no failure: they may go on for as long as the model finds a prompt too hard.
            failed = result.num_missing - result.num_filtered
            if failed and num_failed >= MAX_REFILL_BATCHES * num_groups:
                self._raise_broken(num_failed)
            if failed:
                logger.info("%d prompts were dropped; admitting as many fresh ones", failed)
            if filtered.total() >= warn_at:
                warn_at = 2 * filtered.total()
                self._warn_of_filtering(filtered, num_groups, step=trained_version + 1)
            # Nothing else admits prompts before the next step, so the batch could not be full without them.
            self.refill_fn(result.num_missing)
            num_failed += failed

    def _warn_of_filtering(self, filtered: Counter[float], num_groups: int, step: int) -> None:
        values = ", ".join(f"{count} at {value:g}" for value, count in filtered.most_common(NUM_VALUES_SHOWN))
        text = (
            f"step {step} waits for {num_groups} prompt groups; algorithm.filter_groups has dropped "
            f"{filtered.total()} so far, since the trajectories of each have the same metric ({values}). Fresh prompts "
            "are tried without end. If it stays so, prompts are too hard or too easy for the model, or the reward "
            "function is broken: look at the metric of some trajectories, or set algorithm.filter_groups.enable=False"
        )
        logger.warning(text)

    def _end_round(self, result: TakeResult, trained_version: int, partition_id: str) -> None:
        """Tell workers which trajectories must not go on; discard finished groups that are too old by now."""
        bound = self._bound
        self._agent_loops.hold(result.deferred, bound.oldest(trained_version + 1) if bound.discards else None)
        self.num_deferred = len(result.deferred)
        if not result.expired:
            return
        # Cleared before the queue lets the prompts begin again: from then on a worker may write the same keys.
        self._clear_rows([each.key for group in result.expired for each in group.trajectories], partition_id)
        self._clear_rows(self._ask(self._manager.discard_expired.remote()), partition_id)

    @property
    def _bound(self) -> StalenessBound:
        return StalenessBound.of(self._settings.tail)

    def _raise_broken(self, num_refilled: int) -> None:
        status = cast("ManagerStatus", self._ask(self._manager.status.remote()))
        raise AgentLoopBroken(
            f"{num_refilled} prompts were dropped and replaced during the wait for one batch, the limit is "
            f"{MAX_REFILL_BATCHES} batches; dropped in this run: {status.queue.dropped}; last failed attempt: "
            f"{status.last_failure or 'none'}"
        )

    def _wait(self, ref: ray.ObjectRef) -> TakeResult:
        started = reported = time.monotonic()
        interval_s = self._settings.slots.interval_s if self._look else REPORT_INTERVAL_S
        next_s = first_look_s(interval_s, self._last_wait_s) if self._look else interval_s
        while True:
            # The workers' loops too: when one has ended, the batch may never be full.
            deaths = self._engines.deaths if self._engines else []
            ready, _ = ray.wait([ref, *self._agent_loops.loops, *deaths], num_returns=1, timeout=next_s)
            next_s = interval_s
            if ref in ready:
                self._last_wait_s = time.monotonic() - started
                self._longest_wait_s = max(self._longest_wait_s, self._last_wait_s)
                return ray.get(ref)
            self._agent_loops.raise_if_ended(ready)
            if self._engines:
                self._engines.look(ready)
            if self._look:
                self._look()
            if time.monotonic() - reported >= REPORT_INTERVAL_S:
                reported = time.monotonic()
                self._report(reported - started)

    def _report(self, waited_s: float) -> None:
        statistics = self._ask(self._manager.statistics.remote())
        if waited_s > self._settings.timeouts.batch_s + REPORT_INTERVAL_S:
            raise WaitTimeout(
                f"trainer waited {waited_s:.0f} s for the prompt manager to answer take_batch, which ends "
                f"after partial_rollout.timeouts.batch_s={self._settings.timeouts.batch_s:g} at most; {statistics}"
            )
        is_usual = waited_s <= UNUSUAL * self._longest_wait_s
        longest = f"the longest wait before was {self._longest_wait_s:.0f} s"
        level = logging.INFO if is_usual else logging.WARNING
        logger.log(level, "trainer has waited %.0f s for a batch (%s): %s", waited_s, longest, statistics)

    def _ask(self, ref: ray.ObjectRef) -> Any:
        timeout_s = manager_limit_s(self._settings.timeouts.call_s)
        return wait_for(ref, timeout_s=timeout_s, who_waits="trainer's replay buffer waits for the prompt manager")


def _taken(step: int, groups: Sequence[FinishedGroup]) -> BatchTaken:
    return BatchTaken(
        step=step,
        uids=[group.uid for group in groups],
        source_index=[group.source_index for group in groups],
        deferrals=[group.num_deferrals for group in groups],
        interruptions=[sum(t.num_interruptions for t in group.trajectories) for group in groups],
    )


def _tag(group: FinishedGroup, trajectory: TrajectorySummary) -> dict[str, Any]:
    """The tags of a trajectory's row that verl's trainer reads."""
    return {
        "status": "success",
        "prompt_len": trajectory.prompt_len,
        "response_len": trajectory.response_len,
        "seq_len": trajectory.prompt_len + trajectory.response_len,
        "global_steps": group.global_step,
        "min_global_steps": trajectory.min_version,
        "max_global_steps": trajectory.max_version,
    }
