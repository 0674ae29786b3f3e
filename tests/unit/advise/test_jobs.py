"""Predictions of whole jobs, and that they agree with what jobs took step by step."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from benchmarks.jobs import MODES
from partial_rollout.advise.__main__ import main
from partial_rollout.advise.jobs import job_modes, predict_jobs, rates, response_tokens
from partial_rollout.advise.predict import COLOCATED, Speed, fit
from partial_rollout.advise.result import read_result, store
from partial_rollout.advise.scheduler import Group, Rollout
from partial_rollout.advise.shapes import PROMPT_TOKENS
from partial_rollout.advise.workload import LARGE, Workload, primed_lengths

RESULTS, OURS = "benchmarks/results/gpu", "partial_rollout"
FAST_POLL, RELEASED = f"{COLOCATED}_fast_poll", f"{COLOCATED}_released"
ADAPTIVE_5 = "partial_adaptive_reuse_kv_prefetch_5"


def curve_and_jobs(repository, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The latency curve of an engine with their model, and stored jobs."""
    engine = f"engine_{name.split('_')[1]}"
    curve, result = (read_result(repository / RESULTS / f"{each}_h200.json") for each in (engine, name))
    return curve, result


def speed_of(curve: dict[str, Any], result: dict[str, Any]) -> Speed:
    """Speed of the jobs' engines together, one on each GPU."""
    return fit(curve["curve"]).of_replicas(result["options"].get("gpus_each", 1))


def predicted_jobs(repository, name: str) -> dict[str, dict[str, Any]]:
    """Stored jobs by mode, predicted from the curve of their model's engine."""
    curve, result = curve_and_jobs(repository, name)
    found = predict_jobs(result, fit(curve["curve"]))
    assert [job["mode"] for job in found] == [job["mode"] for job in result["jobs"]]
    return {job["mode"]: job for job in found}


def test_it_agrees_with_whole_jobs_that_train(repository):
    """Generation to that of sync, without the step in which slots fill."""
    jobs = {mode: np.array(job["seconds"][1:]) for mode, job in predicted_jobs(repository, "jobs_4b").items()}
    predicted, measured = np.array([sum(jobs[mode]) / sum(jobs["sync"]) for mode in jobs]).T
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("name", "mode", "ratio", "seconds", "tokens"),
    [
        ("jobs_0.6b", "partial_rollout", 0.98, 3.2, 0.12),
        ("jobs_4b", "sync", 1.03, 2.1, 0.0),
        ("jobs_4b", "partial_reuse_kv_prefetch_3", 0.995, 0.9, 0.04),
        ("jobs_8b", "sync", 1.0, 2.0, 0.0),
        ("jobs_8b", COLOCATED, 1.015, 6.7, 0.17),
        ("jobs_8b", "partial_reuse_kv_prefetch_3", 0.98, 2.2, 0.06),
        ("jobs_8b_second_round", "partial_rollout", 0.97, 1.7, 0.04),
        ("jobs_8b_second_round", FAST_POLL, 0.99, 3.9, 0.31),
        ("jobs_8b_second_round", "partial_adaptive_reuse_kv", 1.04, 5.7, 0.06),
        ("jobs_8b_long", "partial_rollout", 0.99, 2.6, 0.04),
        ("jobs_8b_long", ADAPTIVE_5, 1.09, 18.2, 0.27),
        ("jobs_8b_offload", "sync", 1.015, 2.1, 0.0),
        ("jobs_8b_offload", "partial_offload_kv", 1.07, 8.7, 0.03),
    ],
)
def test_it_agrees_with_every_step_of_whole_jobs(repository, name, mode, ratio, seconds, tokens):
    """In sum, `ratio` is measured to predicted; which groups a batch has hangs on which were done first."""
    job = predicted_jobs(repository, name)[mode]
    predicted, measured = np.array(job["seconds"]).T
    assert measured == pytest.approx(predicted, abs=seconds)
    assert sum(measured) / sum(predicted) == pytest.approx(ratio, abs=0.01)
    predicted, measured = np.array(job["tokens"]).T
    assert predicted == pytest.approx(measured, rel=tokens)
    assert sum(predicted) == pytest.approx(sum(measured), rel=0.005)


@pytest.mark.parametrize(
    ("name", "mode"), [("jobs_4b", COLOCATED), ("jobs_8b", COLOCATED), ("jobs_8b_second_round", FAST_POLL)]
)
def test_every_other_step_of_verl_s_mode_waits_for_few(repository, name, mode):
    """All requests of two batches are in the engine at once."""
    for seconds in np.array(predicted_jobs(repository, name)[mode]["seconds"]).T:
        assert min(seconds[::2]) > 3 * max(seconds[1::2])


