"""What an image job needs of the Ray cluster, and the GPU that the job itself trains on."""

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
        config: settings of the job.
        total: resources of the cluster, as `ray.cluster_resources()` returns them.
        here: resources of the node that the job runs on.

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
            "actor.device='cuda' is not allowed: Ray has no GPU on the node that the job runs on "
            "(set actor.device=cpu, or start the job on a node with a GPU)"
        )
    if num_gpus + trains_on_gpu > total.get("GPU", 0):
        asked = f"{servers} with rollout.gpus_per_server={rollout.gpus_per_server} and actor.device="
        raise ConfigError(_missing(f"{asked}{config.actor.device!r} need", num_gpus + trains_on_gpu, "GPU", total))


class GpuReservation:
    """An actor that holds a GPU and does nothing. The driver uses the GPU, which Ray would give to a server too."""

    def gpu(self) -> str:
        """Name of the GPU, as it stands in CUDA_VISIBLE_DEVICES."""
        return ray.get_runtime_context().get_accelerator_ids()["GPU"][0]


def reserve_gpu(timeout_s: float) -> tuple[Any, torch.device]:
    """Take a GPU of this node from Ray, so that no server gets it too; return the actor that holds it, and the device.

    Raises:
        WaitTimeout: Ray gave none in time, because others use them all.
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
    """The device number of `gpu` in a process with CUDA_VISIBLE_DEVICES=`visible`; with None it sees all GPUs.

    Raises:
        ConfigError: the process does not see this GPU.
    """
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    if names is not None and gpu not in names:
        raise ConfigError(
            f"{VISIBLE}={visible!r} is not allowed: Ray gives the job GPU {gpu}, which must be in it (unset {VISIBLE})"
        )
    return torch.device("cuda", int(gpu) if names is None else names.index(gpu))


def _missing(asked: str, number: int, kind: str, total: Mapping[str, float]) -> str:
    return (
        f"{asked} {number} {kind}s, the Ray cluster has {total.get(kind, 0):g} "
        f"(lower rollout.num_servers, or start Ray with more {kind}s)"
    )
