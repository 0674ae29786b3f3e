"""Two nodes in namespaces of this machine, with one Ray cluster over both for all tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from scripts.two_nodes import Node, ray_cluster, two_nodes, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Cluster:
    """Two nodes, and the folder that both see."""

    head: Node
    other: Node
    shared: Path


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Gone with the session, and all processes on it."""
    if reason := why_not():
        pytest.fail(f"two nodes cannot be made here: {reason}. To leave these tests out: --ignore=tests/nodes")
    shared = tmp_path_factory.mktemp("shared")
    with two_nodes([shared]) as nodes, ray_cluster(nodes) as (head, other):
        yield Cluster(head, other, shared)


@pytest.fixture(scope="session")
def task(cluster: Cluster) -> Path:
    """The quickstart's data and its starting checkpoint."""
    from partial_rollout.run.quickstart import make_task  # imports torch, in commands that leave this folder out too

    out = cluster.shared / "task"
    make_task.main(["--out", str(out), "--num-train", "256", "--num-val", "8", "--warm-start-steps", "500"])
    return out
