"""What runs on GPUs have stored: enough to repeat them, and predictions that are still those of their curves."""

from __future__ import annotations

from pathlib import Path

import pytest

from partial_rollout.advise.predict import fit, modes, predict
from partial_rollout.advise.result import read_result
from partial_rollout.advise.workload import Workload, workload

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks/results/gpu"
RESULTS = sorted(path.name for path in FOLDER.glob("*.json") if not path.name.startswith("predicted"))
BEFORE_VERSIONS = {"reload_h200.json", "weights_h200.json"}
"""Which name a GPU, and torch."""


def stored(name: str) -> dict:
    return read_result(FOLDER / name)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_says_on_what_it_was_measured(name):
    result = stored(name)
    assert result.get("options") or result.get("workload") or result["command"]
    if name in BEFORE_VERSIONS:
        assert "H200" in result.get("gpu", result.get("device", ""))
    else:
        card = name.removesuffix(".json").rpartition("_")[2].upper()
        assert all(card in device for device in result["devices"])
        assert {"python", "torch", "vllm", "verl", "ray", "transformers"} <= set(result["versions"])


@pytest.mark.parametrize("name", [name for name in RESULTS if name.startswith("recipes")])
def test_recipes_ran_to_their_end(name):
    result = stored(name)
    assert [run["recipe"] for run in result["runs"]] == result["options"]["recipes"]
    for run in result["runs"]:
        assert (run["code"], len(run["steps"])) == (0, result["options"]["steps"])
        is_baseline = result["options"].get("baseline", False)
        assert (run["steps"][-1].get("partial_rollout/resumed_trajectories", 0) > 0) is not is_baseline


@pytest.mark.parametrize("name", [name for name in RESULTS if name.startswith("reload")])
def test_a_sent_engine_generated_what_a_fresh_one_does(name):
    cases = stored(name)["cases"]
    assert {case["tied"] for case in cases} == {True, False}
    for case in cases:
        assert case["models_differ"]
        assert case["max_difference_to_fresh"] == case["max_difference_back"] == 0.0


def test_a_curve_that_was_taken_again_predicts_the_same():
    """Rates of a long run; single cells differ by up to a seventh."""
    first, again = stored("engine_8b_h200.json"), stored("engine_8b_again_h200.json")
    load = workload("8b", "long_tail")
    told = ("sync", "colocate_async", "KV retained, prefetch 2", "KV retained, prefetch 3")
    for mode in (mode for mode in modes(load.batch * load.group, load.group) if mode.name in told):
        rates = [predict(mode, fit(curve["curve"]), load, 256)["tokens_per_s"] for curve in (first, again)]
        assert rates[1] == pytest.approx(rates[0], rel=0.03)


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("predicted*.json")))
def test_predictions_are_those_of_their_curve(name):
    """Two modes are computed again, which both terms of the fit and retained KV enter."""
    found = stored(name)
    result, rows = stored(found["from"]), found["traces"]["long_tail"]
    load, engine = Workload(**result["workloads"]["long_tail"]), result["engine"]
    speed = fit(result["curve"])
    assert pytest.approx(found["speed"]) == {name: vars(speed)[name] for name in found["speed"]}
    for mode in modes(load.batch * load.group, load.group):
        if mode.name in ("abort, prefetch 2", "KV retained, prefetch 3"):
            row = predict(mode, speed, load, engine["prompt_tokens"])
            assert rows[mode.name]["tokens_per_s"] == pytest.approx(row["tokens_per_s"])
