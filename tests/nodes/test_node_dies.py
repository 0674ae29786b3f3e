"""A node dies with all of its processes while the job generates; another one takes its place."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability.events import AnyEvent, EventReader, Fault, ProcessFound, SegmentEnded, StepEnded
from partial_rollout.observability.step_line import REPLAYED
from partial_rollout.runtime.processes import ENGINE, NODE
from scripts.two_nodes import Node, join_cluster, ray_cluster, second_node, two_nodes
from tests.e2e.conftest import FLAG, is_conserved, times_trained, traced
from tests.e2e.greedy import SAME_WEIGHTS, check_responses
from tests.faults.conftest import GENERATING, report
from tests.faults.measured import cost_of
from tests.nodes.conftest import BATCH, JOB_LIMIT_S, job_command, read_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["report"]
NUM_STEPS = 5
DIES_IN = 4
"""The step in which the node dies: one after a step that no checkpoint has."""
SAVE_FREQ = 2
KNOWN_S = 120.0
"""Ray calls a node dead that does not answer; seen after 12 to 64 s."""


@pytest.mark.timeout(3 * JOB_LIMIT_S)
def test_a_job_goes_on_from_its_checkpoint_when_a_node_has_died_and_another_one_has_joined(
    shared: Path, task: Path, report: dict[str, Any]
) -> None:
    report |= {"blows": [check_goes_on(shared / "dies", task, Node.kill) | {"signal": "SIGKILL"}]}


def check_goes_on(
    folder: Path, task: Path, lose: Callable[[Node], None], then: Callable[[Node], None] = lambda _: None
) -> dict[str, Any]:
    """A job of two nodes ends with all its steps and the right responses, though it loses the second one by `lose`.

    A third one joins. After the job's end `then` looks at the lost one. Returns what the loss cost.
    """
    folder.mkdir()
    log, dumps = folder / "log", folder / "dumps"
    options = [FLAG, *SAME_WEIGHTS, *traced(task, folder, num_rows=64, every=3), f"trainer.rollout_data_dir={dumps}"]
    steps = [f"trainer.save_freq={SAVE_FREQ}", "trainer.test_freq=-1", f"trainer.total_training_steps={NUM_STEPS}"]
    command = job_command(task, folder, *options, *steps)
    reader = EventReader(folder / "events")
    with log.open("w") as file, two_nodes([folder.parent]) as nodes, ray_cluster(nodes) as (head, other):
        job = head.popen(*command, stdout=file)
        before = read_until(_ends_step(DIES_IN - 1), reader, job, log)
        lost_s = time.time()
        lose(other)
        with second_node(head, [folder.parent], place=2) as another:
            join_cluster(head, another)
            code = job.wait(JOB_LIMIT_S)
        then(other)
    assert code == 0, log.read_text()[-4000:]
    events = before + reader.read()
    faults = [event for event in events if isinstance(event, Fault)]
    ended = [event for event in events if isinstance(event, StepEnded)]
    assert [event.step for event in ended if event.t < lost_s] == list(range(1, DIES_IN))
    again = [event for event in ended if event.t > lost_s]
    assert [event.step for event in again] == list(range(SAVE_FREQ + 1, NUM_STEPS + 1))
    assert (again[0].metrics[REPLAYED] or 0) > 0
    assert all(is_conserved(event.metrics) for event in ended)
    uids = times_trained(events)
    assert (len(uids), set(uids.values())) == (NUM_STEPS * BATCH, {1})
    assert faults[0].t - lost_s < KNOWN_S
    engines = [event for event in events if isinstance(event, ProcessFound) and event.role == ENGINE.role]
    assert {event.node for event in engines if event.t < lost_s} == {head.address, other.address}
    assert {event.node for event in engines if event.t > lost_s} == {head.address, another.address}
    assert any(other.address in fault.text for fault in faults)
    check_responses(task / "model", dumps)
    assert _num_moved(events, other.address, lost_s) > 0
    return {"role": NODE.role, "while": GENERATING, "step": DIES_IN, **asdict(cost_of(events, lost_s))}


def _num_moved(events: list[AnyEvent], lost: str, lost_s: float) -> int:
    """How many responses that had begun on the lost node went on from their tokens on one of the two that are there."""
    segments = defaultdict(list)
    for event in events:
        if isinstance(event, SegmentEnded):
            segments[event.uid, event.session].append(event)
    return sum(
        any(
            before.t < lost_s
            and before.server.startswith(lost)
            and before.tokens
            and before.prompt_tokens + before.tokens == after.prompt_tokens
            for before in each
        )
        for each in segments.values()
        for after in each
        if after.t > lost_s
    )


def _ends_step(step: int) -> Callable[[AnyEvent], bool]:
    return lambda event: isinstance(event, StepEnded) and event.step == step
