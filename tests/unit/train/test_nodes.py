"""A node that lacks a package, or has another version of it, is named; old checkpoints go where ranks are."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from ray.exceptions import NodeDiedError

from partial_rollout.train import nodes as nodes_module
from partial_rollout.train.nodes import (
    OTHERS,
    PACKAGE,
    NodePackages,
    differences,
    look_at_node,
    remove_elsewhere,
    remove_folders,
)

if TYPE_CHECKING:
    from pathlib import Path

OWN = NodePackages("this node", {"verl": "0.9.1", "vllm": "0.24.0"})
CALL_S = 60


def test_equal_nodes_have_no_differences() -> None:
    other = NodePackages("node-2 (10.0.0.2)", {"vllm": "0.24.0", "verl": "0.9.1", "more": "1.0"})
    assert differences(OWN, [other, other]) == []


def test_each_node_is_named_with_what_it_lacks_and_what_is_other() -> None:
    second = NodePackages("node-2 (10.0.0.2)", {"verl": "0.9.1"})
    third = NodePackages("node-3 (10.0.0.3)", {"verl": "0.9.0", "vllm": "0.24.0"})
    assert differences(OWN, [second, third]) == [
        "node node-2 (10.0.0.2) lacks vllm 0.24.0",
        "node node-3 (10.0.0.3) has verl 0.9.0, this node has 0.9.1",
    ]


def test_the_package_is_found_with_its_sources_and_entry_points() -> None:
    found, _ = look_at_node()(PACKAGE, OTHERS, ())
    assert "(sources " in found[PACKAGE]
    assert found["entry point verl.plugins of partial_rollout"] == "partial_rollout.integrations.verl_plugin"
    assert found["verl"]


@pytest.mark.parametrize("is_folder", [False, True], ids=["nothing", "an empty folder"])
def test_it_is_asked_for_where_it_is_not_installed(tmp_path: Path, is_folder: bool) -> None:
    """Ray sends the function to a node on which this package cannot be imported."""
    (tmp_path / "sent").write_bytes(cloudpickle.dumps(look_at_node()))
    if is_folder:
        (tmp_path / "absent").mkdir()
    code = (
        "import cloudpickle, pathlib, sys; find = cloudpickle.loads(pathlib.Path('sent').read_bytes()); "
        "print(find('absent', ['absent_too'], ['sent', 'unseen']), 'partial_rollout' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=CALL_S)
    assert run.stdout.strip() == "({}, ['unseen']) False", run.stderr


def test_two_checkouts_of_one_version_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkouts have the same names and versions, and one line differs."""
    for folder, line in (("first", "1"), ("second", "2")):
        (tmp_path / folder / "checked_out").mkdir(parents=True)
        (tmp_path / folder / "checked_out/__init__.py").write_text(f"VALUE = {line}\n")
    found: list[str] = []
    for folder in ("first", "second", "first"):
        monkeypatch.setattr(sys, "path", [str(tmp_path / folder), *sys.path])
        found.append(look_at_node()("checked_out", (), ())[0]["checked_out"])
    assert found[0] == found[2] != found[1]


class Ray:
    """Ray with three other nodes; `answers` has what their calls return or raise, and nothing of a late one."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.waits_s = answers, list[float]()

    def remote(self, **_options: Any) -> Any:
        return lambda function: function

    def wait(self, calls: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        self.waits_s.append(timeout)
        return [call for call in calls if call in self.answers], []

    def get(self, call: str) -> Any:
        if isinstance(answer := self.answers[call], Exception):
            raise answer
        return answer


def test_old_checkpoints_are_removed_from_nodes_of_the_runs_ranks_and_one_time_bounds_all_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """No other node is asked: at this path it may have a checkpoint of another run."""
    asked: list[tuple[str, object, list[str]]] = []
    gone = str(tmp_path / "global_step_3")
    ray = Ray({"10.0.0.2": [], "10.0.0.3": NodeDiedError("the node died"), "10.0.0.4": [gone], "10.0.0.9": []})

    def on(node: dict[str, str], function: object) -> object:
        where = node["NodeManagerAddress"]
        return SimpleNamespace(remote=lambda paths: asked.append((where, function, paths)) or where)

    addresses = [f"10.0.0.{number}" for number in (2, 3, 4, 5, 9)]
    others = [{"NodeManagerHostname": f"host-{each[-1]}", "NodeManagerAddress": each} for each in addresses]
    monkeypatch.setattr(nodes_module, "ray", ray)
    monkeypatch.setattr(nodes_module, "_others", lambda: others)
    monkeypatch.setattr(nodes_module, "_on", on)
    monkeypatch.setattr(nodes_module, "node_of", lambda rank: rank)
    ranks: Any = ["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"]
    remove_elsewhere(ranks, [tmp_path / "global_step_3"], 1.0)
    assert asked == [(node, remove_folders, [gone]) for node in addresses[:-1]]
    assert ray.waits_s == [1.0]
    assert [record.getMessage() for record in caplog.records] == [
        f"{gone} may still be on node host-3 (10.0.0.3): the node died",
        f"{gone} may still be on node host-4 (10.0.0.4): they cannot be removed",
        f"{gone} may still be on node host-5 (10.0.0.5): it did not answer within 1 s",
    ]


def test_a_node_says_which_old_checkpoints_it_could_not_remove(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("global_step_1", "global_step_2"):
        (tmp_path / name / "actor").mkdir(parents=True)
    gone, none, stays = (str(tmp_path / name) for name in ("global_step_1", "nowhere", "global_step_2"))
    assert remove_folders([gone, none]) == []
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_2"]
    monkeypatch.setattr(nodes_module.shutil, "rmtree", lambda path, ignore_errors: None)
    assert remove_folders([none, stays]) == [stays]
