"""The link to a node is cut while the job generates: its processes live, and nobody reaches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.nodes.conftest import JOB_LIMIT_S
from tests.nodes.test_node_dies import check_goes_on

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.two_nodes import Node


@pytest.mark.timeout(3 * JOB_LIMIT_S)
def test_a_job_goes_on_from_its_checkpoint_when_the_link_to_a_node_is_cut(shared: Path, task: Path) -> None:
    """The node that is cut off goes on: it can neither write into the queue nor into the stream of the run again."""
    check_goes_on(shared / "cut", task, _cut)


def _cut(node: Node) -> None:
    node.run("ip", "link", "set", "eth0", "down")
