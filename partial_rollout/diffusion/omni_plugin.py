"""Entry point of vllm-omni's platform plugins: names the platform class for a machine without an accelerator."""

from __future__ import annotations

PLATFORM_CLASS = "partial_rollout.diffusion.omni_cpu_platform.CpuOmniPlatform"


def cpu_platform() -> str | None:
    """Import path of the platform class, if vLLM runs on a CPU; None leaves the choice to vllm-omni."""
    from vllm.platforms import current_platform

    return PLATFORM_CLASS if current_platform.is_cpu() else None
