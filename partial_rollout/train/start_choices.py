"""Choices of a start (`settings.auto`) that need the cluster: the nodes' memory is looked at, and servers are told."""

from __future__ import annotations

import logging
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from partial_rollout.errors import WaitTimeout
from partial_rollout.integrations.verl_compat import GPU_VLLM, installed_version
from partial_rollout.runtime.remote_call import wait_for_all
from partial_rollout.settings.auto import take_on_cluster
from partial_rollout.settings.block import AUTO
from partial_rollout.settings.derived import read_block
from partial_rollout.settings.hub import ask_hub
from partial_rollout.settings.memory import Machine, awaits_hub
from partial_rollout.weights.directory import SHARED_MEMORY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omegaconf import DictConfig

    from partial_rollout.settings.auto import Choice

logger = logging.getLogger(__name__)

LOOK_S = 120.0
"""A task of Ray's on a node that runs nothing else yet; its first process there has to start."""
CGROUPS = (
    ("", "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Controller in /proc/self/cgroup, folder, and its files with a group's limit and usage, of the second and the first
version of Linux' control groups; and the name in `memory.stat` of what counts as used and can be taken: files read long
ago."""
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
"""A command that prints MiB, a line for each GPU."""
SMI_S = 30.0
"""The command takes a second, and longer while the driver loads."""
OWN_GROUPS = Path("/proc/self/cgroup")


def choose_on_cluster(config: DictConfig) -> list[Choice]:
    """Take the choices that the driver left open, in place; each process that is started from now on is told."""
    if read_block(config).tail.interrupt_mode != AUTO:
        return []
    machine = look_at_nodes()
    if awaits_hub(config):
        machine = replace(machine, model=ask_hub(str(config.actor_rollout_ref.model.path)))
    return take_on_cluster(config, machine)


def look_at_nodes() -> Machine:
    """The memory of the nodes with devices; unknown where a node does not say it."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) > 0]
    look = ray.remote(num_cpus=0)(free_memory)
    try:
        places = [NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False) for node in nodes]
        calls = [look.options(scheduling_strategy=place).remote() for place in places]
        who_waits = "the task runner waits for the nodes to tell their memory"
        found = wait_for_all(calls, timeout_s=LOOK_S, who_waits=who_waits)
    except (RayError, WaitTimeout) as error:
        logger.warning("the nodes' memory is not known: %s", error)
        return Machine()
    if not found:
        return Machine()
    stores = [int(node["Resources"].get("object_store_memory", 0)) for node in nodes]
    host = min(host - store for (host, _, _), store in zip(found, stores, strict=True))
    shm = min(shm - store for (_, shm, _), store in zip(found, stores, strict=True))
    gpus = [gpu for _, _, gpu in found]
    gpu = None if None in gpus else min(gpus)
    return Machine(host, shm, offloads_to_shm=not _pins_memory(), gpu_bytes=gpu)


def _pins_memory() -> bool:
    """Whether this vLLM takes pinned memory, as the release does that we were built for; a later one maps a file."""
    return GPU_VLLM.accepts(installed_version(GPU_VLLM.name) or "")


def free_memory() -> tuple[int, int, int | None]:
    """Bytes of memory and of /dev/shm that this node, or this container, has free; and of its smallest GPU in all."""
    return free_host_memory(), shutil.disk_usage(SHARED_MEMORY).free, gpu_memory()


def free_host_memory() -> int:
    """Bytes of memory that this node, or this container, has free."""
    free = psutil.virtual_memory().available
    own = OWN_GROUPS.read_text(encoding="utf-8") if OWN_GROUPS.exists() else ""
    limits = [
        container_free(place, *names)
        for controller, folder, *names in CGROUPS
        for place in group_folders(own, controller, Path(folder))
    ]
    return min([free, *(limit for limit in limits if limit is not None)])


def gpu_memory(command: Sequence[str] = NVIDIA_SMI) -> int | None:
    """Bytes of the smallest GPU of this node; None where the driver's own tool does not say it."""
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SMI_S).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    sizes = [int(line) for line in told.split() if line.isdigit()]
    return min(sizes) << 20 if sizes else None


def group_folders(own: str, controller: str, folder: Path) -> list[Path]:
    """The folders of a process's control group and of all groups around it, each of which may have a limit.

    `own` is the text of /proc/self/cgroup: lines of `number:controllers:path`.

    >>> [str(each) for each in group_folders("0::/slurm/job_7", "", Path("/sys/fs/cgroup"))]
    ['/sys/fs/cgroup', '/sys/fs/cgroup/slurm', '/sys/fs/cgroup/slurm/job_7']
    """
    lines = (line.split(":", 2) for line in own.splitlines() if line.count(":") >= 2)
    path = next((path for _, names, path in lines if controller in names.split(",")), "/")
    parts = [part for part in path.split("/") if part]
    return [folder.joinpath(*parts[:number]) for number in range(len(parts) + 1)]


def container_free(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Bytes that a container may still take; None if the folder is not there, or has no limit."""
    try:
        most, used = ((folder / name).read_text(encoding="ascii").strip() for name in (limit, usage))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    if not (most.isdigit() and used.isdigit()):
        return None
    cached = next((int(line.split()[1]) for line in lines if line.split()[0] == reclaimable), 0)
    return max(0, int(most) - int(used) + cached)