TWO_REPLICAS = {
    "sync": (34, 40, 42, 38, 40, 40, 40),
    COLOCATED: (49, 11, 52, 11, 54, 13, 46),
    "partial_reuse_kv_prefetch_3": (62, 15, 23, 36, 22, 25, 26),
    "partial_rollout": (48, 18, 43, 22),
}
"""Seconds of generation from the second step on, on two H200s (docs/results/gpu.md). Nothing was fitted to them."""


@pytest.mark.parametrize("mode", TWO_REPLICAS)
def test_it_agrees_with_jobs_on_two_engines_that_played_no_part_in_its_making(repository, mode):
    curve = read_result(repository / RESULTS / "engine_4b_h200.json")
    load = replace(LARGE, batch=64, seed=7)
    drawn = primed_lengths(load, 20 * load.batch)
    speed = fit(curve["curve"]).of_replicas(2)
    rollout = Rollout(job_modes(512, 8)[mode], speed, load, PROMPT_TOKENS, (Group(row.tolist()) for row in drawn))
    measured = TWO_REPLICAS[mode]
    predicted = [rollout.step()["seconds"] for _ in range(len(measured) + 1)][1:]
    assert sum(predicted) == pytest.approx(sum(measured), rel=0.07)
    assert predicted == pytest.approx(measured, abs=7.5)


@pytest.mark.parametrize(
    ("name", "mode", "ratio", "step_s", "tokens_off"),
    [  # copying KV to the host is not predicted
        ("jobs_8b_four", "flag", 1.01, 4.7, 0.16),
        ("jobs_8b_four", "flag_released", 1.125, 11.1, 0.06),
        ("jobs_8b_flag_released", "flag_released", 1.09, 6.6, 0.03),
        ("jobs_8b_released", "flag_released", 1.05, 4.0, 0.16),
        ("jobs_4b_training", "flag", 0.977, 2.5, 0.13),
        ("jobs_4b_activations", "flag", 0.985, 0.8, 0.02),
        ("jobs_4b_activations", "flag_activations_kept", 0.978, 3, 0.14),
        ("jobs_4b_released", "flag_released", 1.0385, 2.5, 0.03),
        ("jobs_4b_one_replica", "flag", 0.958, 0.9, 0.07),
        ("jobs_4b_two_replicas", "flag", 1.015, 4, 0.24),
    ],
)
def test_it_agrees_with_the_flag_alone_which_played_no_part_in_its_making(
    repository, name, mode, ratio, step_s, tokens_off
):
    """Batches in flight and slots of each step are those that the run chose."""
    curve, result = curve_and_jobs(repository, name)
    load, (job,) = Workload(**result["workload"]), [job for job in result["jobs"] if job["mode"] == mode]
    prompts = (Group(row.tolist()) for row in cycle(primed_lengths(load, load.num_prompts)))
    usual = job_modes(load.batch * load.group, load.group)["partial_reuse_kv"]
    rollout, found = Rollout(usual, speed_of(curve, result), load, PROMPT_TOKENS, prompts), []
    for step in job["first_steps"] + job["steps"]:
        chosen = {"prefetch": step[f"{OURS}/depth"], "slots": int(step[f"{OURS}/slots/num"])}
        rollout.mode = replace(usual, **chosen)
        tokens = response_tokens(step, load, PROMPT_TOKENS)
        predicted = rollout.step()
        found.append((predicted["seconds"], step["timing_s/gen"], predicted["tokens"], tokens))
    predicted, measured, predicted_tokens, tokens = np.array(found)[1:].T
    assert sum(measured) / sum(predicted) == pytest.approx(ratio, abs=0.005)
    assert measured == pytest.approx(predicted, abs=step_s)
    assert predicted_tokens == pytest.approx(tokens, rel=tokens_off)
    assert sum(predicted_tokens) == pytest.approx(sum(tokens), rel=0.01)


@pytest.mark.parametrize(
    ("name", "mode", "ratio", "step_s"),
    [
        ("jobs_8b_released", RELEASED, 0.97, 10),  # it looks every 2 s
        ("jobs_8b_four", "sync", 0.995, 2),
        ("jobs_4b_training", COLOCATED, 0.99, 11),  # its short steps are predicted too short, its long ones too long
        ("jobs_4b_released", RELEASED, 0.97, 4),
        ("jobs_4b_one_replica", "sync", 1.025, 2.1),
        ("jobs_4b_one_replica", COLOCATED, 1.047, 2.7),
        ("jobs_4b_two_replicas", "sync", 1.146, 2.1),  # most of its steps end just after a look, beside another's start
        ("jobs_4b_two_replicas", COLOCATED, 1.01, 8.2),
        ("jobs_8b_four", COLOCATED, 1.04, 35),  # its long and short steps became even, those predicted do not
    ],
)
def test_it_agrees_with_verl_s_modes_on_a_later_machine(repository, name, mode, ratio, step_s):
    curve, result = curve_and_jobs(repository, name)
    (job,) = (job for job in predict_jobs(result, speed_of(curve, result)) if job["mode"] == mode)
    predicted, measured = np.array(job["seconds"]).T
    assert sum(measured) / sum(predicted) == pytest.approx(ratio, abs=0.01)
    assert measured == pytest.approx(predicted, abs=step_s)


