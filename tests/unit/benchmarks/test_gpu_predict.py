"""The prediction from a latency curve: its arithmetic, and that it agrees with what was measured."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.bench_rollout import Workload, lengths
from benchmarks.gpu.inputs import workload
from benchmarks.gpu.predict import Group, Mode, Rollout, Speed, modes, predict, table

SPEED = Speed(base=0.004, request=3e-5, token=2e-8, prefill_tokens_per_s=40_000.0, interruption_s=0.3)
LOAD = Workload(batch=8, group=4, median=200, sigma=0.9, longest=1500, long_share=0.1)
PROMPT = 16
NEAR = 0.1
"""Of what was measured; other prompts differ by 3 %."""


def test_the_fit_finds_what_a_curve_was_made_of():
    sizes = [(16, 300), (256, 300), (64, 1600), (512, 1600), (128, 3600)]
    cells = [
        {"concurrency": n, "context": c, "decode_ms_by_wall": 1000 * SPEED.decode_s(1, n, n * c)} for n, c in sizes
    ]
    cells = [cell | {"prefill_tokens_per_s": 40_000.0} for cell in cells]
    found = Speed.fit({"cell": cells, "interruption": [{"drain_ms": 200.0, "resume_ms": 100.0}]})
    assert np.allclose(list(vars(found).values()), list(vars(SPEED).values()))


def test_decoding_at_once_takes_as_long_as_token_by_token():
    one_by_one = sum(SPEED.decode_s(1, 8, 1000 + 8 * done) for done in range(50))
    assert SPEED.decode_s(50, 8, 1000) == pytest.approx(one_by_one)


def test_sync_takes_what_its_longest_response_takes():
    """All of a batch start together, so the engine decodes as often as the longest has tokens."""
    rows = lengths(LOAD, LOAD.batch)
    rollout = Rollout(
        Mode("sync", LOAD.batch * LOAD.group, 1), SPEED, LOAD, PROMPT, iter(Group(r.tolist()) for r in rows)
    )
    step = rollout.step()
    alive = [int((rows > decoded).sum()) for decoded in range(rows.max())]
    contexts = [int((rows > decoded).sum() * (PROMPT + decoded)) for decoded in range(rows.max())]
    decoding = sum(SPEED.decode_s(1, n, c) for n, c in zip(alive, contexts, strict=True))
    assert step["seconds"] == pytest.approx(decoding + rows.size * PROMPT / SPEED.prefill_tokens_per_s)
    assert (step["tokens"], rollout.context, rollout.running) == (rows.sum(), 0, [])


@pytest.mark.parametrize("mode", modes(LOAD.batch * LOAD.group, LOAD.group), ids=lambda mode: mode.name)
def test_every_prompt_is_trained_once_and_slots_and_prompts_in_flight_are_kept(mode):
    fed: list[Group] = []

    def feed():
        for row in lengths(LOAD, 1000):
            fed.append(Group(row.tolist()))
            yield fed[-1]

    rollout = Rollout(mode, SPEED, LOAD, PROMPT, feed())
    tokens = 0
    for number in range(1, 30):
        tokens += rollout.step()["tokens"]
        in_flight = len(rollout.pending) + rollout.ongoing + len(rollout.done)
        assert len(fed) == in_flight + number * LOAD.batch
        assert len(rollout.running) <= mode.slots
        assert in_flight + LOAD.batch <= mode.prefetch * LOAD.batch
    left = {id(group) for _, _, _, group in rollout.running} | {
        id(group) for group in (*rollout.pending, *rollout.done)
    }
    assert tokens == sum(sum(group.lengths) for group in fed if id(group) not in left)


def test_retained_kv_saves_what_is_computed_again():
    slots = LOAD.batch * LOAD.group
    kept, again = (predict(Mode("", slots, 3, retains_kv=retains), SPEED, LOAD, PROMPT) for retains in (True, False))
    assert kept["reprefilled"] == 0 < again["reprefilled"]
    assert kept["tokens_per_s"] > again["tokens_per_s"]


@pytest.mark.parametrize(
    ("trace", "modes"), [("long_tail", ("sync", "partial_reuse_kv_adaptive")), ("uniform", ("sync",))]
)
def test_it_agrees_with_what_an_engine_took(repository, trace, modes):
    """The adaptive block had 3 batches in flight and 352 to 416 slots."""
    result = json.loads((repository / "benchmarks/results/gpu/engine_8b_h200.json").read_text())
    speed, load, measured = Speed.fit(result["curve"]), workload("8b", trace), result["summary"][trace]
    assert speed.interruption_s < 1
    like = {"sync": Mode("sync", 256, 1), "partial_reuse_kv_adaptive": Mode("wide", 384, 3)}
    for mode in modes:
        found = predict(like[mode], speed, load, 256)
        assert found["tokens_per_s"] == pytest.approx(measured[mode]["useful_tokens_per_s"], rel=NEAR)
        assert found["staleness_mean"] == pytest.approx(measured[mode]["staleness_steps/mean"], abs=0.2)


def test_the_table_has_a_row_for_every_mode():
    row = predict(Mode("sync", 32, 1), SPEED, LOAD, PROMPT) | {"time_ratio": 1.0, "kv_share": 0.25}
    assert table({"sync": row, "other": row}).count("\n") == 3
