"""Blocks end in time and store what they measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.gpu.all import require_known
from benchmarks.gpu.inputs import workload
from benchmarks.gpu.policies import POLICIES, Block, Budget, Recorder, Wanted, least_s
from benchmarks.gpu.session import EngineOptions, composed, overrides

RECORD = {"timing_s/step": 2.0, "timing_s/gen": 1.5, "timing_s/drain": 0.1, "partial_rollout/response_tokens": 500.0}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def recorder(mode: str, num_steps: int, budget: Budget, stored: list) -> Recorder:
    counts = iter(range(0, 10_000, 100))
    ask = SimpleNamespace(
        statistics=lambda: SimpleNamespace(num_generated_tokens=next(counts), num_reprefilled_tokens=7)
    )
    made = Recorder(Block(mode, "long_tail", 0, 8), num_steps, budget, ask, stored.append)
    made.begin(0.0)
    return made


def test_a_block_ends_after_warm_up_and_measured_steps():
    stored: list[Block] = []
    step = recorder("partial_abort", 2, Budget(1e6), stored)
    assert [step(number, RECORD) for number in (1, 2, 3, 4, 5)] == [True, True, True, True, False]
    assert [each["warmup"] for each in step.block.steps] == [True, True, True, False, False]
    assert (step.block.ended, len(stored)) == ("done", 5)


def test_a_block_ends_when_no_further_step_fits():
    clock = Clock()
    step = recorder("sync", 9, Budget(6.0, clock), [])
    assert step(1, RECORD)
    clock.now = 4.0
    assert not step(2, RECORD)
    assert step.block.ended == "no time for another step"


def test_tokens_are_those_since_the_step_before():
    step = recorder("sync", 9, Budget(1e6), [])
    step(1, RECORD)
    step(2, RECORD)
    assert [each["generated_tokens"] for each in step.block.steps] == [100, 100]
    assert step.block.steps[0]["drain_ms"] == 100


def test_time_between_two_steps_counts():
    step, clock = recorder("sync", 9, Budget(1e6), []), Clock()
    step.clock = clock
    for number, clock.now in ((1, 10.0), (2, 15.0)):
        step(number, RECORD)
    assert [each["wall_s"] for each in step.block.steps] == [2, 5]


def test_a_block_needs_time_for_its_warm_up_and_one_step_more():
    """One slow step of another mode, as of the first full one, is no reason to leave out a block."""
    walls_s = [30.0, 70.0, 20.0]
    assert least_s("sync", walls_s) == 30.0
    assert least_s("partial_abort", walls_s) == 90.0
    assert least_s("partial_abort", []) == 0.0


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("sync", Wanted("sync", 3, "long_tail")),
        ("sync:1", Wanted("sync", 1, "long_tail")),
        ("sync@uniform", Wanted("sync", 3, "uniform")),
        ("sync:2@heavy_tail", Wanted("sync", 2, "heavy_tail")),
    ],
)
def test_a_mode_may_name_its_steps_and_trace(word, wanted):
    assert Wanted.of(word, 3, "long_tail") == wanted


def test_an_unknown_mode_is_refused_with_those_that_are_known():
    with pytest.raises(SystemExit, match=r"--modes synk is not allowed: must be of sync, partial_abort"):
        require_known("modes", {"synk", "sync"}, POLICIES)


@pytest.mark.parametrize("shape", ["tiny", "8b"])
def test_every_policy_is_accepted(shape, tmp_path):
    options = EngineOptions(shape=shape, response_tokens=workload(shape, "long_tail").limit)
    load = workload(shape, "long_tail")
    (tmp_path / "model").mkdir()
    for policy in POLICIES.values():
        config = composed({**overrides(options, load, tmp_path), **policy.overrides(load, options.slots)})
        assert config.actor_rollout_ref.rollout.load_format == "dummy"
