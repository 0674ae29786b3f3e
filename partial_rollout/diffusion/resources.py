"""What a diffusion job needs of a Ray cluster, and the GPU that it trains on itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from partial_rollout.errors import ConfigError
from partial_rollout.runtime.remote_call import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from partial_rollout.diffusion.config import DiffusionConfig

CPUS_PER_SERVER = 1
VISIBLE = "CUDA_VISIBLE_DEVICES"


def require_resources(config: DiffusionConfig, total: Mapping[str, float], here: Mapping[str, float]) -> None:
    """Refuse a job that would wait for resources for ever.

    Args:
        config: of the job.
        total: resources of the cluster, as `ray.cluster_resources()` has them.
        here: those of the node that the job runs on.

    Raises:
        ConfigError: names what is missing and the keys that ask for it.
    """
    rollout, trains_on_gpu = config.rollout, config.actor.device == "cuda"
    servers = f"rollout.num_servers={rollout.num_servers}"
    num_cpus, num_gpus = rollout.num_servers * CPUS_PER_SERVER, rollout.num_servers * rollout.gpus_per_server
    if num_cpus > total.get("CPU", 0):
        raise ConfigError(_missing(f"{servers} needs", num_cpus, "CPU", total))
    if trains_on_gpu and here.get("GPU", 0) < 1:
        raise ConfigError(
            "actor.device='cuda' needs a GPU of the node that the job runs on, where Ray has none "
            "(set actor.device=cpu, or start the job on a node with a GPU)"
        )
    if num_gpus + trains_on_gpu > total.get("GPU", 0):
        asked = f"{servers} with rollout.gpus_per_server={rollout.gpus_per_server} and actor.device="
        raise ConfigError(_missing(f"{asked}{config.actor.device!r} need", num_gpus + trains_on_gpu, "GPU", total))


class GpuReservation:
    """An actor that has a GPU and does nothing: Ray does not know that a driver uses one."""

    def gpu(self) -> str:
        """Name of the GPU, as CUDA_VISIBLE_DEVICES has it."""
        return ray.get_runtime_context().get_accelerator_ids()["GPU"][0]


def reserve_gpu(timeout_s: float) -> tuple[Any, torch.device]:
    """Take a GPU of this node from Ray, so that no server gets it too; return who holds it, and the device.

    Raises:
        WaitTimeout: Ray has given none in time: others use them.
        ConfigError: this process does not see the GPU.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(GpuReservation).options(num_cpus=0, num_gpus=1, scheduling_strategy=here)
    reservation = actor_class.remote()
    name = wait_for(
        reservation.gpu.remote(), timeout_s=timeout_s, who_waits="the job for a GPU to train on (actor.device='cuda')"
    )
    return reservation, device_of(name, os.environ.get(VISIBLE))


def device_of(gpu: str, visible: str | None) -> torch.device:
    """The device that a GPU is in a process which sees `visible`; None: all.

    Raises:
        ConfigError: it is not among them.
    """
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    if names is not None and gpu not in names:
        raise ConfigError(
            f"{VISIBLE}={visible!r} is not allowed: Ray gives the job GPU {gpu}, which it must see (unset {VISIBLE})"
        )
    return torch.device("cuda", int(gpu) if names is None else names.index(gpu))


def _missing(asked: str, number: int, kind: str, total: Mapping[str, float]) -> str:
    return (
        f"{asked} {number} {kind}s, Ray's cluster has {total.get(kind, 0):g} "
        "(set rollout.num_servers to fewer, or start Ray with more)"
    )
