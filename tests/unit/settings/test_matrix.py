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
from tests.e2e.cases import CASES
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


def test_what_stands_in_the_stored_matrix_is_what_make_matrix_runs():
    assert list(json.loads((ROOT / "benchmarks/results/matrix.json").read_text())["rows"]) == list(CASES)


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("Qwen/Qwen3-30B-A3B", True),
        ("deepseek-ai/DeepSeek-V3", True),
        ("deepseek-ai/DeepSeek-R1", True),
        ("deepseek-ai/deepseek-coder-v2-lite", True),
        ("mistralai/Mixtral-8x7B-v0.1", True),
        ("openai/gpt-oss-20b", True),
        ("allenai/OLMoE-1B", True),
        ("meta-llama/Llama-4-Scout", True),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", False),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", False),
        ("deepseek-ai/deepseek-llm-7b-chat", False),
        ("Qwen/Qwen3-8B", False),
        ("Qwen/Qwen2.5-7B-Instruct", False),
        ("meta-llama/Llama-3.1-8B", False),
    ],
)
def test_a_model_with_several_experts_is_known_by_its_name(composed: Composed, name: str, has: bool):
    found = [row.what for row in rows_of(composed({"actor_rollout_ref.model.path": name}))]
    assert ("models with several experts a layer" in found) == has


@pytest.mark.parametrize(
    ("keys", "has"),
    [({"num_experts": 128}, True), ({"n_routed_experts": 64}, True), ({"num_local_experts": 1}, False), ({}, False)],
)
def test_a_model_with_several_experts_is_known_by_its_configuration(
    composed: Composed, tmp_path: Path, keys: dict[str, int], has: bool
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", **keys}))
    found = [row.what for row in rows_of(composed({"actor_rollout_ref.model.path": str(tmp_path)}))]
    assert ("models with several experts a layer" in found) == has


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
    found = rows_of(composed({"actor_rollout_ref.model.path": name, "trainer.device": "cuda"}))
    assert any(row.what.startswith("images, video, audio as input") for row in found) == takes
    on_cpu = [row.state for row in rows_of(composed({"actor_rollout_ref.model.path": name})) if "VL" in row.what]
    assert on_cpu == [SEEN_ON_CPU] * ("Qwen2.5-VL" in name)
