"""Training ranks that follow a plan: verl's FSDP engine and workers, with micro-batches that were decided before.

Missing hook: verl's engine makes its micro-batches itself. It can be told of equal counts or of a token limit, not of
a plan. So `forward_backward_batch` runs verl's own once for each planned row, as a batch of one micro-batch.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.py_functional import append_to_dict
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from partial_rollout.errors import ConfigError, InternalError
from partial_rollout.packing.batch import MICRO_BATCH_FIELD
from partial_rollout.settings.block import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from tensordict import TensorDict
    from verl.workers.config import TrainingWorkerConfig

VENDOR = "partial_rollout"
"""verl looks for an engine of the device and this vendor first, and only then for one of the device alone."""
VENDOR_VARIABLE = "VERL_ENGINE_VENDOR"
DEVICE_VARIABLE = "VERL_ENGINE_DEVICE"
BACKENDS = ["fsdp", "fsdp2"]
ROWS_METRIC = "packing_rows"
"""Rows of a mini-batch on one rank; verl reports the mean over ranks and mini-batches as `actor/packing_rows`."""


class PackedFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine, except that rows come from the samples' micro-batch numbers when they have them."""

    _is_last_row = True

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Forward, and backward unless `forward_only`, row by row; outputs are in the order of `data`.

        Raises:
            InternalError: ranks have different numbers of rows. They find out together, before any of them waits in
                a collective that the others never enter.
        """
        if MICRO_BATCH_FIELD not in data.keys():  # noqa: SIM118 (iterating a TensorDict goes over its rows)
            return super().forward_backward_batch(data, cast("Any", loss_function), forward_only)
        counts = row_counts(data[MICRO_BATCH_FIELD])
        # Each row is a collective of all ranks: a rank with one row more would wait in it for ever.
        self._agree(len(counts))
        loss = None if loss_function is None else _of_mini_batch(loss_function, self._num_loss_tokens(data))
        outputs: list[dict[str, Any]] = []
        try:
            for number, row in enumerate(split(data, counts)):
                self._is_last_row = number == len(counts) - 1
                outputs.append(cast("Any", super().forward_backward_batch(row, cast("Any", loss), forward_only)))
        finally:
            self._is_last_row = True
        joined = join(outputs)
        if not forward_only:
            joined["metrics"][ROWS_METRIC] = [len(counts)]
        return joined

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Reduce gradients over ranks after the last row only.

        Missing hook: to verl each row looks like the last micro-batch.
        """
        is_last = is_last_micro_batch and self._is_last_row
        return super()._gradient_sync_context(is_last_micro_batch=is_last)  # pyright: ignore[reportAttributeAccessIssue]

    def _agree(self, num_rows: int) -> None:
        extremes = torch.tensor([num_rows, -num_rows], device=get_device_id())
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.get_data_parallel_group())
        most, fewest = int(extremes[0]), -int(extremes[1])
        if most != fewest:
            raise InternalError(
                f"packing: ranks have from {fewest} to {most} rows in one mini-batch, this one {num_rows}"
            )

    def _num_loss_tokens(self, data: TensorDict) -> int:
        """Tokens that count, over all rows and ranks: what verl's losses are divided by."""
        num_tokens = data["loss_mask"].sum().to(get_device_id())
        dist.all_reduce(num_tokens, op=dist.ReduceOp.SUM, group=self.get_data_parallel_group())
        return int(num_tokens)


def _of_mini_batch(loss_function: Callable[..., Any], num_tokens: int) -> Callable[..., Any]:
    """The loss of a row as its share of the mini-batch; verl, given one row, has counted only that row's tokens."""

    def loss(*, data: TensorDict, **arguments: Any) -> Any:
        tu.assign_non_tensor(data, batch_num_tokens=num_tokens)
        return loss_function(data=data, **arguments)

    return loss


def row_counts(numbers: torch.Tensor) -> list[int]:
    """Samples of each row, from the micro-batch numbers (n, 1) of samples in the order of the plan.

    Jagged when they come through TransferQueue, which keeps every field of one dimension a sample that way.
    """
    flat = numbers.values() if numbers.is_nested else numbers.flatten()
    return torch.unique_consecutive(flat, return_counts=True)[1].tolist()


def split(data: TensorDict, counts: Sequence[int]) -> list[TensorDict]:
    """Consecutive rows of `counts` samples, each set up to be one micro-batch."""
    rows = []
    for indices in torch.arange(sum(counts)).split(list(counts)):
        row = tu.index_select_tensor_dict(data, indices)
        # verl would cut the row again, by its own settings.
        tu.assign_non_tensor(row, use_dynamic_bsz=False, micro_batch_size_per_gpu=len(indices))
        rows.append(row)
    return rows


def join(outputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What verl's engine returns for one batch, from what it returned for each row of it: undoes `split`."""
    metrics: dict[str, Any] = {}
    for output in outputs:
        append_to_dict(metrics, output["metrics"])
    names = outputs[0]["model_output"]
    return {
        "model_output": {name: _concatenate([output["model_output"][name] for output in outputs]) for name in names},
        "loss": [loss for output in outputs for loss in output["loss"]],
        "metrics": metrics,
    }


def _concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Jagged (n_i, L*) tensors as one."""
    return torch.nested.as_nested_tensor([sample for part in parts for sample in part.unbind()], layout=torch.jagged)


class PackedTrainingWorker(TrainingWorker):
    """verl's training worker on the packed engine."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        register_engine()
        super().__init__(config)


class PackedActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's worker whose actor and reference run on the packed engine."""

    actor_worker_cls = PackedTrainingWorker
    ref_worker_cls = PackedTrainingWorker


@cache
def register_engine() -> None:
    """Make verl choose the packed engine in this process; a second call changes nothing.

    Raises:
        ConfigError: the environment asks for another engine.
    """
    given = os.environ.get(VENDOR_VARIABLE)
    if given not in (None, "", VENDOR):
        raise ConfigError(
            f"{VENDOR_VARIABLE}={given} asks for a training engine that does not follow {BLOCK}.packing.planner:"
            f" unset it, or set {BLOCK}.packing.planner=verl"
        )
    device = os.environ.get(DEVICE_VARIABLE) or get_device_name()
    EngineRegistry.register("language_model", BACKENDS, device, VENDOR)(PackedFSDPEngine)
    os.environ[VENDOR_VARIABLE] = VENDOR
