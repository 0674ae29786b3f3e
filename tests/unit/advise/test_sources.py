"""Lengths of a user's own job, wherever they are; the prediction is made for them and for nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from partial_rollout.advise import predict
from partial_rollout.advise.__main__ import STORED_CURVE, main
from partial_rollout.advise.scheduler import Mode
from partial_rollout.advise.sources import read_lengths
from partial_rollout.advise.workload import Workload, lengths
from partial_rollout.errors import DataError
from partial_rollout.observability.events import BatchTaken, EventWriter, TrajectoryEnded

if TYPE_CHECKING:
    from pathlib import Path


def ended(uid: str, session: int, tokens: int) -> TrajectoryEnded:
    return TrajectoryEnded(uid=uid, session=session, seconds=1, engine_seconds=1, tokens=tokens, interruptions=0)


def test_events_give_the_responses_of_trained_prompts(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events", "worker")
    for event in (ended("a", 0, 10), ended("a", 1, 20), ended("in flight", 0, 1)):
        writer.write(event)
    writer.write(BatchTaken(step=1, uids=["a"], source_index=["0"], deferrals=[0], interruptions=[0]))
    writer.close()
    assert read_lengths(tmp_path).groups == ((10, 20),)


def test_a_dump_gives_its_numbers_of_tokens_or_asks_for_a_tokenizer(tmp_path: Path) -> None:
    ours = [{"uid": f"u_{n}_0", "output": "x", "weight_versions": [[1, 5], [2, n]]} for n in range(2)]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ours))
    assert read_lengths(tmp_path).groups == ((5, 6),)
    assert read_lengths(tmp_path / "1.jsonl").groups == ((5, 6),)
    with (tmp_path / "1.jsonl").open("ab") as file:
        file.write(b'{"uid": "w_0_0", "output": "\xf0\x9f')  # it is being written
    assert read_lengths(tmp_path).groups == ((5, 6),)
    (tmp_path / "2.jsonl").write_text(json.dumps({"uid": "v_0_0", "output": "four"}) + "\n")
    with pytest.raises(DataError, match="give the model's folder with --tokenizer"):
        read_lengths(tmp_path)
    assert read_lengths(tmp_path, count=len).groups == ((5, 6), (4,))
    (tmp_path / "2.jsonl").write_text("no JSON\n")
    with pytest.raises(DataError, match="is no dump"):
        read_lengths(tmp_path)


def test_a_parquet_column_gives_numbers_or_lists_of_them(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pd.DataFrame({"one": [3, 4], "many": [[1, 2], [5]], "text": ["a", "b"], "none": [0, 1]}).to_parquet(path)
    assert read_lengths(path, "one").groups == ((3,), (4,))
    assert read_lengths(path, "many").groups == ((1, 2), (5,))
    with pytest.raises(DataError, match="has no column None: give one of one, many, text, none"):
        read_lengths(path)
    for column in ("text", "none"):
        with pytest.raises(DataError, match="must hold numbers of tokens"):
            read_lengths(path, column)


def test_metrics_give_a_distribution_with_their_mean_their_longest_and_their_cut_share(tmp_path: Path) -> None:
    data = {
        "timing_s/step": 1,
        "response_length/mean": 1000,
        "response_length/max": 4096,
        "response_length/clip_ratio": 0.1,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": data}))
    found = read_lengths(tmp_path)
    drawn = np.array(found.groups)
    assert drawn.mean() == pytest.approx(1000, rel=0.05)
    assert drawn.max() == 4096
    assert (drawn == 4096).mean() == pytest.approx(0.1, abs=0.02)
    assert "is assumed" in found.what
    with pytest.raises(DataError, match="says no response lengths"):
        read_lengths(tmp_path / "nowhere")


def test_prompts_are_drawn_from_what_was_seen_and_keep_their_responses_together() -> None:
    load = Workload(batch=4, group=3, longest=90, observed=((1, 2), (80, 90)))
    drawn = lengths(load, 200)
    assert drawn.shape == (200, 3)
    assert set(drawn.flatten()) == {1, 2, 80, 90}
    assert all(row.max() < 3 or row.min() > 79 for row in drawn)
    single = lengths(Workload(batch=4, group=3, longest=90, observed=((1,), (90,))), 200)
    assert any(set(row) == {1, 90} for row in single)
    assert load.limit == 90


def test_the_command_predicts_for_the_lengths_and_says_what_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = Mode(predict.BOUND, 8, 12, interrupts=False)
    monkeypatch.setattr(predict, "modes", lambda slots, _: [Mode("sync", slots, 1), Mode("ours", slots, 3), bound])
    path = tmp_path / "data.parquet"
    pd.DataFrame({"n": [[40, 40], [40, 900]]}).to_parquet(path)
    main([str(path), "--column", "n", "--batch", "4", "--json", str(tmp_path / "out.json")])
    out = capsys.readouterr().out
    assert "4 responses: mean 255, longest 900 tokens" in out
    assert "batches of 4 prompts x 2 responses" in out
    assert "fastest: ours, 0." in out
    assert "of 4 responses only: the tail is a guess" in out
    rows = json.loads((tmp_path / "out.json").read_text())["modes"]
    assert f"fastest: ours, {rows['ours']['time_ratio']:.2f} of" in out
    assert rows[predict.BOUND]["time_ratio"] < rows["ours"]["time_ratio"]  # and yet it is no advice
    assert "    actor_rollout_ref.rollout.free_cache_engine=False partial_rollout.tail.interrupt_mode=reuse_kv " in out
    assert "with 8 slots no mode can be faster than 0." in out
    assert "a hint only" not in out
    assert "the engine is not yours" in out
    main([str(path), "--column", "n", "--batch", "4", "--curve", str(STORED_CURVE)])
    assert "the engine is not yours" not in capsys.readouterr().out
    small = json.loads(STORED_CURVE.read_text())
    small["curve"]["cell"] = small["curve"]["cell"][:1]
    (tmp_path / "small.json").write_text(json.dumps(small))
    main([str(path), "--column", "n", "--batch", "4", "--curve", str(tmp_path / "small.json")])
    assert "the curve has 1 of the 9 cells" in capsys.readouterr().out
    for words in (
        [str(tmp_path / "nowhere")],
        [str(path), "--curve", str(tmp_path / "none.json")],
        [str(path), "--group", "1"],
    ):
        with pytest.raises(SystemExit):
            main(words)
    err = capsys.readouterr().err
    assert "says no response lengths" in err
    assert "measure makes one" in err
    assert "--group 1 is not allowed" in err


def test_every_mode_that_is_compared_has_its_settings_and_verls_and_the_bound_have_none() -> None:
    load = Workload(batch=4, group=2, longest=90)
    settings = {mode.name: predict.settings_of(mode.name, load) for mode in predict.modes(8, 2)}
    without = {name for name, words in settings.items() if not words}
    assert without == {predict.BASE, predict.POLLING, predict.COLOCATED, predict.BOUND}
    assert settings["abort, prefetch 2"] == (
        "partial_rollout.tail.interrupt_mode=abort partial_rollout.prefetch_factor=2"
    )
    assert settings["KV retained, prefetch 6, 1.5 x the slots"] == (
        "actor_rollout_ref.rollout.free_cache_engine=False partial_rollout.tail.interrupt_mode=reuse_kv "
        "partial_rollout.prefetch_factor=6 partial_rollout.slots.adaptive=true"
    )
