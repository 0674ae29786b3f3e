"""What drafts cost and gain, without an engine."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY, Counter

from partial_rollout.advise.drafts import (
    DRAFT_TOKENS,
    ENGINES,
    NOTE,
    VARIANTS,
    Engine,
    FixedDrafts,
    Note,
    Prices,
    Running,
    accepted_drafts,
    drafted,
    gains,
    main,
    parser,
    prices_table,
    surcharge,
    tokens_a_step,
)
from partial_rollout.advise.result import read_result, store
from partial_rollout.advise.scheduler import Speed
from partial_rollout.advise.workload import Workload

LONGEST = 100
SPEED = Speed(0.004, 0.00002, 1e-8, prefill_tokens_per_s=40_000.0, interruption_s=0.1)
CURVE = {
    "curve": {
        "cell": [
            {"concurrency": number, "context": 300, "decode_ms": 1000 * SPEED.decode_s(1, number, 300 * number),
             "prefill_tokens_per_s": 40_000.0}
            for number in (1, 16, 64, 256)
        ],
        "interruption": [],
    },
    "engine": {"prompt_tokens": 32},
}  # fmt: skip
LOAD = Workload(batch=4, group=4, median=50, longest=400)


@pytest.fixture
def note(tmp_path, monkeypatch) -> Note:
    monkeypatch.setenv(NOTE, str(tmp_path / "note"))
    return Note.new(tmp_path / "note")


def proposer() -> FixedDrafts:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(max_model_len=LONGEST))
    return FixedDrafts(config)


def prices(extra_ms: float) -> dict:
    """An engine whose steps with three drafts take so much longer."""
    rows = [
        {"engine": engine, "requests": number, "context": 320.0, "drafts": [drafts, drafts], "tokens_a_step": 1.0,
         "step_ms": 5.0 + (extra_ms if drafts else 0.0)}
        for number in (1, 16, 64, 256) for engine, drafts in (
            ("plain", 0), ("draft_5", 0), ("draft_3", 0), ("draft_3", 3)
        )
    ]  # fmt: skip
    return {"rows": rows}


def test_the_proposer_drafts_what_the_note_says_while_it_runs(note):
    drafts = proposer()
    lengths, nothing = np.array([10, 10, 10]), np.zeros((3, LONGEST))
    assert drafts.propose([[1], [2], [3]], lengths, nothing) == [[], [], []]
    note.plan(0, 2)
    assert drafts.propose([[1], [2], [3]], lengths, nothing, slot_mappings=None) == [[], list(DRAFT_TOKENS[:2]), []]


def test_a_request_without_a_token_or_near_the_longest_gets_no_draft(note):
    note.plan(3, 3)
    lengths = np.array([10, LONGEST - 1, 10])
    assert proposer().propose([[1], [2], []], lengths, np.zeros((3, LONGEST))) == [list(DRAFT_TOKENS[:3]), [], []]


def test_accepted_drafts_are_counted_for_each_step_of_a_request(note):
    drafts = proposer()
    assert note.tokens_a_step == 1.0
    drafts.propose([[1, 2, 3], [4], []], np.array([10, 10, 10]), np.zeros((3, LONGEST)))
    assert note.tokens_a_step == 2.0
    note.plan(1, 1)
    assert note.tokens_a_step == 1.0


def test_vllm_counts_what_its_own_method_accepts(note):
    """A step brings its own token and the accepted ones: 128 tokens of which 96 were drafts took 32 steps."""
    own, before = ENGINES["ngram_gpu_3"], accepted_drafts()
    counter = Counter("vllm:spec_decode_num_accepted_tokens", "as vLLM names it")
    try:
        counter.inc(96)
        accepted = accepted_drafts() - before
    finally:
        REGISTRY.unregister(counter)
    assert tokens_a_step(own, note, 128, accepted) == 4.0
    assert tokens_a_step(own, note, 128, 0.0) == 1.0
    note.count(steps=2, tokens=5)
    assert tokens_a_step(Engine(3), note, 128, accepted) == 2.5
    assert tokens_a_step(Engine(), note, 128, accepted) == 1.0


def test_the_method_ngram_gpu_is_given_as_vllm_reads_it():
    found = ENGINES["ngram_gpu_3"].arguments(slots=16)
    assert found["speculative_config"]["method"] == "ngram_gpu"
    assert found["speculative_config"]["num_speculative_tokens"] == 3
    assert "model" not in found["speculative_config"]
    assert "async_scheduling" not in found


def test_graphs_are_captured_for_every_step_that_is_run():
    sizes = ENGINES["draft_3"].arguments(slots=64)["cudagraph_capture_sizes"]
    assert sizes == [1, 2, 3, 4, 16, 32, 48, 64, 128, 192, 256]


def test_drafts_that_cost_nothing_and_bring_nothing_change_nothing():
    found = gains(prices(0.0), CURVE, LOAD, VARIANTS["three"])["time_ratio"]
    assert [ratios[0] for gates in found.values() for ratios in gates.values()] == pytest.approx([1.0] * 9)
    of_sync = found["sync"]["256"]
    assert of_sync == sorted(of_sync, reverse=True)
    assert of_sync[-1] < 0.5


def test_a_gate_keeps_the_price_of_drafts_from_full_slots():
    """Full slots pay what an engine that may draft costs anyway, few requests the price of drafts."""
    extra, idle = (surcharge(prices(2.0)["rows"], "draft_3", number, "plain") for number in (3, 0))
    assert extra == [(number, pytest.approx(0.002)) for number in (1, 16, 64, 256)]
    fast = drafted(SPEED, tokens=2.0, gate=64, extra=extra, idle=idle)
    assert fast.decode_s(4, 65, 0) == SPEED.decode_s(4, 65, 0)
    assert fast.decode_s(4, 64, 0) == pytest.approx(2 * (SPEED.decode_s(4, 64, 0) / 4 + 0.002))


def test_a_step_with_drafts_is_not_predicted_to_take_less_than_one_without():
    """Where steps without drafts have no whole graphs; a step of less than no time let a prediction never end."""
    extra = surcharge(prices(-50.0)["rows"], "draft_3", 3, "plain")
    assert extra == [(number, 0.0) for number in (1, 16, 64, 256)]
    assert gains(prices(-50.0), CURVE, LOAD, VARIANTS["three"]) == gains(prices(0.0), CURVE, LOAD, VARIANTS["three"])


def test_the_tokens_that_save_a_tenth_are_between_two_predictions():
    assert 1.0 < gains(prices(0.5), CURVE, LOAD, VARIANTS["three"])["needed_for_a_tenth"]["sync"]["256"] < 1.7
    assert gains(prices(50.0), CURVE, LOAD, VARIANTS["three"])["needed_for_a_tenth"]["sync"]["256"] is None


def test_a_prediction_for_one_trace_leaves_that_for_another(tmp_path, monkeypatch):
    variants = {name: VARIANTS[name] for name in ("three", "five")}
    monkeypatch.setattr("partial_rollout.advise.drafts.VARIANTS", variants)
    path, curve = tmp_path / "prices.json", tmp_path / "curve.json"
    store(prices(0.5), path)
    store({**CURVE, "engine": {**CURVE["engine"], "shape": "tiny"}}, curve)
    for trace in ("long_tail", "heavy_tail"):
        main(["--predict", str(path), "--curve", str(curve), "--trace", trace])
    found = read_result(path)["gains"]
    assert list(found) == ["long_tail", "heavy_tail"]
    assert "five" not in found["long_tail"]  # nothing is priced with five drafts
    assert found["heavy_tail"]["three"]["time_ratio"] != found["long_tail"]["three"]["time_ratio"]


def test_prices_of_two_runs_count_together_and_are_stored_apart(tmp_path, monkeypatch):
    """The first has no engine that drafts three tokens; the second has it, and a price of its own for `plain`."""
    monkeypatch.setattr("partial_rollout.advise.drafts.VARIANTS", {"three": VARIANTS["three"]})
    rows = prices(0.5)["rows"]
    paths, curve = [tmp_path / "first.json", tmp_path / "second.json"], tmp_path / "curve.json"
    store({"rows": [row for row in rows if row["engine"] == "plain"]}, paths[0])
    store({"rows": [row for row in rows if row["engine"] == "draft_3"]}, paths[1])
    store({**CURVE, "engine": {**CURVE["engine"], "shape": "tiny"}}, curve)
    main(["--predict", *map(str, paths), "--curve", str(curve)])
    first = read_result(paths[0])
    assert {row["engine"] for row in first["rows"]} == {"plain"}
    assert first["gains"]["long_tail"]["prices"] == ["first.json", "second.json"]
    store({"rows": rows}, tmp_path / "whole.json")
    main(["--predict", str(tmp_path / "whole.json"), "--curve", str(curve)])
    assert read_result(tmp_path / "whole.json")["gains"]["long_tail"]["three"] == first["gains"]["long_tail"]["three"]


def test_a_table_has_a_line_for_each_engine_and_plan():
    lines = prices_table(prices(1.0)["rows"]).splitlines()
    assert lines[0] == "| engine | drafts | 1 x 320 | 16 x 320 | 64 x 320 | 256 x 320 |"
    assert lines[-1] == "| draft_3 | 3 | 6.00 | 6.00 | 6.00 | 6.00 |"


def test_a_dry_run_names_engines_and_cells(capsys):
    main(["--dry-run", "--engines", "draft_3"])
    assert capsys.readouterr().out.startswith("draft_3: ")


def test_an_engine_that_ends_is_named(tmp_path, monkeypatch):
    """The others are measured all the same."""

    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    options = parser().parse_args(["--shape", "tiny", "--json", str(tmp_path / "prices.json")])
    measured = Prices(options)
    measured._each(Running("plain", SimpleNamespace(terminate=lambda: None), ours))
    assert measured.result["failed"] == {"plain": "the engine plain has ended, waiting for its start"}
