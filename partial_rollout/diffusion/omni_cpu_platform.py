"""vllm-omni's platform without an accelerator, which its version 0.28.0 lacks; on a GPU none of it is loaded.

The platform class is made while vllm-omni is being imported, so nothing here may import more of it.
"""

from __future__ import annotations

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

ATTENTION_BACKEND = "partial_rollout.diffusion.omni_cpu_layers.CpuSdpaBackend"


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform with what vllm-omni asks of one."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        """Where vllm-omni looks for a model's stages; a model without a file there has one."""
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        """SDPA, whatever was selected: nothing else runs here."""
        return ATTENTION_BACKEND

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """Compiling takes longer than these models run."""
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        """The host."""
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        """One."""
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        """There is no driver."""
        return None

    @classmethod
    def synchronize(cls) -> None:
        """CPU work is done when the call returns."""

    @classmethod
    def is_available(cls) -> bool:
        """False: vllm-omni means an accelerator with counters of its memory."""
        return False

    @classmethod
    def empty_cache(cls) -> None:
        """The host allocator keeps no cache of its own."""

    @classmethod
    def reset_peak_memory_stats(cls) -> None:
        """The host allocator has no counters."""

    @classmethod
    def max_memory_reserved(cls) -> int:
        """Unknown, as 0."""
        return 0

    @classmethod
    def max_memory_allocated(cls) -> int:
        """Unknown, as 0."""
        return 0

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        """Bytes of host memory that are available."""
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """Bytes of host memory: available, all."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total
