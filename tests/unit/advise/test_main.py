"""The command that predicts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from partial_rollout.advise import predict
from partial_rollout.advise.__main__ import advice, main
from partial_rollout.advise.scheduler import Mode
from partial_rollout.advise.sources import Lengths
from partial_rollout.advise.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path


def test_a_result_is_predicted_for_another_batch(monkeypatch, repository, tmp_path):
    monkeypatch.setattr(predict, "modes", lambda slots, _: [Mode("sync", slots, 1)])
    result = repository / "benchmarks/results/gpu/engine_8b_h200.json"
    tokens = {}
    for batch in (4, 8):
        main([str(result), "--traces", "uniform", "--batch", str(batch), "--json", str(tmp_path / "out.json")])
        tokens[batch] = json.loads((tmp_path / "out.json").read_text())["traces"]["uniform"]["sync"]["tokens"]
    assert tokens == {4: 4 * 8 * 1024, 8: 8 * 8 * 1024}


def test_a_batch_without_prompts_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["result.json", "--batch", "0"])
    assert "--batch 0 is not allowed: at least 1" in capsys.readouterr().err


def test_engines_that_share_a_batch_are_faster_together(monkeypatch, repository, tmp_path, capsys):
    monkeypatch.setattr(predict, "modes", lambda slots, _: [Mode("sync", slots, 1), Mode("ours", slots, 1)])
    dump = tmp_path / "1.jsonl"
    dump.write_text("".join(json.dumps({"uid": f"{n}_0_0", "weight_versions": [[0, 900]]}) + "\n" for n in range(4)))
    found = {}
    for replicas in (1, 8):
        words = [str(tmp_path), "--batch", "64", "--group", "8", "--replicas", str(replicas)]
        main([*words, "--json", str(tmp_path / f"{replicas}.json")])
        found[replicas] = json.loads((tmp_path / f"{replicas}.json").read_text())["modes"]["sync"]
    assert "8 engines of 8b" in capsys.readouterr().out
    assert found[8]["seconds"] < found[1]["seconds"]
    assert found[8]["kv_share"] < found[1]["kv_share"] / 4
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--replicas", "0"])
    assert "--replicas 0 is not allowed: at least 1" in capsys.readouterr().err


def test_a_result_without_a_curve_is_an_error(capsys, repository):
    path = repository / "benchmarks/results/gpu/engine_8b_modes_h200.json"
    with pytest.raises(SystemExit):
        main([str(path)])
    assert f"{path} has no latency curve" in capsys.readouterr().err


def test_each_split_of_the_gpus_is_predicted_where_it_was_asked_for(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(predict, "modes", lambda slots, _: [Mode("sync", slots, 1), Mode("ours", slots, 1)])
    (tmp_path / "1.jsonl").write_text(
        "".join(f'{{"uid": "{n}_0_0", "weight_versions": [[0, 90]]}}\n' for n in range(4))
    )
    words = [str(tmp_path), "--batch", "4", "--group", "2"]
    main([*words, "--gpus", "3", "--train-s", "2.5", "--json", str(tmp_path / "out.json")])
    splits = json.loads((tmp_path / "out.json").read_text())["splits"]
    assert [(row["rollout_gpus"], row["train_s"]) for row in splits] == [(0, 2.5), (1, 3.75), (2, 7.5)]
    said = capsys.readouterr().out
    assert "whole steps on 3 GPUs" in said
    assert "all 2.5 s of training take twice as long on half of the GPUs (--train-s)" in said
    for wrong, why in (
        (["--gpus", "1"], "--gpus 1 is not allowed: at least 2"),
        (["--train-s", "2.5"], "--train-s 2.5 is not allowed: above 0 seconds, with --gpus N"),
        (["--gpus", "3", "--train-s", "0"], "--train-s 0.0 is not allowed: above 0 seconds, with --gpus N"),
        (["--gpus", "3"], f"--gpus 3 needs the seconds of training: give --train-s SECONDS; {tmp_path} has neither"),
    ):
        with pytest.raises(SystemExit):
            main([*words, *wrong])
        assert why in capsys.readouterr().err


def steps_of_a_run(folder: Path, **more: float) -> Path:
    """Metrics of a run whose steps wait 4 s, compute 7 s on the GPUs, and take 12 s; the first ones take longer."""
    metrics = {"timing_s/gen": 4.0, "timing_s/old_log_prob": 2.0, "timing_s/update_actor": 5.0, "timing_s/step": 12.0}
    lengths = {"response_length/mean": 60.0, "response_length/max": 90.0}
    slow = {"timing_s/update_actor": 50.0, "timing_s/step": 57.0}
    rows = [metrics | lengths | more | (slow if step < 3 else {}) for step in range(1, 6)]
    text = "".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in enumerate(rows, 1))
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_of_a_run_that_tells_its_seconds_only_what_the_gpus_share_takes_longer_on_fewer(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(predict, "modes", lambda slots, _: [Mode("sync", slots, 1), Mode("ours", slots, 1)])
    words = [str(steps_of_a_run(tmp_path)), "--batch", "4", "--group", "2", "--gpus", "2"]
    main([*words, "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["training"] == {"scaling_s": 7.0, "fixed_s": 1.0}
    assert [row["train_s"] for row in found["splits"]] == [8.0, 15.0]
    assert "7.0 s of training take twice as long on half of the GPUs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"partial_rollout/rollout_gpus": 1.0}, "engines had GPUs of their own; what is needed is a run with shared"),
        ({"timing_s/old_log_prob": 0.0, "timing_s/update_actor": 0.0}, "tells no seconds of log-probs and update"),
    ],
)
def test_a_run_that_does_not_tell_how_long_all_gpus_train_is_refused_with_what_to_give(more, why, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(steps_of_a_run(tmp_path, **more)), "--batch", "4", "--group", "2", "--gpus", "2"])
    told = capsys.readouterr().err
    assert "--gpus 2 needs the seconds of training: give --train-s SECONDS" in told
    assert why in told


def test_a_curve_alone_says_nothing_of_splits(capsys, repository):
    path = repository / "benchmarks/results/gpu/engine_8b_h200.json"
    with pytest.raises(SystemExit):
        main([str(path), "--gpus", "3", "--train-s", "2.5"])
    told = capsys.readouterr().err
    assert f"--gpus needs response lengths: give them first, and the curve with --curve {path}" in told


@pytest.mark.parametrize("jobs", [[], ["--jobs", "jobs_8b_h200.json"]])
@pytest.mark.parametrize(
    "given",
    [["--group", "4"], ["--column", "n"], ["--tokenizer", "M"], ["--curve", "c"], ["--gpus", "2", "--train-s", "1"]],
)
def test_what_belongs_to_lengths_is_refused_with_a_curve_by_its_name(given, jobs, repository, capsys):
    path = repository / "benchmarks/results/gpu/engine_8b_h200.json"
    with pytest.raises(SystemExit):
        main([str(path), *jobs, *given])
    assert f"{given[0]} needs response lengths: give them first, and the curve with --curve {path}" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["lengths", "--traces", "uniform"], "--traces needs a curve as the first word"),
        (["lengths", "--jobs", "a.json"], "--jobs needs a curve as the first word"),
        (["lengths", "--from-step", "4"], "--from-step needs a curve as the first word"),
        (["curve.json", "--from-step", "4"], "--from-step needs --jobs"),
        (["curve.json", "--jobs", "a.json", "--batch", "4"], "--batch needs no --jobs"),
        (["curve.json", "--jobs", "a.json", "--traces", "uniform"], "--traces needs no --jobs"),
    ],
)
def test_what_would_have_no_effect_is_refused(words, told, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert told in capsys.readouterr().err


def test_replicas_of_a_curve_alone_are_faster_together(monkeypatch, repository, tmp_path, capsys):
    monkeypatch.setattr(predict, "modes", lambda slots, _: [Mode("sync", slots, 1)])
    path, found = repository / "benchmarks/results/gpu/engine_8b_h200.json", {}
    for replicas in (1, 8):
        words = [str(path), "--traces", "uniform", "--batch", "64", "--replicas", str(replicas)]
        main([*words, "--json", str(tmp_path / "out.json")])
        found[replicas] = json.loads((tmp_path / "out.json").read_text())["traces"]["uniform"]["sync"]
    assert "uniform, 8 engines of 8b" in capsys.readouterr().out
    assert found[8]["seconds"] < found[1]["seconds"] / 1.5
    assert found[8]["kv_share"] < found[1]["kv_share"] / 4


def row(ratio: float, mean: float, most: float) -> dict[str, float]:
    return {"time_ratio": ratio, "staleness_mean": mean, "staleness_max": most, "kv_share": 0.5}


OLD = (
    "with abort, prefetch 2 tokens are 1.7 updates old in the mean: a job learned as sync did at 1.6; at 3.2 one of "
    "two seeds did (docs/modes.md)"
)
NONE_YOUNG = "no mode has tokens at most 2 updates old only; the youngest ones: abort, prefetch 2, mean 1.1, oldest 3"


@pytest.mark.parametrize(("mean", "most", "told"), [(1.6, 2, []), (1.7, 2, [OLD]), (1.1, 3, [NONE_YOUNG])])
def test_old_tokens_are_told(mean: float, most: float, told: list[str]):
    rows = {"sync": row(1.0, 0.0, 0), "abort, prefetch 2": row(0.8, mean, most), "abort, prefetch 3": row(0.9, 1.2, 9)}
    lengths = Lengths(((100, 200),) * 400, "tokens")
    said = advice(rows, lengths, {"shape": "8b", "prompt_tokens": 9}, Workload(batch=10, group=2))
    assert [line for line in said if "updates old" in line] == told
