"""The prediction from a latency curve: its arithmetic, and that it agrees with what was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from partial_rollout.advise.predict import COLOCATED, POLL_S, Training, fit, modes, predict, splits, splits_table, table
from partial_rollout.advise.result import read_result
from partial_rollout.advise.scheduler import SENT_PER_S, Group, Mode, Rollout, Speed
from partial_rollout.advise.workload import Workload, lengths

SPEED = Speed(base=0.004, request=3e-5, token=2e-8, prefill_tokens_per_s=40_000.0, interruption_s=0.3)
LOAD = Workload(batch=8, group=4, median=200, sigma=0.9, longest=1500, long_share=0.1)
PROMPT = 16
KV_USAGE = 4
"""Column of a stored sample: share of the KV cache."""
AGAIN = {"8b_keep": 0.15}
"""How far a step may be from what is computed again in it, where that is more than 0.05: sums are nearer."""


AT_ONCE = replace(SPEED, sent_per_s=float("inf"))


def started(mode: Mode, rows: np.ndarray, load: Workload = LOAD, speed: Speed = SPEED) -> Rollout:
    return Rollout(mode, speed, load, PROMPT, iter(Group(row.tolist()) for row in rows))


def test_the_fit_finds_what_a_curve_was_made_of():
    sizes = [(16, 300), (256, 300), (64, 1600), (512, 1600), (128, 3600)]
    cells = [{"concurrency": n, "context": c, "decode_ms": 1000 * SPEED.decode_s(1, n, n * c)} for n, c in sizes]
    cells = [cell | {"prefill_tokens_per_s": 40_000.0} for cell in cells]
    found = fit({"cell": cells, "interruption": [{"drain_ms": 200.0, "resume_ms": 100.0}]})
    assert np.allclose(list(vars(found).values()), list(vars(SPEED).values()))


def test_decoding_at_once_takes_as_long_as_token_by_token():
    one_by_one = sum(SPEED.decode_s(1, 8, 1000 + 8 * done) for done in range(50))
    assert SPEED.decode_s(50, 8, 1000) == pytest.approx(one_by_one)


def test_sync_takes_what_its_longest_response_takes():
    """Sent at once, all of a batch start together, so the engine decodes as often as the longest has tokens."""
    rows = lengths(LOAD, LOAD.batch)
    rollout = started(Mode("sync", LOAD.batch * LOAD.group, 1), rows, speed=AT_ONCE)
    step = rollout.step()
    alive = [int((rows > decoded).sum()) for decoded in range(rows.max())]
    groups = [int((rows > decoded).any(axis=1).sum()) for decoded in range(rows.max())]
    kv = [PROMPT * group + decoded * n for decoded, (group, n) in enumerate(zip(groups, alive, strict=True))]
    decoding = sum(SPEED.decode_s(1, n, tokens) for n, tokens in zip(alive, kv, strict=True))
    assert step["seconds"] == pytest.approx(decoding + LOAD.batch * PROMPT / SPEED.prefill_tokens_per_s)
    assert (step["tokens"], rollout.context, rollout.running) == (rows.sum(), 0, [])


def test_requests_come_one_after_the_other():
    """The responses have a single step's tokens, so the last request to arrive is the last to end."""
    rollout = started(Mode("sync", LOAD.batch * LOAD.group, 1), np.ones((LOAD.batch, LOAD.group), int))
    assert rollout.step()["seconds"] >= LOAD.batch * LOAD.group / SENT_PER_S


@pytest.mark.parametrize("retains_kv", [False, True])
def test_an_interruption_takes_its_time_and_computes_a_group_s_prompt_once(retains_kv: bool):
    load = Workload(batch=1, group=2)
    mode = Mode("", 4, 2, retains_kv=retains_kv)
    rollout = started(mode, np.array([[5, 5], [50, 60], [9, 9]]), load)
    rollout.step()
    assert [request.length for *_, request in sorted(rollout.running)] == [50, 60]
    done = [request.length - (end - rollout.decoded) for end, _, request in rollout.running]
    before_s, kv = rollout.now_s, PROMPT + sum(done)
    assert rollout.kv == kv
    assert rollout._interrupt() == (2, 0 if retains_kv else kv)
    again_s = 0.0 if retains_kv else kv / SPEED.prefill_tokens_per_s
    assert rollout.now_s == pytest.approx(before_s + SPEED.interruption_s + again_s)


def test_the_group_that_was_done_first_is_trained_first():
    load = Workload(batch=1, group=1)
    rollout = started(Mode("", 3, 3), np.array([[30], [31], [32], [90], [90], [90], [90]]), load)
    assert [rollout.step()["tokens"] for _ in range(3)] == [30, 31, 32]
    rows = np.array([[30, 10], [30, 20], [30, 25], *[[90, 90]] * 4])  # done by the same decode step
    rollout = started(Mode("", 6, 3), rows, replace(load, group=2), AT_ONCE)
    assert [rollout.step()["tokens"] for _ in range(3)] == [40, 50, 55]


