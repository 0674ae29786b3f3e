"""Where in a Ray cluster an actor is started that needs no CPU; Ray itself takes any node for it."""

from __future__ import annotations

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def on_this_node() -> NodeAffinitySchedulingStrategy | str:
    """The node of the calling process, unless that node offers no CPUs: then any node.

    A run ends with the death of the task runner and with that of the prompt manager. On one node they are lost with
    that node only.
    """
    here = ray.get_runtime_context().get_node_id()
    offers_cpus = any(node["NodeID"] == here and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
    # Not soft: for an actor that needs no resources, Ray then takes a random node (seen with Ray 2.60).
    return NodeAffinitySchedulingStrategy(node_id=here, soft=False) if offers_cpus else "DEFAULT"
