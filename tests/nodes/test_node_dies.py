"""A node dies with all of its processes while the job generates; another one takes its place."""

from __future__ import annotations

import json
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from partial_rollout.observability.events import AnyEvent, EventReader, Fault, ProcessFound, StepEnded
from partial_rollout.runtime.processes import ENGINE
from scripts.two_nodes import join_cluster, ray_cluster, second_node, two_nodes
from tests.e2e.conftest import FLAG, is_conserved, times_trained, traced
from tests.nodes.conftest import BATCH, JOB_LIMIT_S, job_command

if TYPE_CHECKING:
    from pathlib import Path

NUM_STEPS = 4
DIES_IN = 3
"""The step in which the node dies."""
LOOK_S = 0.2


@pytest.mark.timeout(3 * JOB_LIMIT_S)
def test_a_job_goes_on_from_its_checkpoint_when_a_node_has_died_and_another_one_has_joined(
    shared: Path, task: Path
) -> None:
    folder = shared / "dies"
    folder.mkdir()
    log = folder / "log"
    options = [FLAG, *traced(task, folder, num_rows=64, every=3), "trainer.save_freq=1", "trainer.test_freq=-1"]
    command = job_command(task, folder, *options, f"trainer.total_training_steps={NUM_STEPS}")
    reader = EventReader(folder / "events")
    with log.open("w") as file, two_nodes([shared]) as nodes, ray_cluster(nodes) as (head, other):
        job = head.popen(*command, stdout=file)
        before = _read_until_step(DIES_IN - 1, reader, job, log)
        died_s = time.time()
        other.kill()
        with second_node(head, [shared]) as another:
            join_cluster(head, another)
            code = job.wait(JOB_LIMIT_S)
    assert code == 0, log.read_text()[-4000:]
    events = before + reader.read()
    faults = [event for event in events if isinstance(event, Fault)]
    ended = [event for event in events if isinstance(event, StepEnded)]
    measured = {
        "known_s": round(faults[0].t - died_s, 1),
        "step_done_s": round(next(event.t for event in ended if event.t > died_s) - died_s, 1),
        "faults": [fault.text for fault in faults],
    }
    print(json.dumps(measured))
    assert [event.step for event in ended] == list(range(1, NUM_STEPS + 1))
    assert all(is_conserved(event.metrics) for event in ended)
    uids = times_trained(events)
    assert (len(uids), set(uids.values())) == (NUM_STEPS * BATCH, {1})
    # The new node has the dead one's address, which can have written nothing since.
    engines = [event for event in events if isinstance(event, ProcessFound) and event.role == ENGINE.role]
    assert {event.node for event in engines if event.t > died_s} == {head.address, other.address}
    assert any(other.address in fault.text for fault in faults)


def _read_until_step(step: int, reader: EventReader, job: subprocess.Popen[str], log: Path) -> list[AnyEvent]:
    """All events until this step has ended."""
    events: list[AnyEvent] = []
    deadline_s = time.monotonic() + JOB_LIMIT_S
    while not any(isinstance(event, StepEnded) and event.step == step for event in events):
        assert time.monotonic() < deadline_s, log.read_text()[-4000:]
        assert job.poll() is None, log.read_text()[-4000:]
        try:
            job.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            events += reader.read()
    return events
