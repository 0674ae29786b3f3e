"""The table of what is supported agrees with what the start refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from partial_rollout.core.resume import UNRESUMABLE
from partial_rollout.errors import UserError
from partial_rollout.settings.matrix import REFUSED, ROWS, SEEN_ON_CPU, TESTED, Row, rows_of
from tests.unit.settings.support import check

if TYPE_CHECKING:
    from tests.unit.settings.support import Composed

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("row", [row for row in ROWS if row.applies], ids=lambda row: row.what)
def test_a_row_applies_to_its_example_and_only_refused_rows_are_refused(
    composed: Composed, row: Row, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert row in rows_of(composed(dict(row.example)))
    if row.state == REFUSED:
        with pytest.raises(UserError):
            check(composed(dict(row.example)))
    else:
        check(composed(dict(row.example)))


def test_what_a_row_names_as_its_proof_is_there_and_says_so():
    """A file of tests, or a case that ran in the stored matrix."""
    for row in ROWS:
        for name in re.findall(r"`((?:tests|configs)/[^`*]+)`", row.where):
            assert (ROOT / name).exists(), row.what
        if row.state == TESTED:
            assert re.search(r"`tests/[^`]+/test_\w+\.py`", row.where), row.what
    cases = json.loads((ROOT / "benchmarks/results/matrix.json").read_text())["rows"].values()
    ran = " ".join(case["case"] for case in cases if case["runs"])
    seen = [row.what for row in ROWS if row.state == SEEN_ON_CPU]
    assert seen
    assert [what for what in seen if what.split(" (")[0] not in ran] == []


def test_of_the_quickstart_every_part_is_in_the_tests(composed: Composed):
    rows = rows_of(composed({}))
    assert {row.state for row in rows} == {"in the tests"}
    assert {row.part for row in rows} == {"engine", "trainer", "algorithm", "reward", "agent loop"}


def test_the_sampling_parameters_that_are_refused_are_those_of_the_table():
    (row,) = (row for row in ROWS if (row.part, row.state) == ("sampling", REFUSED))
    assert sorted(re.findall(r"`(\w+)`", row.what)) == sorted(UNRESUMABLE)
    taken = [name for row in ROWS if row.part == "sampling" for name in re.findall(r"`(\w+)`", row.what)]
    assert len(taken) == len(set(taken))


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", True),
        ("openbmb/MiniCPM-o-2_6", True),
        ("zai-org/GLM-4.1V-9B", True),
        ("Qwen/Qwen3-8B", False),
        ("deepseek-ai/DeepSeek-V3", False),
        ("google/gemma-7b", False),
    ],
)
def test_a_model_that_takes_images_is_known_by_its_name(composed: Composed, name: str, takes: bool):
    found = [row.what for row in rows_of(composed({"actor_rollout_ref.model.path": name}))]
    assert ("images, video, audio as input" in found) == takes
