"""What only the cluster knows is decided there, and reaches the servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from omegaconf import OmegaConf

from partial_rollout.errors import WaitTimeout
from partial_rollout.settings.auto import MODE_KEY, SLOTS_KEY
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.settings.memory import GIB, Machine
from partial_rollout.train import start_choices
from partial_rollout.train.start_choices import choose_on_cluster, container_free

if TYPE_CHECKING:
    from pathlib import Path

    from omegaconf import DictConfig
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def configuration(tail: dict | None = None) -> DictConfig:
    """Configuration of a GPU job whose engines release their memory; its model is on no disk."""
    block = PartialRolloutConfig.from_mapping({"tail": tail or {}}).to_mapping()
    rollout = {"free_cache_engine": True, "n": 4, "agent": {"num_workers": 1}, "custom": {"partial_rollout": block}}
    return OmegaConf.create(
        {
            "partial_rollout": block,
            "actor_rollout_ref": {"rollout": rollout, "model": {"path": "no/model"}},
            "data": {"train_batch_size": 8},
            "trainer": {"device": "cuda"},
        }
    )


def told(config: DictConfig) -> PartialRolloutConfig:
    return PartialRolloutConfig.from_rollout(config.actor_rollout_ref.rollout.custom)


@pytest.mark.parametrize("offline", ["1", ""])
def test_what_the_driver_left_open_is_decided_and_told_to_servers(monkeypatch: pytest.MonkeyPatch, offline: str):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(start_choices, "ask_hub", lambda name: f"{name} is not told")
    monkeypatch.setattr(start_choices, "look_at_nodes", lambda: Machine(host_bytes=512 * GIB))
    config = configuration()
    assert told(config).tail.interrupt_mode == "auto"
    mode, slots, depth = choose_on_cluster(config)
    assert (depth.value, depth.why) == (2.0, "more batches would only make tokens older")
    assert (mode.key, mode.value) == (MODE_KEY, "abort")
    assert ("no/model is not told" in mode.seen) == (not offline)
    assert (slots.key, slots.value) == (SLOTS_KEY, False)
    assert told(config).tail.interrupt_mode == "abort"
    assert config.partial_rollout.tail.interrupt_mode == "abort"


def test_nodes_are_not_looked_at_for_what_is_decided(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start_choices, "look_at_nodes", lambda: pytest.fail("nobody asked"))
    assert choose_on_cluster(configuration({"interrupt_mode": "abort"})) == []


A, B = "0a" * 28, "0b" * 28
NODES = [
    {"Alive": True, "NodeID": A, "Resources": {"GPU": 8.0, "object_store_memory": 30.0 * GIB}},
    {"Alive": True, "NodeID": B, "Resources": {"GPU": 8.0, "object_store_memory": 90.0 * GIB}},
    {"Alive": False, "NodeID": "dead", "Resources": {"GPU": 8.0}},
    {"Alive": True, "NodeID": "head", "Resources": {"CPU": 4.0}},
]


class Look:
    """A task of Ray's that was not started: its call says on which node it would run."""

    node = ""

    def options(self, scheduling_strategy: NodeAffinitySchedulingStrategy) -> Look:
        look = Look()
        look.node = scheduling_strategy.node_id
        return look

    def remote(self) -> str:
        return self.node


def test_the_least_of_all_nodes_with_devices_counts(monkeypatch: pytest.MonkeyPatch):
    free = {A: (200 * GIB, 100 * GIB, 80 * GIB), B: (220 * GIB, 180 * GIB, 40 * GIB)}
    monkeypatch.setattr(start_choices.ray, "nodes", lambda: NODES)
    monkeypatch.setattr(start_choices.ray, "remote", lambda **_options: lambda _task: Look())
    monkeypatch.setattr(start_choices, "wait_for_all", lambda calls, **_bounds: [free[call] for call in calls])
    machine = start_choices.look_at_nodes()
    assert (machine.host_bytes, machine.shm_bytes, machine.gpu_bytes) == (130 * GIB, 70 * GIB, 40 * GIB)
    free[A] = (200 * GIB, 100 * GIB, None)
    assert start_choices.look_at_nodes().gpu_bytes is None


@pytest.mark.parametrize(
    ("command", "gib"),
    [
        (["echo", "81559\n46068\n"], 46068 / 1024),
        (["echo", "No devices were found"], None),
        (["false"], None),
        (["/nowhere/nvidia-smi"], None),
    ],
)
def test_the_smallest_gpu_is_what_the_drivers_tool_says(command: list[str], gib: float | None):
    told = start_choices.gpu_memory(["printf", command[1]] if command[0] == "echo" else command)
    assert told == (None if gib is None else int(gib * GIB))


def test_a_node_that_does_not_answer_is_not_known(monkeypatch: pytest.MonkeyPatch):
    def late(*_calls: object, **_bounds: object) -> None:
        raise WaitTimeout("no answer")

    monkeypatch.setattr(start_choices.ray, "nodes", lambda: NODES)
    monkeypatch.setattr(start_choices.ray, "remote", lambda **_options: lambda _task: Look())
    monkeypatch.setattr(start_choices, "wait_for_all", late)
    assert start_choices.look_at_nodes() == Machine()


@pytest.mark.parametrize(
    ("own", "folder", "file", "used"),
    [
        ("0::/slurm/job_7", "", "memory.max", "memory.current"),
        ("3:cpu,cpuacct:/x\n4:memory:/slurm/job_7\n", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_least_limit_of_a_group_and_those_around_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, folder: str, file: str, used: str
):
    (tmp_path / "own").write_text(own)
    job = tmp_path / "slurm/job_7"
    job.mkdir(parents=True)
    for place, limit in ((job, 1000), (job.parent, 600)):
        (place / file).write_text(f"{limit}\n")
        (place / used).write_text("300\n")
        (place / "memory.stat").write_text("anon 1\n")
    monkeypatch.setattr(start_choices, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(start_choices, "CGROUPS", [(folder, str(tmp_path), file, used, "inactive_file")])
    assert start_choices.free_memory()[0] == 300
    (job / file).write_text("400\n")
    assert start_choices.free_memory()[0] == 100


@pytest.mark.parametrize(
    ("limit", "stat", "free"),
    [("1000", "anon 1\ninactive_file 200", 900), ("1000", "anon 1", 700), ("max", "anon 1", None), (None, "", None)],
)
def test_a_container_may_take_what_is_below_its_limit(tmp_path: Path, limit: str | None, stat: str, free: int | None):
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("300\n")
        (tmp_path / "memory.stat").write_text(stat)
    assert container_free(tmp_path, "memory.max", "memory.current", "inactive_file") == free