def test_the_bound_is_not_interrupted():
    slots = LOAD.batch * LOAD.group
    bound, stopped = (predict(Mode("", slots, 3, interrupts=on), SPEED, LOAD, PROMPT) for on in (False, True))
    assert bound["interrupted"] == 0 < stopped["interrupted"]
    assert bound["tokens_per_s"] > stopped["tokens_per_s"]


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
        rollout.queue.require_conserved()
        in_flight = rollout.queue.num_in_flight
        assert len(fed) == in_flight + number * LOAD.batch
        assert len(rollout.running) + len(rollout.entering) <= mode.slots
        assert in_flight + LOAD.batch <= mode.prefetch * LOAD.batch
    left = {id(group) for group in rollout.groups.values()}
    assert tokens == sum(sum(group.lengths) for group in fed if id(group) not in left)


def test_retained_kv_saves_what_is_computed_again():
    slots = LOAD.batch * LOAD.group
    kept, again = (predict(Mode("", slots, 3, retains_kv=retains), SPEED, LOAD, PROMPT) for retains in (True, False))
    assert kept["reprefilled"] == 0 < again["reprefilled"]
    assert kept["tokens_per_s"] > again["tokens_per_s"]


@pytest.mark.parametrize(
    ("name", "mode", "trace", "num_drawn", "ratio"),
    [
        ("8b", Mode("sync", 256, 1), "long_tail", 192, 1.01),
        ("8b", Mode("partial_reuse_kv_adaptive", 384, 3), "long_tail", 320, 1.06),
        ("8b", Mode("sync", 256, 1), "uniform", 160, 1.07),
        ("8b_uniform", Mode("sync", 256, 1), "uniform", 352, 1.08),
        ("8b_deep", Mode("sync", 256, 1), "long_tail", 416, 1.0),
        ("8b_deep", Mode("partial_abort", 256, 2, retains_kv=False), "long_tail", 416, 0.98),
        ("8b_keep", Mode("sync", 256, 1), "long_tail", 416, 1.02),
        ("8b_keep", Mode("partial_abort", 256, 2, retains_kv=False), "long_tail", 416, 1.0),
        ("8b_keep", Mode("partial_keep", 256, 2, retains_kv=False), "long_tail", 416, 1.0),
    ],
    ids=["sync", "partial", "uniform", "uniform 2", "sync 2", "abort", "sync 3", "abort 2", "keep"],
)
def test_it_agrees_with_what_an_engine_took_on_the_same_prompts(repository, name, mode, trace, num_drawn, ratio):
    """In sum, `ratio` is measured to predicted.

    Each block had lengths drawn for so many prompts; the adaptive one had 352 to 416 slots. One run has a curve.
    """
    curve, result = (
        read_result(repository / f"benchmarks/results/gpu/engine_{each}_h200.json") for each in ("8b", name)
    )
    (block,) = [each for each in result["blocks"] if (each["mode"], each["trace"]) == (mode.name, trace)]
    size = Workload(**result["workloads"][trace])
    primer = np.full((size.batch, size.group), 2)
    rows = np.concatenate([primer, lengths(size, num_drawn)])
    rollout = Rollout(mode, fit(curve["curve"]), size, 256, iter(Group(row.tolist()) for row in rows))
    steps = [(rollout.step(), step) for step in block["steps"]][1:]
    for found, measured in steps:
        assert found["tokens"] == pytest.approx(measured["useful_tokens"], rel=0.05)
        if not measured["warmup"]:
            near = pytest.approx(measured["reprefilled_in_engine"], rel=AGAIN.get(name, 0.05), abs=6000)
            assert found["reprefilled"] == near
    again = [(a["reprefilled"], b["reprefilled_in_engine"]) for a, b in steps if not b["warmup"]]
    assert np.sum(again, axis=0)[0] == pytest.approx(np.sum(again, axis=0)[1], rel=0.07, abs=6000)
    ages = [(a["staleness_mean"], b["staleness_steps/mean"]) for a, b in steps if not b["warmup"]]
    assert np.mean(ages, axis=0)[0] == pytest.approx(np.mean(ages, axis=0)[1], abs=0.2)
    seconds = [sum(each) for each in zip(*((a["seconds"], b["wall_s"]) for a, b in steps), strict=True)]
    assert seconds[1] / seconds[0] == pytest.approx(ratio, abs=0.01)
    most_kv = max(sample[KV_USAGE] for sample in block["samples"]) * result["engine"]["kv_tokens"]
    assert rollout.most_kv == pytest.approx(most_kv, rel=0.05)


