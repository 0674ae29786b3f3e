"""A platform for vllm-omni on a CPU, which its versions up to 0.28.0 lack. On a GPU this file is not imported.

vllm-omni imports this file while it is being imported itself, so only its platform interface is imported here.
"""

from __future__ import annotations

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

ATTENTION_BACKEND = "partial_rollout.diffusion.omni_cpu_layers.CpuSdpaBackend"


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform with the methods that vllm-omni calls on a platform."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        """Folder of the files that describe a model's stages; a model without a file has one stage."""
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        """SDPA, whatever was selected: no other backend runs on a CPU."""
        return ATTENTION_BACKEND

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """False: on a CPU compiling takes longer than the models run."""
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
        """The host has no driver."""
        return None

    @classmethod
    def synchronize(cls) -> None:
        """CPU work is done when the call returns."""

    @classmethod
    def is_available(cls) -> bool:
        """False: vllm-omni asks for an accelerator with counters of its memory."""
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
