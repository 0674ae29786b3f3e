"""Attention and linear layers of vllm-omni's models without an accelerator.

They are reached through the platform's choice of an attention backend and the layers of our own pipelines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.diffusion.attention.layer import Attention

if TYPE_CHECKING:
    from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata


class CpuSdpaImpl(SDPAImpl):
    """Scaled dot-product attention; vllm-omni's dispatch over platforms has no branch for a CPU."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Attend as vllm-omni does on a GPU, which is plain PyTorch."""
        return self.forward_cuda(query, key, value, attn_metadata)


class CpuSdpaBackend(SDPABackend):
    """SDPA with the branch for a CPU."""

    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        """The implementation above."""
        return CpuSdpaImpl


class PlainLinearMethod(UnquantizedLinearMethod):
    """A linear layer that keeps its weight as it was loaded.

    vLLM packs linears for a CPU after loading and empties `weight`, so that the next weight update fails.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the weight."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute `x W^T + b`."""
        weight: Any = layer.weight
        return torch.nn.functional.linear(x, weight, bias)


def prepare_for_cpu(model: torch.nn.Module) -> None:
    """Before a model is loaded on a CPU: unquantised linears that take new weights at any time, attention that runs."""
    for module in model.modules():
        if isinstance(module, LinearBase) and isinstance(module.quant_method, UnquantizedLinearMethod):
            module.quant_method = PlainLinearMethod()
        elif isinstance(module, Attention):
            # What a layer takes for fp32 is vllm-omni's own SDPA, not the platform's backend.
            module.sdpa_fallback = cast("SDPAImpl", module.attention)
