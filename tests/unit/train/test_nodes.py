"""A node that lacks a package, or has another version of it, is named; one that dies keeps old checkpoints."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import cloudpickle
import pytest
from ray.exceptions import NodeDiedError, WorkerCrashedError

from partial_rollout.errors import WaitTimeout
from partial_rollout.train import nodes as nodes_module
from partial_rollout.train.nodes import OTHERS, PACKAGE, NodePackages, differences, look_at_node, remove_elsewhere

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


@pytest.mark.parametrize("error", [WorkerCrashedError(), NodeDiedError("gone"), WaitTimeout("late")], ids=type)
def test_a_node_that_dies_while_it_removes_old_checkpoints_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    names = [{"NodeManagerHostname": name, "NodeManagerAddress": "10.0.0.2"} for name in ("node-2", "node-3")]
    monkeypatch.setattr(nodes_module, "_others", lambda: names)
    monkeypatch.setattr(nodes_module, "_on", lambda node, function: SimpleNamespace(remote=lambda paths: node))
    monkeypatch.setattr(nodes_module, "wait_for", fail)
    remove_elsewhere([tmp_path / "global_step_3"], 1.0)
    for name in ("node-2", "node-3"):
        assert f"global_step_3 may still be on node {name} (10.0.0.2): {error}" in caplog.text
