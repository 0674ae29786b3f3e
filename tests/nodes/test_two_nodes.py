"""A training job over two nodes: ranks, engines and agent-loop workers on both, its checkpoint in a shared folder."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from partial_rollout.observability.events import AnyEvent, BatchTaken, EventReader, GateMoved, ProcessFound, StepEnded
from partial_rollout.runtime.processes import AGENT_LOOP_WORKER, ENGINE, PROMPT_MANAGER, TASK_RUNNER, TRAINING_RANK
from tests.e2e.conftest import FLAG, is_conserved, traced
from tests.nodes.conftest import BATCH, JOB_LIMIT_S, job_command, lines_of, read_until, run_on_head

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.two_nodes import Node
    from tests.nodes.conftest import Cluster

CALL_S = 180.0
"""Importing Ray and joining the cluster on a busy machine."""
CHECK_NODES = """
import pathlib, sys, ray
from partial_rollout.train.nodes import require_equal_nodes
ray.init()
require_equal_nodes({"shared": pathlib.Path(sys.argv[1]), "own": pathlib.Path("/tmp/own")}, 120.0)
"""
REMOVE = """
import pathlib, sys, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from partial_rollout.train.nodes import remove_elsewhere
ray.init()
class Rank:
    pass
where, *names = sys.argv[1:]
node = next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == where)
there = NodeAffinitySchedulingStrategy(node, soft=False)
rank = ray.remote(num_cpus=0)(Rank).options(scheduling_strategy=there).remote()
ray.get(rank.__ray_ready__.remote(), timeout=120)
remove_elsewhere([rank], [pathlib.Path(name) for name in names], 120.0)
"""
PLACE_MANAGERS = """
import ray
from partial_rollout.runtime.death_watch import describe
from partial_rollout.runtime.placement import on_this_node
from partial_rollout.runtime.prompt_manager import create_manager
from partial_rollout.settings.block import PartialRolloutConfig
ray.init()
names = [f"manager_{number}" for number in range(4)]
managers = [create_manager(PartialRolloutConfig(), 8, on_this_node(), name) for name in names]
found = ray.get([manager.__ray_call__.remote(describe) for manager in managers], timeout=120)
print("placed on", *sorted({process.node for process in found}))
"""
EXPORT_METRICS = """
import signal, ray
from partial_rollout.runtime.placement import on_this_node
from partial_rollout.runtime.prompt_manager import create_manager
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.types import PromptMeta
ray.init(log_to_driver=False)
manager = create_manager(PartialRolloutConfig(), 8, on_this_node(), "exporting")
ray.get(manager.report_step.remote(1, 0, "open"), timeout=120)
ray.get(manager.admit.remote([PromptMeta(f"p{number}", 1, global_step=1) for number in range(7)]), timeout=120)
print("targets", *(f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()), flush=True)
signal.pause()
"""
READ_METRICS = """
import sys, time, urllib.request
until_s = time.monotonic() + 120
while time.monotonic() < until_s:
    for target in sys.argv[2:]:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line.startswith(sys.argv[1])]
        if lines:
            print("found", target, *lines)
            sys.exit()
    time.sleep(0.5)
"""
GET = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1], timeout=60) as answer:
    print(answer.status, answer.read().decode())
"""
PAIR = (TASK_RUNNER, PROMPT_MANAGER)
"""On one node, that of the driver, so that no second node takes the run with it."""
RANK_FILES = ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt")


def test_the_nodes_have_memory_files_and_addresses_of_their_own(cluster: Cluster) -> None:
    """What one of them puts on /tmp or /dev/shm, or listens to, the other one does not find."""
    for folder in ("/tmp", "/dev/shm"):
        cluster.head.run("touch", f"{folder}/of-the-head")
        assert "of-the-head" not in cluster.other.run("ls", folder)
    for node, other in ((cluster.head, cluster.other), (cluster.other, cluster.head)):
        assert node.address in node.run("hostname", "-i")
        assert other.address not in node.run("ip", "-brief", "address")
        (cluster.shared / node.name).touch()
        assert node.name in other.run("ls", str(cluster.shared))


def test_a_node_without_the_package_is_named_and_so_is_a_folder_that_it_does_not_see(
    cluster: Cluster, tmp_path: Path, repository: Path
) -> None:
    """First an empty folder hides the package on the second node, then nothing does."""
    check = [sys.executable, "-c", CHECK_NODES, str(cluster.shared)]
    package, empty = str(repository / "partial_rollout"), "/dev/shm/empty"
    cluster.other.run("mkdir", empty)
    cluster.other.run("mount", "--bind", empty, package)
    code, output = run_on_head(cluster, check, tmp_path / "hidden", CALL_S)
    cluster.other.run("umount", package)
    assert code == 1
    told = [line for line in output.splitlines() if "VersionError: " in line][-1]
    assert f"node {cluster.other.name} ({cluster.other.address}) lacks partial_rollout 0." in told
    assert cluster.head.name not in told
    code, output = run_on_head(cluster, check, tmp_path / "there", CALL_S)
    assert code == 0, output
    warnings = [line for line in output.splitlines() if "does not see" in line]
    assert len(warnings) == 1
    assert f"node {cluster.other.name} ({cluster.other.address}) does not see /tmp/own (own)" in warnings[0]


