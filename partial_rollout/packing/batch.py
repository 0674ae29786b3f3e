"""The planner inside verl's step: chooses it, plans each batch, and lays the batch out so that ranks follow the plan.

verl hands every rank an equal, consecutive part of the batch's keys and cuts that part into equal mini-batches. So the
plan becomes an order of the keys, and one number a sample, its micro-batch, that the rank's engine reads
(`packing/engine.py`). Nothing else of verl's step changes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import transfer_queue as tq
from tensordict import TensorDict

from partial_rollout.errors import InternalError, TransferQueueSilent
from partial_rollout.packing import (
    CostModel,
    GlobalPlanner,
    plan_statistics,
)
from partial_rollout.packing.plan import sample_padding_share
from partial_rollout.packing.planners import PaddedPlanner
from partial_rollout.runtime.bounded import call_bounded
from partial_rollout.settings.block import BLOCK
from partial_rollout.settings.derived import has_own_reference, num_ranks, sequence_parallel_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omegaconf import DictConfig
    from transfer_queue import KVBatchMeta

    from partial_rollout.packing import Plan, Planner
    from partial_rollout.settings.block import PartialRolloutConfig

logger = logging.getLogger(__name__)

MICRO_BATCH_FIELD = "packing_micro_batch"
"""Field of each sample, (1,) int64: the number of its micro-batch, counted over the whole batch."""
PREFIX = "packing"
MODEL_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
"""What the cost model reads from transformers' configuration."""


@dataclass(frozen=True, slots=True)
class BatchPacker:
    """Plans the batches of one run."""

    planner: Planner
    num_ranks: int
    pads_rows: bool
    """Rows are padded to their longest sample, not packed."""
    call_timeout_s: float

    def require_ranks(self, num_ranks: int) -> None:
        """Compare with the ranks that verl sends a batch to.

        Raises:
            InternalError: plans would be made for another number.
        """
        if num_ranks != self.num_ranks:
            raise InternalError(f"packing: plans are for {self.num_ranks} ranks, verl sends batches to {num_ranks}")

    def arrange(self, batch: KVBatchMeta, sampled: Sequence[str], metrics: dict[str, Any]) -> None:
        """Plan `batch` and reorder it in place; adds the plan's metrics.

        Args:
            batch: all samples of the step; tag `seq_len` is a sample's length in tokens.
            sampled: keys in the order in which they were sampled. Mini-batches are cut from that order, whatever the
                number of ranks; samples that verl added for padding come last.
        """
        # verl has reordered the batch for its own balancing; that order would mix the mini-batches.
        position = {key: number for number, key in enumerate(sampled)}
        batch.reorder(sorted(range(len(batch)), key=lambda i: position.get(batch.keys[i], len(sampled))))
        lengths = [tag["seq_len"] for tag in batch.tags]
        started = time.perf_counter()
        plan = self.planner.plan(lengths, self.num_ranks)
        metrics[f"{PREFIX}/planner_ms"] = (time.perf_counter() - started) * 1000
        metrics.update(self.statistics(plan, lengths))
        order, numbers = layout(plan)
        batch.reorder(order)
        self._store(batch, numbers)

    def statistics(self, plan: Plan, lengths: Sequence[int]) -> dict[str, float]:
        """Metrics of one plan."""
        found = plan_statistics(plan, lengths)
        return {
            f"{PREFIX}/square_imbalance": found.square_imbalance,
            f"{PREFIX}/token_imbalance": found.token_imbalance,
            f"{PREFIX}/padding_share": sample_padding_share(plan, lengths) if self.pads_rows else 0.0,
            f"{PREFIX}/rows_over_budget": plan.rows_over_budget,
            f"{PREFIX}/micro_batches": plan.num_micro_batches,
        }

    def _store(self, batch: KVBatchMeta, numbers: Sequence[int]) -> None:
        fields = TensorDict({MICRO_BATCH_FIELD: torch.tensor(numbers)[:, None]}, batch_size=len(numbers))
        call_bounded(
            lambda: tq.kv_batch_put(keys=batch.keys, partition_id=cast("str", batch.partition_id), fields=fields),
            timeout_s=self.call_timeout_s,
            who_waits=f"trainer waits for TransferQueue to take the micro-batches of {len(numbers)} samples",
            late=TransferQueueSilent,
        )


