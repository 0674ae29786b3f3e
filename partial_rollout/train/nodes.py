"""Other nodes of the Ray cluster: what they lack of the package and of folders, and old checkpoints on their disks."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from partial_rollout.errors import ClusterError, VersionError
from partial_rollout.runtime.death_watch import node_of
from partial_rollout.runtime.remote_call import wait_for_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

PACKAGE = "partial_rollout"
OTHERS = ("verl", "vllm", "TransferQueue", "tensordict", "torch", "transformers")
"""Distributions of which all nodes need the same version. Ray itself compares its own version and Python's."""
ADVICE = (
    "All nodes need the same packages: install them there with the same command, or let all nodes use one environment "
    "on a shared disk. Then start Ray again on that node, since its processes have the environment of `ray start`"
)
PROBE = ".seen-by-all-nodes-"
"""How the name of a file begins that is in a folder for a moment."""


@dataclass(frozen=True, slots=True)
class NodePackages:
    """What one node has."""

    node: str
    """Host name and address."""
    packages: Mapping[str, str]
    """Version by the name of the package; a missing one is not in it."""
    unseen: Sequence[str] = ()
    """Files of other nodes that it does not see."""


def require_equal_nodes(folders: Mapping[str, Path | None], timeout_s: float) -> set[Path]:
    """Compare the packages of all nodes that run processes with those of this one, and warn of unshared folders.

    `folders`: what a folder is for, and the folder. Returns those that a node does not see.

    Raises:
        VersionError: names the nodes that lack a package or have another version of it.
        ClusterError: a node did not tell its packages within `timeout_s`.
    """
    others = _others()
    if not others:
        return set()
    packages, _ = look_at_node()(PACKAGE, OTHERS, ())
    own = NodePackages(f"this node ({ray.util.get_node_ip_address()})", packages)
    with ExitStack() as stack:
        probes = {
            name: (folder, what)
            for what, folder in folders.items()
            if folder is not None and (name := _probe(folder, stack))
        }
        found = _ask(others, list(probes), timeout_s)
    if wrong := differences(own, found):
        raise VersionError(f"{'; '.join(wrong)}. {ADVICE}")
    for other in found:
        for name in other.unseen:
            logger.warning(
                "node %s does not see %s of %s: what is written there is spread over the nodes. After the loss of a "
                "node, or on other nodes, the run cannot go on from it. Set a folder that all nodes share",
                other.node,
                "{} ({})".format(*probes[name]),
                own.node,
            )
    return {probes[name][0] for other in found for name in other.unseen}


def remove_elsewhere(ranks: Sequence[ActorHandle], folders: Sequence[Path], timeout_s: float) -> None:
    """Remove folders, which are gone here, from the disks of the nodes of training ranks.

    Only there: at the same path of another node's disk the folder is another run's. Where all nodes share a disk there
    is nothing to remove. What is not removed within `timeout_s` from all of them together costs a warning.
    """
    paths, addresses = [str(folder) for folder in folders], {node_of(rank) for rank in ranks}
    nodes = [node for node in _others() if node["NodeManagerAddress"] in addresses]
    run = ray.remote(num_cpus=0, max_retries=0)(remove_folders)  # not in the ranks: a slow disk would keep them
    calls: list[ray.ObjectRef[list[str]]] = [_on(node, run).remote(paths) for node in nodes]
    ready = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)[0] if calls else []
    for node, call in zip(nodes, calls, strict=True):
        left, why = paths, f"it did not answer within {timeout_s:g} s"
        if call in ready:
            try:
                left, why = ray.get(call), "they cannot be removed"
            except RayError as error:
                why = str(error)
        if left:
            logger.warning("%s may still be on node %s: %s", ", ".join(left), _name(node), why)


def remove_folders(paths: Sequence[str]) -> list[str]:
    """Remove folders from this node; returns those that are still there."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    return [path for path in paths if os.path.lexists(path)]


def _others() -> list[dict[str, Any]]:
    """Living nodes that run processes, without this one."""
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    return [node for node in alive if node["NodeID"] != here]


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _on(node: Mapping[str, Any], function: Any) -> Any:
    return function.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False))


def _probe(folder: Path, until: ExitStack) -> str:
    """Put a file into the folder that is gone with `until`; returns its name, or nothing where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return until.enter_context(tempfile.NamedTemporaryFile(prefix=PROBE, dir=folder)).name
    except OSError as error:  # a run that writes there will say so
        logger.warning("whether other nodes see %s is not known: %s", folder, error)
        return ""


def differences(own: NodePackages, others: Sequence[NodePackages]) -> list[str]:
    """What other nodes lack or have in another version, in words.

    >>> own = NodePackages("a", {"partial_rollout": "0.2.0", "verl": "0.9.1"})
    >>> differences(own, [NodePackages("b", {"verl": "0.9.1"}), own])
    ['node b lacks partial_rollout 0.2.0']
    >>> differences(own, [NodePackages("c", {"partial_rollout": "0.2.0", "verl": "0.9.0"})])
    ['node c has verl 0.9.0, a has 0.9.1']
    """
    wrong: list[str] = []
    for other in others:
        for name, version in own.packages.items():
            found = other.packages.get(name)
            if found is None:
                wrong.append(f"node {other.node} lacks {name} {version}")
            elif found != version:
                wrong.append(f"node {other.node} has {name} {found}, {own.node} has {version}")
    return wrong


def look_at_node() -> Callable[[str, Sequence[str], Sequence[str]], tuple[dict[str, str], list[str]]]:
    """A function that tells versions and which files are not there, and runs where this package is not installed.

    Ray sends a function of a module by name, and one that is made in a function as it is.
    """

    def look(package: str, others: Sequence[str], files: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        import hashlib
        from importlib import metadata, util
        from pathlib import Path

        def version_of(name: str) -> str | None:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                return None

        unseen = [name for name in files if not Path(name).exists()]
        found = {name: version for name in others if (version := version_of(name)) is not None}
        for point in metadata.entry_points(name=package):
            found[f"entry point {point.group} of {package}"] = point.value
        spec = util.find_spec(package)
        if spec is None or spec.origin is None:  # an empty folder of that name has no origin
            return found, unseen
        digest, folder = hashlib.sha256(), Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
        # Two checkouts of one version differ too.
        found[package] = f"{version_of(package) or 'not installed'} (sources {digest.hexdigest()[:8]})"
        return found, unseen

    return look


def _ask(nodes: Sequence[Mapping[str, Any]], files: Sequence[str], timeout_s: float) -> list[NodePackages]:
    look = ray.remote(num_cpus=0, max_retries=0)(look_at_node())
    calls = [_on(node, look).remote(PACKAGE, OTHERS, files) for node in nodes]
    names = [_name(node) for node in nodes]
    who_waits = f"the task runner waits for {', '.join(names)} to tell their packages"
    try:
        answers = wait_for_all(calls, timeout_s=timeout_s, who_waits=who_waits)
    except RayError as error:
        raise ClusterError(f"{who_waits}: {error}") from error
    return [NodePackages(name, *answer) for name, answer in zip(names, answers, strict=True)]
