"""How and where Ray starts actors of ours."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

RESTARTED: dict[str, Any] = {"max_restarts": -1, "max_task_retries": -1}
"""Ray starts an actor that has died again, as the same actor: its handles stay valid, and a call without an answer is
made again. The run counts the deaths, and ends when they are too many."""


def on_this_node() -> NodeAffinitySchedulingStrategy | str:
    """The node of the calling process, unless that node offers no CPUs: then any node. For actors that need no CPU.

    The prompt manager goes on where its journal is, which is on its node. A run ends with the node of the task runner
    in any case, and on that node no other one is needed.
    """
    here = ray.get_runtime_context().get_node_id()
    offers_cpus = any(node["NodeID"] == here and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
    # Not soft: for an actor that needs no resources, Ray then takes a random node (seen with Ray 2.60).
    return NodeAffinitySchedulingStrategy(node_id=here, soft=False) if offers_cpus else "DEFAULT"