def layout(plan: Plan) -> tuple[list[int], list[int]]:
    """An order of the samples in which the r-th equal part is rank r's, row after row; and each sample's micro-batch.

    Raises:
        InternalError: ranks would get different numbers of samples of a mini-batch.
    """
    for number, mini_batch in enumerate(plan.mini_batches()):
        counts = [sum(map(len, rows)) for rows in zip(*mini_batch, strict=True)]
        if len(set(counts)) > 1:
            raise InternalError(f"packing: mini-batch {number} gives ranks {counts} samples; verl cuts them equally")
    placed = [
        (index, number)
        for rank in range(plan.num_ranks)
        for number, row in enumerate(plan.for_rank(rank))
        for index in row
    ]
    return [index for index, _ in placed], [number for _, number in placed]


def make_batch_packer(config: DictConfig, settings: PartialRolloutConfig) -> BatchPacker | None:
    """The packer that `partial_rollout.packing` asks for; None leaves verl's own balancing and micro-batches."""
    if settings.packing.planner == "verl":
        return None
    pads_rows = not config.actor_rollout_ref.model.use_remove_padding
    planner = _make_planner(config, settings, pads_rows=pads_rows)
    how = "padded to their longest sample, because model.use_remove_padding=False" if pads_rows else "packed"
    logger.info("packing: planner=%s (%s), rows are %s", settings.packing.planner, type(planner).__name__, how)
    return BatchPacker(planner, num_ranks(config), pads_rows, settings.timeouts.call_s)


def _make_planner(config: DictConfig, settings: PartialRolloutConfig, *, pads_rows: bool) -> Planner:
    packing, actor = settings.packing, config.actor_rollout_ref.actor
    mini_batch_size = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    budget, source = token_budget(config, packing.token_budget)
    logger.info("packing: rows of at most %d tokens, from %s", budget, source)
    if pads_rows:
        return PaddedPlanner(mini_batch_size=mini_batch_size, token_budget=budget)
    cost = cost_of(_text_config(config))
    return GlobalPlanner(mini_batch_size=mini_batch_size, token_budget=budget, cost=cost)


def token_budget(config: DictConfig, given: int | None) -> tuple[int, str]:
    """The most tokens of a row, and the settings they come from: `given`, else what verl's settings have room for."""
    if given:
        return given, f"{BLOCK}.packing.token_budget"
    actor, ref, rollout = (config.actor_rollout_ref[role] for role in ("actor", "ref", "rollout"))
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu:
        longest = config.data.max_prompt_length + config.data.max_response_length
        source = "actor.ppo_micro_batch_size_per_gpu x (data.max_prompt_length + data.max_response_length)"
        return actor.ppo_micro_batch_size_per_gpu * longest, source
    limits = [(actor.ppo_max_token_len_per_gpu, "actor.ppo_max_token_len_per_gpu")]
    if rollout.log_prob_use_dynamic_bsz:
        limits.append((rollout.log_prob_max_token_len_per_gpu, "rollout.log_prob_max_token_len_per_gpu"))
    if has_own_reference(config) and ref.log_prob_use_dynamic_bsz:
        limits.append((ref.log_prob_max_token_len_per_gpu, "ref.log_prob_max_token_len_per_gpu"))
    limit, source = min(limits)
    devices = sequence_parallel_size(config)
    return limit * devices, f"{source} x {devices} devices that share a row"


def cost_of(model: Any) -> CostModel:
    """What a row costs a model, from its configuration of transformers; verl's cost model where that lacks a size."""
    missing = [size for size in MODEL_SIZES if not getattr(model, size, None)]
    if missing:
        logger.warning("packing: %s does not say %s; using verl's cost model", type(model).__name__, ", ".join(missing))
        return CostModel.verl()
    return CostModel.from_model(
        hidden_size=model.hidden_size,
        num_layers=model.num_hidden_layers,
        num_heads=model.num_attention_heads,
        num_kv_heads=getattr(model, "num_key_value_heads", None),
        head_dim=getattr(model, "head_dim", None),
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
    )


def _text_config(config: DictConfig) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config.actor_rollout_ref.model).hf_config.get_text_config()
