"""What `bench_packing_wall` trains: the model, where it runs, and forward and backward of one row of samples."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from partial_rollout.advise.shapes import SHAPES
from partial_rollout.packing.attention import Sample, pack

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Step = Callable[["Trainee", list[Sample]], None]

NUM_RANKS = 2
SMALL = "small"
MAX_POSITIONS = 8192
GPU_TIMEOUT = timedelta(seconds=60)
"""Limit of a barrier: when one rank has failed, the other does not wait for long. A CPU may be shared, and slow."""
LOSS_CHUNK = 8192
"""Tokens whose log-probs are computed at once; with 151,936 logits each, fewer than 2**31 numbers."""


@dataclass(frozen=True)
class Training:
    """Where and how a shape is trained."""

    device: str
    backend: str
    dtype: str
    gradient_checkpointing: bool


def training(shape: str) -> Training:
    """The small shape on the CPU; others on a GPU a rank where there is any, and with checkpointing as in the recipes.

    Raises:
        SystemExit: there are GPUs, but too few.
    """
    if shape == SMALL or not torch.cuda.is_available():
        return Training("cpu", "gloo", "float32", gradient_checkpointing=shape != SMALL)
    if torch.cuda.device_count() < NUM_RANKS:
        raise SystemExit(
            f"--shape={shape} takes {NUM_RANKS} GPUs, not {torch.cuda.device_count()}: run it where there are more, or"
            " on the CPU with CUDA_VISIBLE_DEVICES=''"
        )
    return Training("cuda", "nccl", "bfloat16", gradient_checkpointing=True)


class Trainee:
    """One rank of the process group, and its model, which has random weights and no optimizer."""

    def __init__(self, shape: str, rank: int, port: int) -> None:
        """Join the group at `port` of this host."""
        how = training(shape)
        self.rank = rank
        self.device = torch.device(how.device, rank) if how.device == "cuda" else torch.device(how.device)
        if how.device == "cuda":
            torch.cuda.set_device(self.device)
            # cuDNN's attention builds a plan for each new length, which would be timed with the first step that has it.
            torch.backends.cuda.enable_cudnn_sdp(False)
        dist.init_process_group(
            how.backend,
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=NUM_RANKS,
            timeout=GPU_TIMEOUT if how.device == "cuda" else None,
            device_id=self.device if how.device == "cuda" else None,
        )
        torch.manual_seed(0)
        with self.device:
            self.model: Qwen3ForCausalLM = AutoModelForCausalLM.from_config(
                SHAPES[shape].config(MAX_POSITIONS), dtype=getattr(torch, how.dtype)
            )
        self.model.train()
        if how.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def meet(self) -> None:
        """Wait until both ranks have done all their work."""
        self.finish()
        dist.barrier()
        self.finish()

    def finish(self) -> None:
        """Wait until this rank's GPU, if it has one, has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def agree(self, value: bool) -> bool:
        """What rank 0 says."""
        answer = torch.tensor(int(value), device=self.device)
        dist.broadcast(answer, src=0)
        return bool(answer.item())

    def make_sample(self, length: int) -> Sample:
        """Tokens do not matter for the time."""
        tokens = torch.randint(self.model.config.vocab_size, (length,))
        return Sample(tokens, {"advantages": torch.randn(length)})


def packed_step(trainee: Trainee, samples: list[Sample]) -> None:
    """Forward and backward of one packed row."""
    row = pack(samples)
    tokens, advantages = row.input_ids.to(trainee.device), row.fields["advantages"].to(trainee.device)
    logits = trainee.model(tokens, position_ids=row.position_ids.to(trainee.device), use_cache=False).logits
    policy_gradient(logits, tokens, advantages).backward()


def padded_step(trainee: Trainee, samples: list[Sample]) -> None:
    """Forward and backward of one padded row."""
    tokens = pad_sequence([sample.tokens for sample in samples], batch_first=True).to(trainee.device)
    values = [sample.response["advantages"] for sample in samples]
    advantages = pad_sequence(values, batch_first=True).to(trainee.device)
    lengths = torch.tensor([len(sample.tokens) for sample in samples])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long().to(trainee.device)
    logits = trainee.model(tokens, attention_mask=mask, use_cache=False).logits
    policy_gradient(logits, tokens, advantages).backward()


def policy_gradient(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    """Sum of advantage x log-prob: logits (B, T, V), the others (B, T).

    The last prediction of a row weighs nothing here, so that no logits need to be cut off and copied.
    """
    targets, weights = tokens.roll(-1, dims=1), advantages.roll(-1, dims=1)
    weights[:, -1] = 0
    chunks = zip(
        logits.flatten(0, 1).split(LOSS_CHUNK),
        targets.flatten().split(LOSS_CHUNK),
        weights.flatten().split(LOSS_CHUNK),
        strict=True,
    )
    sums = [(cross_entropy(chunk, target, reduction="none") * weight).sum() for chunk, target, weight in chunks]
    return -torch.stack(sums).sum()
