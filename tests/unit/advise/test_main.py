"""The command that predicts."""

from __future__ import annotations

import json

import pytest

from partial_rollout.advise import predict
from partial_rollout.advise.__main__ import main
from partial_rollout.advise.scheduler import Mode


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
