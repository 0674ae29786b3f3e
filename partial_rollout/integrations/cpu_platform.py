"""verl on a machine without an accelerator, chosen with `VERL_PLATFORM=cpu`.

`verl_plugin` calls `install()` in every process that imports verl. It sets up three things:

1. the platform "cpu" in verl's PlatformRegistry;
2. `VERL_ENGINE_DEVICE=cuda`, verl's switch for the engine: verl registers its FSDP engines for cuda and npu only, but
   they run on a CPU as they are;
3. a torch backend under the name that verl gives its process groups, see `_register_process_group_name`.
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
"""verl 0.9.1 composes this name from "cpu:gloo,", the device name, ":" and the communication backend."""


class CpuPlatform(PlatformBase):
    """The host as verl's device: gloo, no device memory, GPUs in Ray as a logical resource only."""

    @property
    def device_name(self) -> str:
        """Name of the device in torch."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """Vendor, by which verl looks for engines; no engine is registered for this one."""
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        """Stand-in for `torch.cuda`."""
        return cpu_device

    def is_available(self) -> bool:
        """True: every machine has a CPU."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """False: users choose this platform by name, and verl's own detection must never choose it."""
        return False

    def current_device(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return "cpu", because verl passes it to `model.to`, where an index would mean an accelerator."""
        return cpu_device.current_device()

    def device_count(self) -> int:
        """One."""
        return cpu_device.device_count()

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: work on a CPU has ended when its call returns."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's CPU generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's CPU generator."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: the allocator of host memory has no such settings."""

    def empty_cache(self) -> None:
        """Do nothing: the allocator of host memory keeps no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """A CPU has no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Collective operations use gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """The variable that Ray sets for its resource "GPU"."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Do nothing: there is no profiler that takes ranges."""
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        """ "GPU", because verl's resource check knows only GPU and NPU; Ray is started with logical `num_gpus`."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Variables that keep Ray from setting the visible devices."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """False: without device memory there are no handles to share."""
        return False

    def cudart(self) -> Any:
        """No CUDA runtime."""
        return None


def install() -> None:
    """Register the platform and its two companions in this process; a second call changes nothing.

    Raises:
        VersionError: the installed verl is not the pinned version, for which this platform was written.
    """
    verl_compat.check(verl_compat.required_verl(), verl_compat.installed_version("verl"))
    if PlatformRegistry.get(PLATFORM) is not CpuPlatform:
        PlatformRegistry.register(platform=PLATFORM)(CpuPlatform)
    os.environ.setdefault(ENGINE_DEVICE_VARIABLE, ENGINE_DEVICE)
    _register_process_group_name()


def _register_process_group_name() -> None:
    """Let torch accept "cpu:gloo,cpu:gloo" as the name of a gloo backend.

    Missing hook: verl composes the name without asking the platform, and torch refuses a name with one device twice.
    torch looks for registered names before it splits a name, so the whole name is registered, through torch's public
    registry. tests/ray/test_cpu_platform.py fails as soon as verl no longer needs this.
    """
    if not hasattr(dist.Backend, PROCESS_GROUP_NAME.upper()):
        dist.Backend.register_backend(PROCESS_GROUP_NAME, _create_gloo, devices=["cpu"])


def _create_gloo(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout)
