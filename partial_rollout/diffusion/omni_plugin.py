"""Tells vllm-omni of its platform on a machine without an accelerator; loaded by its group of platform plugins."""

from __future__ import annotations

PLATFORM_CLASS = "partial_rollout.diffusion.omni_cpu_platform.CpuOmniPlatform"


def cpu_platform() -> str | None:
    """Where the platform class is, on vLLM's CPU platform only; None leaves the choice to vllm-omni."""
    from vllm.platforms import current_platform

    return PLATFORM_CLASS if current_platform.is_cpu() else None
