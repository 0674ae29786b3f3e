"""verl on a machine without an accelerator: `VERL_PLATFORM=cpu`.

`install()` is called by `verl_plugin` in every process that imports verl. Three things are set up:

1. the platform "cpu" in verl's PlatformRegistry;
2. `VERL_ENGINE_DEVICE=cuda`: verl's FSDP engines are registered for cuda and npu only, run on a CPU as they are, and
   this variable is verl's own switch for choosing them;
3. a name for verl's process-group string, see `_register_process_group_name`.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry

from partial_rollout.integrations import cpu_device, verl_compat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta
    from types import ModuleType

PLATFORM = "cpu"
ENGINE_DEVICE_VARIABLE = "VERL_ENGINE_DEVICE"
ENGINE_DEVICE = "cuda"
PROCESS_GROUP_NAME = "cpu:gloo,cpu:gloo"
"""What verl 0.9.1 composes from "cpu:gloo," + device name + ":" + communication backend."""


class CpuPlatform(PlatformBase):
    """The host as verl's device: gloo, no device memory, GPUs in Ray as a logical resource only."""

    @property
    def device_name(self) -> str:
        """Device type torch knows."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """Vendor for verl's engine look-up; nothing is registered under it."""
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        """Stand-in for `torch.cuda`."""
        return cpu_device

    def is_available(self) -> bool:
        """Every host has one."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """False: the platform is chosen by name only and must never win verl's auto-detection."""
        return False

    def current_device(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return "cpu": verl passes the answer to `model.to`, where an index would mean an accelerator."""
        return cpu_device.current_device()

    def device_count(self) -> int:
        """One."""
        return cpu_device.device_count()

    def set_device(self, device_index: int) -> None:
        """There is nothing to choose."""

    def synchronize(self, device_index: int | None = None) -> None:
        """CPU work is done when the call returns."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's CPU generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's CPU generator."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The host allocator has no such settings."""

    def empty_cache(self) -> None:
        """The host allocator keeps no cache of its own."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """No compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Collectives over gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Ray sets this one for its resource "GPU"."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler ranges."""
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        """verl's resource check knows only GPU and NPU: start Ray with a logical `num_gpus`."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Variables that tell Ray to leave the visible devices alone."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """No device memory, so no handles to it."""
        return False

    def cudart(self) -> Any:
        """No CUDA runtime."""
        return None


def install() -> None:
    """Register the platform and its two companions in this process; a second call changes nothing.

    Raises:
        VersionError: another verl than the pinned one; what is bridged here was read in that version.
    """
    verl_compat.check(verl_compat.required_verl(), verl_compat.installed_version("verl"))
    if PlatformRegistry.get(PLATFORM) is not CpuPlatform:
        PlatformRegistry.register(platform=PLATFORM)(CpuPlatform)
    os.environ.setdefault(ENGINE_DEVICE_VARIABLE, ENGINE_DEVICE)
    _register_process_group_name()


def _register_process_group_name() -> None:
    """Let torch accept "cpu:gloo,cpu:gloo" as the name of a gloo backend.

    Missing hook: verl composes the string without asking the platform, and torch refuses a device named twice. Torch
    looks registered names up before it splits a string, so registering the whole string through its public registry
    is enough. tests/ray/test_cpu_platform.py fails as soon as verl no longer needs this.
    """
    if not hasattr(dist.Backend, PROCESS_GROUP_NAME.upper()):
        dist.Backend.register_backend(PROCESS_GROUP_NAME, _create_gloo, devices=["cpu"])


def _create_gloo(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout)
