"""The simulation of many replicas around the production manager."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

from benchmarks import many_replicas

if TYPE_CHECKING:
    import pytest


def test_all_prompts_are_trained_and_the_queue_adds_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["many_replicas", "--replicas", "4", "8", "--prompts", "128", "--slots", "16"])
    rows: list[dict[str, float]] = []
    monkeypatch.setattr(many_replicas, "store", lambda result, _path: rows.extend(result["rows"]))
    many_replicas.main()
    assert [(row["replicas"], row["filtered"]) for row in rows] == list(itertools.product((4, 8), (0.0, 0.3)))
    assert all(row["conserved"] and 0 < row["idle_share"] < 1 for row in rows)
    assert [row["prompts_trained"] >= (64, 128)[row["replicas"] == 8] for row in rows] == [True] * 4
    assert [row["prompts_dropped"] > 0 for row in rows] == [False, True, False, True]
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
