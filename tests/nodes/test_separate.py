"""Engines on devices of their own, on another node than the training rank: weights cross the link between them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from partial_rollout.observability.events import BatchTaken, EventReader, ProcessFound, StepEnded, WeightsUpdated
from partial_rollout.runtime.processes import ENGINE, ENGINE_PLACE, TRAINING_RANK
from tests.e2e.conftest import FLAG, is_conserved, traced
from tests.e2e.greedy import SAME_WEIGHTS, check_responses
from tests.nodes.conftest import BATCH, JOB_LIMIT_S, job_command, run_on_head

if TYPE_CHECKING:
    from pathlib import Path

    from tests.nodes.conftest import Cluster

NUM_STEPS = 5


@pytest.mark.timeout(2 * JOB_LIMIT_S)
def test_an_engine_on_another_node_than_the_training_rank_gets_its_weights(cluster: Cluster, task: Path) -> None:
    """Each node has one logical GPU, so the two cannot be on one node."""
    folder = cluster.shared / "separate"
    folder.mkdir()
    options = [
        FLAG,
        *SAME_WEIGHTS,
        *traced(task, folder, num_rows=64, every=3),
        f"trainer.rollout_data_dir={folder / 'dumps'}",
        "trainer.nnodes=1",
        "trainer.test_freq=-1",
        "partial_rollout.placement=separate",
        "partial_rollout.weights.encrypt=true",
        f"trainer.total_training_steps={NUM_STEPS}",
    ]
    code, output = run_on_head(cluster, job_command(task, folder, *options), folder / "log", JOB_LIMIT_S)
    assert code == 0, output[-4000:]
    assert "Traceback" not in output
    events = EventReader(folder / "events").read()
    nodes = {
        kind.role: {event.node for event in events if isinstance(event, ProcessFound) and event.role == kind.role}
        for kind in (TRAINING_RANK, ENGINE, ENGINE_PLACE)
    }
    assert len(nodes[TRAINING_RANK.role]) == 1
    assert len(nodes[ENGINE.role]) == 1
    assert nodes[TRAINING_RANK.role] | nodes[ENGINE.role] == {cluster.head.address, cluster.other.address}
    assert nodes[ENGINE_PLACE.role] == nodes[ENGINE.role]
    steps = [event for event in events if isinstance(event, StepEnded)]
    assert [step.step for step in steps] == list(range(1, NUM_STEPS + 1))
    assert all(is_conserved(step.metrics) for step in steps)
    assert any(step.metrics["partial_rollout/interrupted"] for step in steps)
    updates = [event for event in events if isinstance(event, WeightsUpdated)]
    assert [(update.version, update.relaunches) for update in updates] == [(n, 0) for n in range(NUM_STEPS + 1)]
    uids = Counter(uid for event in events if isinstance(event, BatchTaken) for uid in event.uids)
    assert (len(uids), set(uids.values())) == (NUM_STEPS * BATCH, {1})
    check_responses(task / "model", folder / "dumps")
