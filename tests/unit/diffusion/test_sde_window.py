from __future__ import annotations

import subprocess
import sys

import pytest

from partial_rollout.diffusion.sde_window import NO_WINDOW, SdeWindow, WindowPlan, window_of_request, window_of_step
from partial_rollout.errors import ConfigError

PLAN = WindowPlan(size=2, first=0, last=8)


def test_a_window_holds_its_steps():
    window = SdeWindow(2, 4)
    assert [step for step in range(6) if step in window] == [2, 3]
    assert len(window) == 2
    assert len(NO_WINDOW) == 0
    assert 0 not in NO_WINDOW


@pytest.mark.parametrize(("start", "stop"), [(3, 2), (-1, 2)])
def test_a_window_does_not_end_before_it_starts(start, stop):
    with pytest.raises(ConfigError, match="0 <= start <= stop"):
        SdeWindow(start, stop)


@pytest.mark.parametrize(("size", "first", "last"), [(3, 0, 2), (-1, 0, 2), (1, 4, 4), (1, -1, 4)])
def test_a_plan_has_room_for_its_windows(size, first, last):
    with pytest.raises(ConfigError, match="does not fit"):
        WindowPlan(size, first, last)


def test_all_requests_of_a_step_share_the_window_with_mix_grpo_and_with_flow_grpo_not():
    def windows(draw, step):
        return {draw(PLAN, run_seed=7, global_step=step, request_seed=seed) for seed in range(64)}

    assert all(len(windows(window_of_step, step)) == 1 for step in range(32))
    assert len(windows(window_of_request, 0)) > 1
    assert len(set.union(*(windows(window_of_step, step) for step in range(64)))) == PLAN.last - PLAN.size + 1


def test_a_progressive_window_stays_moves_on_by_one_and_ends_at_the_last_place_that_fits():
    plan = WindowPlan(size=2, first=1, last=5, interval=3)

    def windows(step: int) -> set[SdeWindow]:
        return {window_of_step(plan, run_seed=seed, global_step=step, request_seed=seed) for seed in range(8)}

    first, second, last = ({SdeWindow(start, start + 2)} for start in (1, 2, 3))
    assert [windows(step) for step in range(12)] == [first] * 3 + [second] * 3 + [last] * 6


def test_an_interval_is_at_least_one():
    with pytest.raises(ConfigError, match="algorithm.sde_window_interval=0 is not allowed: must be null or at least 1"):
        WindowPlan(size=2, first=0, last=5, interval=0)


def test_every_draw_is_inside_the_range():
    for seed in range(200):
        window = PLAN.draw(seed)
        assert len(window) == PLAN.size
        assert PLAN.first <= window.start <= window.stop <= PLAN.last


def test_another_process_draws_the_same():
    code = (
        "from partial_rollout.diffusion.sde_window import *; print(WindowPlan(2, 0, 30).draw('mix_grpo', 7, 3).start)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {f"{WindowPlan(2, 0, 30).draw('mix_grpo', 7, 3).start}\n"}
