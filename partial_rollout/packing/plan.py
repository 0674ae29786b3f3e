"""A finished plan says which sample is trained on which rank in which micro-batch; measures say how even the plan is.

Pure: no tensors, no clock. A row is the samples that one rank trains in one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from partial_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Row = tuple[int, ...]
"""Sample indices."""
FLOPS_PER_MULTIPLY_ADD = 2
NUM_MLP_MATRICES = 3
"""Gate, up and down: the gated MLP of Llama, Qwen and Mistral."""
VERL_LINEAR = 24576
"""6 x hidden size 4096: `verl.utils.seqlen_balancing.calculate_workload`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sample indices by micro-batch and data-parallel rank; every row holds at least one.

    Six samples on two ranks, in one optimizer step of two micro-batches:

    >>> plan = Plan(micro_batches=(((0, 3), (1,)), ((2,), (4, 5))), micro_batches_per_mini_batch=(2,))
    >>> plan.num_ranks, plan.for_rank(0)
    (2, ((0, 3), (2,)))
    """

    micro_batches: tuple[tuple[Row, ...], ...]
    """`micro_batches[m][r]`: what rank r trains in micro-batch m."""
    micro_batches_per_mini_batch: tuple[int, ...]
    """Number of consecutive micro-batches in each mini-batch (one optimizer step)."""
    rows_over_budget: int = 0
    """Rows of one sample that is longer than the token budget."""

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches, the same for every rank."""
        return len(self.micro_batches)

    @property
    def num_ranks(self) -> int:
        """Data-parallel size."""
        return len(self.micro_batches[0])

    def for_rank(self, rank: int) -> tuple[Row, ...]:
        """The rows of one rank, one per micro-batch."""
        return tuple(rows[rank] for rows in self.micro_batches)

    def mini_batches(self) -> tuple[tuple[tuple[Row, ...], ...], ...]:
        """The micro-batches of each mini-batch."""
        ends = [sum(self.micro_batches_per_mini_batch[: k + 1]) for k in range(len(self.micro_batches_per_mini_batch))]
        return tuple(
            self.micro_batches[end - num : end]
            for end, num in zip(ends, self.micro_batches_per_mini_batch, strict=True)
        )


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost `linear * L + quadratic * L**2` of one sequence of L tokens, in any unit; a row costs the sum.

    >>> CostModel(linear=10, quadratic=1).cost([2, 3])
    63
    """

    linear: float
    quadratic: float

    def __post_init__(self) -> None:
        """Raises ConfigError unless longer sequences cost more."""
        if self.linear < 0 or self.quadratic < 0 or self.linear + self.quadratic == 0:
            raise ConfigError(
                f"cost model linear={self.linear}, quadratic={self.quadratic}: both must be >= 0 and one above 0"
            )

    @classmethod
    def squares(cls) -> CostModel:
        """Attention only: L**2."""
        return cls(0, 1)

    @classmethod
    def verl(cls) -> CostModel:
        """verl's setting, made for a 7B model without a causal shortcut: 24576 * L + L**2."""
        return cls(VERL_LINEAR, 1)

    @classmethod
    def from_model(
        cls,
        *,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        intermediate_size: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        vocab_size: int = 0,
        causal: bool = True,
    ) -> CostModel:
        """FLOPs of a forward pass of a dense gated transformer; a backward pass is twice that, so ratios hold.

        `causal=False` is for attention that computes the masked half too (eager). Counted as in Kaplan et al. 2020
        (arXiv 2001.08361, table 1), with grouped-query attention, the gated MLP and the output layer (`vocab_size`).
        Raises ConfigError for a size below 1.
        """
        head_dim = hidden_size // num_heads if head_dim is None and num_heads > 0 else head_dim or 0
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = (hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size)
        if min(sizes) < 1 or vocab_size < 0:
            raise ConfigError(f"cost model of a network with {sizes=}, {vocab_size=}: sizes must be 1 or more")
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        per_layer = hidden_size * (2 * width + 2 * kv_width + NUM_MLP_MATRICES * intermediate_size)
        weights = num_layers * per_layer + hidden_size * vocab_size
        scores_and_values = 2 * num_layers * width
        return cls(FLOPS_PER_MULTIPLY_ADD * weights, FLOPS_PER_MULTIPLY_ADD * scores_and_values / (2 if causal else 1))

    def of(self, length: int) -> float:
        """Cost of one sequence of `length` tokens."""
        return length * (self.linear + self.quadratic * length)

    def cost(self, lengths: Iterable[int]) -> float:
        """Cost of a row."""
        return sum(self.of(length) for length in lengths)


@dataclass(frozen=True, slots=True)
class PlanStatistics:
    """How even a plan is. An imbalance is (max - min) / mean over ranks; 0 is even."""

    square_imbalance: float
    """Imbalance of the rows' sums of L**2, mean over micro-batches: it costs time where ranks meet in each (FSDP)."""
    token_imbalance: float
    """Imbalance of the rows' tokens, mean over micro-batches."""


def plan_statistics(plan: Plan, lengths: Sequence[int]) -> PlanStatistics:
    """Measure a plan over samples of `lengths` tokens."""
    tokens = _row_sums(plan, lambda index: lengths[index])
    squares = _row_sums(plan, lambda index: lengths[index] ** 2)
    return PlanStatistics(
        square_imbalance=_mean([imbalance(row) for row in squares]),
        token_imbalance=_mean([imbalance(row) for row in tokens]),
    )


def padded_tokens(row: Sequence[int], lengths: Sequence[int]) -> int:
    """Positions of a row whose samples are padded to its longest."""
    return len(row) * max(lengths[i] for i in row)


def sample_padding_share(plan: Plan, lengths: Sequence[int]) -> float:
    """Positions that are padding when every row is padded to its longest sample, of all positions."""
    positions = sum(padded_tokens(row, lengths) for rows in plan.micro_batches for row in rows)
    return 1 - sum(lengths) / positions


def imbalance(values: Sequence[float]) -> float:
    """(max - min) / mean."""
    return (max(values) - min(values)) * len(values) / sum(values)


def _row_sums(plan: Plan, value: Callable[[int], float]) -> list[list[float]]:
    return [[sum(map(value, row)) for row in rows] for rows in plan.micro_batches]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