def test_the_names_are_those_of_jobs():
    assert set(job_modes(256, 8)) < set(MODES)


def test_rates_are_of_pairs_of_steps():
    """The primer's step is not among them."""
    tokens = [[9, 9], [10, 20], [30, 20], [50, 60], [70, 80]]
    job = {"tokens": tokens, "seconds": [[9, 9], [1, 1], [3, 1], [1, 1], [9, 2]]}
    assert rates(job, 3) == (160 / 14, 180 / 5)
    assert rates(job, 4) == (80 / 4, 80 / 2)


def run(repository, *words: str) -> None:
    main([str(repository / RESULTS / "engine_8b_h200.json"), "--jobs", *words])


def test_jobs_are_printed_and_stored_beside_what_is_predicted(repository, tmp_path, capsys):
    files = [str(repository / RESULTS / f"jobs_8b{round}_h200.json") for round in ("", "_second_round")]
    run(repository, *files, "--json", str(tmp_path / "out.json"), "--from-step", "5")
    stored, shown = json.loads((tmp_path / "out.json").read_text())["jobs"], capsys.readouterr().out
    assert [f"| {job['mode']} |" in shown for job in stored] == [True] * 6
    predicted, measured = stored[0]["seconds"][0]
    assert f"{predicted:.1f} / {measured:.1f}, " in shown
    assert "1.00 / 1.00" in shown
    for number in ("1", "10"):
        with pytest.raises(SystemExit):
            run(repository, *files, "--from-step", number)
        assert f"--from-step {number} is not allowed: 2 to 9" in capsys.readouterr().err


def test_jobs_are_predicted_for_as_many_engines_as_are_given(repository, tmp_path, capsys):
    path = repository / RESULTS / "jobs_8b_h200.json"
    run(repository, str(path), "--json", str(tmp_path / "out.json"), "--replicas", "2")
    curve = read_result(repository / RESULTS / "engine_8b_h200.json")["curve"]
    stored = json.loads((tmp_path / "out.json").read_text())["jobs"]
    for speed, is_it in ((fit(curve), False), (fit(curve).of_replicas(2), True)):
        seconds = [job["seconds"] for job in predict_jobs(read_result(path), speed)]
        assert ([job["seconds"] for job in stored] == seconds) == is_it
    assert "predicted for 2 engines" in capsys.readouterr().out


def test_jobs_that_have_no_step_or_no_prediction_are_left_out_and_told(repository, tmp_path, capsys):
    result = read_result(repository / RESULTS / "jobs_8b_h200.json")
    result["jobs"] += [{"mode": "sync", "first_steps": [], "steps": []}, {**result["jobs"][0], "mode": "reorder"}]
    path = tmp_path / "jobs.json"
    store(result, path)
    run(repository, str(path))
    told = capsys.readouterr()
    assert told.err.splitlines() == ["left out: sync, a job of 0 steps", "left out: reorder, a job of 15 steps"]
    assert told.out.count("| sync |") == 1
    store({**result, "jobs": []}, path)
    with pytest.raises(SystemExit):
        run(repository, str(path))
    assert "no job has two steps" in capsys.readouterr().err


def test_jobs_of_different_workloads_are_not_compared(repository, capsys):
    files = [str(repository / RESULTS / f"jobs_{name}_h200.json") for name in ("4b", "8b")]
    with pytest.raises(SystemExit):
        run(repository, *files)
    assert "different workloads" in capsys.readouterr().err


def test_prompts_are_as_long_as_the_jobs_were(repository):
    result = read_result(repository / RESULTS / "jobs_8b_h200.json")
    speed = fit(read_result(repository / RESULTS / "engine_8b_h200.json")["curve"])
    (usual, *_), size = predict_jobs(result, speed), result["workload"]
    result["engine"]["prompt_tokens"] = 6
    (shorter, *_) = predict_jobs(result, speed)
    more = np.array(shorter["tokens"])[:, 1] - np.array(usual["tokens"])[:, 1]
    assert set(more) == {250 * size["batch"] * size["group"]}
