"""What a row of sequences costs: a part linear in the length and a part quadratic in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from partial_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

FLOPS_PER_MULTIPLY_ADD = 2
NUM_MLP_MATRICES = 3
"""Gate, up and down: the gated MLP of Llama, Qwen and Mistral."""
VERL_LINEAR = 24576
"""6 x hidden size 4096: `verl.utils.seqlen_balancing.calculate_workload`."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost `linear * L + quadratic * L**2` of one sequence of L tokens, in any unit; a row costs the sum."""

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
