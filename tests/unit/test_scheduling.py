"""Which tests share a process of pytest-xdist."""

from __future__ import annotations

import re

import pytest

from tests.conftest import FOLDER_MARKERS, ONE_JOB_EACH, ROOT, scheduling_scope


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/ray/test_parked_server.py::test_a", "cluster"),
        ("tests/engine/test_shutdown.py::test_b[1]", "cluster"),
        ("tests/engine/test_benchmarks.py::test_b", "test_b"),
        ("tests/e2e/test_training.py::test_c", "test_c"),
        ("tests/e2e/test_killed_engine.py::test_d", "tests/e2e/test_killed_engine.py"),
        ("tests/unit/core/test_gate.py::test_e[a::b]", "tests/unit/core/test_gate.py"),
    ],
)
def test_scope(nodeid: str, scope: str) -> None:
    assert scheduling_scope(nodeid) == scope


def test_the_files_whose_tests_are_spread_are_there_and_start_no_cluster() -> None:
    for path in ONE_JOB_EACH:
        assert "ray_cluster" not in (ROOT / path).read_text()


def test_the_command_for_unit_tests_leaves_out_every_folder_that_starts_processes() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^test-unit:.*\n\t.*-m \"(.*)\"", makefile, re.MULTILINE)
    assert recipe is not None
    assert {f"not {folder}" for folder in FOLDER_MARKERS} <= set(recipe.group(1).split(" and "))
