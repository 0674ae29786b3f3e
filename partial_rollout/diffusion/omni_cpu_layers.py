"""Attention and linear layers for vllm-omni's models on a CPU.

The platform (`omni_cpu_platform.py`) names the attention backend; our pipelines put the layers into their models.
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
    """vllm-omni's SDPA backend with the implementation for a CPU."""

    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        """Return `CpuSdpaImpl`."""
        return CpuSdpaImpl


class PlainLinearMethod(UnquantizedLinearMethod):
    """A linear layer that keeps its weight as it was loaded.

    vLLM packs linears for a CPU after loading and empties `weight`, so that the next weight update fails.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weight as it is."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute `x W^T + b`."""
        weight: Any = layer.weight
        return torch.nn.functional.linear(x, weight, bias)


def prepare_for_cpu(model: torch.nn.Module) -> None:
    """Prepare a model, before its weights are loaded on a CPU, for weight updates at any time and for CPU attention."""
    for module in model.modules():
        if isinstance(module, LinearBase) and isinstance(module.quant_method, UnquantizedLinearMethod):
            module.quant_method = PlainLinearMethod()
        elif isinstance(module, Attention):
            # For fp32 a layer would use vllm-omni's own SDPA instead of the platform's backend.
            module.sdpa_fallback = cast("SDPAImpl", module.attention)
