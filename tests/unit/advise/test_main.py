"""The command that predicts."""

from __future__ import annotations

import json

import pytest

from partial_rollout.advise import predict
from partial_rollout.advise.__main__ import advice, main
from partial_rollout.advise.scheduler import Mode
from partial_rollout.advise.sources import Lengths
from partial_rollout.advise.workload import Workload


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
    assert "whole steps on 3 GPUs" in capsys.readouterr().out
    for wrong in (["--gpus", "3"], ["--train-s", "2.5"], ["--gpus", "1", "--train-s", "2.5"]):
        with pytest.raises(SystemExit):
            main([*words, *wrong])
        assert "--gpus N and --train-s SECONDS belong together" in capsys.readouterr().err


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
