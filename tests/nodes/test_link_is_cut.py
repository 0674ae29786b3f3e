"""The link to a node is cut while the job generates: its processes live, and nobody reaches them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.faults.conftest import report
from tests.nodes.conftest import JOB_LIMIT_S, processes_of
from tests.nodes.test_node_dies import check_goes_on

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.two_nodes import Node

__all__ = ["report"]
ALONE_S = 300.0
"""Ray ends the processes of a node that has not reached the cluster for a minute; only its log monitor may stay."""
OF_JOB = ("ray::", "VLLM::", "raylet")


@pytest.mark.timeout(3 * JOB_LIMIT_S)
def test_a_job_goes_on_from_its_checkpoint_when_the_link_to_a_node_is_cut(
    shared: Path, task: Path, report: dict[str, Any]
) -> None:
    """The node that is cut off sees the shared folder, and may write into it: files of its own start, which end."""
    report |= {"blows": [check_goes_on(shared / "cut", task, _cut, _check_alone_ended) | {"signal": "cut off"}]}


def _cut(node: Node) -> None:
    node.run("ip", "link", "set", "eth0", "down")


def _check_alone_ended(node: Node) -> None:
    own = [process for process in processes_of(node.pid) if process.name().startswith(OF_JOB)]
    left = psutil.wait_procs(own, timeout=ALONE_S)[1]
    assert [process.as_dict(["pid", "ppid", "name", "status"]) for process in left] == []