def test_old_checkpoints_go_from_the_disks_of_training_ranks_only(cluster: Cluster, tmp_path: Path) -> None:
    """The rank of the run is on the second node."""
    for node in (cluster.head, cluster.other):
        node.run("mkdir", "-p", "/tmp/saved/global_step_1/actor", "/tmp/saved/global_step_2/actor")
    folders = ("/tmp/saved/global_step_1", "/tmp/saved/is-not-there")
    remove = [sys.executable, "-c", REMOVE, cluster.other.address, *folders]
    code, output = run_on_head(cluster, remove, tmp_path / "removed", CALL_S)
    assert code == 0, output
    assert "may still be" not in output
    assert cluster.other.run("ls", "/tmp/saved").split() == ["global_step_2"]
    assert cluster.head.run("ls", "/tmp/saved").split() == ["global_step_1", "global_step_2"]


def test_the_prompt_manager_is_on_the_node_of_its_maker(cluster: Cluster, tmp_path: Path) -> None:
    code, output = run_on_head(cluster, [sys.executable, "-c", PLACE_MANAGERS], tmp_path / "placed", CALL_S)
    assert code == 0, output
    assert f"placed on {cluster.head.address}\n" in output


def test_metrics_of_the_prompt_manager_are_read_from_the_other_node(cluster: Cluster) -> None:
    with lines_of(cluster.head, sys.executable, "-c", EXPORT_METRICS) as lines:
        targets = next(line.split()[1:] for line in lines if line.startswith("targets"))
        assert {target.rpartition(":")[0] for target in targets} == {cluster.head.address, cluster.other.address}
        read = [sys.executable, "-c", READ_METRICS, "ray_partial_rollout_admitted_prompts_total"]
        found = cluster.other.run(*read, *targets, limit_s=CALL_S)
    assert re.search(rf"found {re.escape(cluster.head.address)}:\d+ .* 7\.0\b", found), found


@pytest.mark.timeout(3 * JOB_LIMIT_S)
def test_a_job_over_both_nodes_goes_on_from_its_checkpoint_with_the_nodes_swapped(cluster: Cluster, task: Path) -> None:
    """Two jobs of two steps; a third of the groups is long, so that steps end with requests in the engines.

    The second job's driver is on the other node. Each is looked at from the node where its driver is not.
    """
    folder = cluster.shared / "job"
    folder.mkdir()
    options = [FLAG, *traced(task, folder, num_rows=64, every=3), "trainer.save_freq=2", "trainer.test_freq=-1"]
    reader, events = EventReader(folder / "events"), []
    for last, node, other in ((2, cluster.head, cluster.other), (4, cluster.other, cluster.head)):
        log = folder / f"log-{node.name}"
        command = job_command(task, folder, *options, f"trainer.total_training_steps={last}")
        with log.open("w") as file:
            job = node.popen(*command, stdout=file)
            events += read_until(lambda event: isinstance(event, GateMoved) and event.is_open, reader, job, log)
            _check_views(other, folder / "events")
            code = job.wait(JOB_LIMIT_S)
        events += reader.read()
        output = log.read_text()
        assert code == 0, output[-4000:]
        assert "Traceback" not in output
    steps = [event for event in events if isinstance(event, StepEnded)]
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert all(is_conserved(step.metrics) for step in steps)
    for name in ("interrupted", "resumed_trajectories"):
        assert any(step.metrics[f"partial_rollout/{name}"] for step in steps), name
    _check_both_nodes_worked(cluster, events)
    for step in (2, 4):
        saved = folder / f"checkpoints/global_step_{step}"
        whole = json.loads((saved / "partial_rollout/whole.json").read_text())["bytes"]
        assert {f"actor/{name}" for name in RANK_FILES} <= whole.keys()
    batches = [event for event in events if isinstance(event, BatchTaken)]
    uids = Counter(uid for batch in batches for uid in batch.uids)
    assert (len(uids), set(uids.values())) == (4 * BATCH, {1})


def _check_both_nodes_worked(cluster: Cluster, events: list[AnyEvent]) -> None:
    found = [event for event in events if isinstance(event, ProcessFound)]
    for kind in (TRAINING_RANK, ENGINE, AGENT_LOOP_WORKER):
        nodes = {event.node for event in found if event.role == kind.role}
        assert nodes == {cluster.head.address, cluster.other.address}, kind.role
    by_pid = [{event.pid: event.node for event in found if event.role == kind.role} for kind in PAIR]
    runners, managers = (list(nodes.values()) for nodes in by_pid)
    assert managers == runners
    assert runners == [cluster.head.address, cluster.other.address]  # where the driver is


def _check_views(node: Node, events: Path) -> None:
    """What a user on this node sees of the run: its queue, what its oldest prompts wait for, and its page."""
    status = [sys.executable, "-m", "partial_rollout.status"]
    queue = json.loads(node.run(*status, "--json", limit_s=CALL_S))["queue"]
    assert queue["admitted"] >= BATCH
    why = node.run(*status, "--why", limit_s=CALL_S)
    assert re.search("trajectories wait|no trajectory is unfinished", why), why
    with lines_of(node, sys.executable, "-m", "partial_rollout.view", str(events)) as lines:
        found = node.run(sys.executable, "-c", GET, next(lines).split()[0], limit_s=CALL_S)
    assert found.startswith("200 ")