def test_a_trainer_that_polls_ends_a_step_when_it_looks():
    slots = LOAD.batch * LOAD.group
    rows = lengths(LOAD, 8 * LOAD.batch)
    looked, told = (started(Mode("", slots, 2, poll_s=poll_s), rows) for poll_s in (POLL_S, 0.0))
    seconds = [(looked.step()["seconds"], told.step()["seconds"]) for _ in range(3)]
    assert seconds[0][1] < seconds[0][0] < seconds[0][1] + POLL_S
    # Decode steps are whole; a step whose batch is done when it begins does not wait.
    assert all(each % POLL_S < 2 * SPEED.decode_s(1, slots, slots * 1500) for each, _ in seconds)


@pytest.mark.parametrize(("oldest_first", "tokens"), [(False, 10), (True, 400)])
def test_the_oldest_of_those_that_are_done_are_trained_first_where_the_mode_says_so(oldest_first: bool, tokens: int):
    rollout = started(Mode("", 3, 2), np.array([[30], [400], [10], [90]]), Workload(batch=1, group=1))
    assert rollout.step()["tokens"] == 30
    rollout.mode = replace(rollout.mode, oldest_first=oldest_first, poll_s=10.0)  # until all are done
    assert rollout.step()["tokens"] == tokens


def test_verl_s_mode_has_all_requests_of_two_batches_in_the_engine_and_computes_them_again():
    slots = LOAD.batch * LOAD.group
    (mode,) = [mode for mode in modes(slots, LOAD.group) if mode.name == COLOCATED]
    assert (mode.slots, mode.prefetch, mode.oldest_first, mode.poll_s) == (2 * slots, 2, True, POLL_S)
    assert predict(replace(mode, poll_s=0.2), SPEED, LOAD, PROMPT)["reprefilled"] > 0


def test_the_table_has_a_row_for_every_mode():
    row = predict(Mode("sync", 32, 1), SPEED, LOAD, PROMPT) | {"time_ratio": 1.0, "kv_share": 0.25}
    assert table({"sync": row, "other": row}).count("\n") == 3


# ---- engines on GPUs of their own ----


def separate_steps(train_s: float, prefetch: float = 2, num_steps: int = 6) -> list[dict[str, float]]:
    """Steps with constant lengths, and requests that are all there at once."""
    slots = LOAD.batch * LOAD.group
    rows = np.full((LOAD.batch * (num_steps + 3), LOAD.group), 200)
    rollout = started(Mode("separate", slots, prefetch, train_s=train_s), rows, speed=AT_ONCE)
    return [rollout.step() for _ in range(num_steps)]


def test_a_step_takes_the_longer_of_training_and_generation():
    generation_s = separate_steps(0.0, prefetch=1)[-1]["seconds"]
    long, short = 3 * generation_s, generation_s / 3
    # With one batch in flight too: prompts are admitted when a batch is taken, so engines have work meanwhile.
    for prefetch in (1, 2):
        assert separate_steps(long, prefetch)[-1]["seconds"] == pytest.approx(long, rel=0.02)
    # The batch's generation, with the interruption that it outlasts.
    assert separate_steps(short)[-1]["seconds"] == pytest.approx(generation_s + SPEED.interruption_s, rel=0.1)


def test_engines_of_their_own_are_never_faster_than_what_is_never_interrupted():
    slots = LOAD.batch * LOAD.group
    bound = predict(Mode("bound", slots, 12, interrupts=False), SPEED, LOAD, PROMPT)
    for train_s in (0.1, 1.0, 4.0):
        apart = predict(Mode("separate", slots, 2, train_s=train_s), SPEED, LOAD, PROMPT)
        assert apart["tokens_per_s"] <= bound["tokens_per_s"] * 1.001
        assert apart["seconds"] >= train_s


def test_the_balanced_split_is_where_both_take_about_equally_long():
    whole_s = predict(Mode("shared", LOAD.batch * LOAD.group, 2), SPEED.of_replicas(8), LOAD, PROMPT)["seconds"]
    rows = splits(SPEED, LOAD, PROMPT, gpus=8, training=Training(whole_s))
    assert [row["rollout_gpus"] for row in rows] == list(range(8))
    assert [row["train_s"] / whole_s for row in rows[1:]] == pytest.approx([8 / (8 - n) for n in range(1, 8)])
    text = splits_table(rows, 8)
    best = max(rows, key=lambda row: row["tokens_per_s"])
    assert best["rollout_gpus"] > 0
    assert f"balanced: {best['rollout_gpus']} GPUs of engines" in text
    assert text.count("\n| ") == 9
    nothing_to_hide = splits(SPEED, LOAD, PROMPT, gpus=2, training=Training(whole_s / 1000))
    assert "no split is faster" in splits_table(nothing_to_hide, 2)
