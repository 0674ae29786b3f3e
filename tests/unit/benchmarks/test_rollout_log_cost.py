"""What the log of rollouts costs is measured with the log that jobs write, and a new start finds all of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("verl")

from benchmarks import bench_rollout_log

if TYPE_CHECKING:
    from pathlib import Path


def test_steps_with_and_without_the_log_alternate_and_those_with_it_are_replayed(tmp_path: Path) -> None:
    options = argparse.Namespace(steps=2, tokens=8, pause_s=0.0)
    found = bench_rollout_log.measure(options, tmp_path)
    assert found["steps_replayed"] == 2
    assert found["loop_ms"].keys() == found["cpu_ms"].keys() == {"on", "off"}
    assert 0 < found["mb_a_step"] < 1
