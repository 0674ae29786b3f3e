"""The slot budget rises while slots are short, falls when memory is, and never leaves its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partial_rollout.core.engine_meter import EngineSpeed
from partial_rollout.core.slots import KV_HIGH, KV_ROOM, EngineLoad, SlotBounds, SlotController, share_slots

BOUNDS = SlotBounds(least=8, most=128, group=4)


def controller(budget: int = 64) -> SlotController:
    return SlotController(budget, BOUNDS)


@pytest.mark.parametrize(
    ("load", "in_use", "after", "reason"),
    [
        (EngineLoad(kv_usage=0.4, num_tokens=9), 64, 72, "all slots in use, KV cache 40% full"),
        (EngineLoad(kv_usage=0.4, num_tokens=9), 61, 72, "all slots in use, KV cache 40% full"),
        (EngineLoad(kv_usage=0.4, num_tokens=9), 60, 64, "4 slots are free"),
        (EngineLoad(kv_usage=0.4), 64, 64, "no token since the last look"),
        (EngineLoad(waiting=3), 64, 64, "3 requests wait in the engines"),
        (EngineLoad(kv_usage=0.95), 64, 48, "KV cache 95% full"),
        (EngineLoad(kv_usage=0.5, num_preemptions=2), 64, 48, "2 requests preempted"),
        (EngineLoad(num_preemptions=2), 70, 64, "2 requests preempted; the last decrease has not taken effect"),
    ],
)
def test_a_decision_and_its_reason(load: EngineLoad, in_use: int, after: int, reason: str) -> None:
    decision = controller().observe(load, in_use)
    assert (decision.before, decision.after, decision.reason) == (64, after, reason)
    assert decision.change == after - 64


@pytest.mark.parametrize(("in_use", "after"), [(52, 64), (53, 72)])
def test_slots_that_are_less_than_a_group_in_each_worker_are_not_free(in_use: int, after: int) -> None:
    """Three workers of groups of 4: each may have 3 slots free that no prompt fits in."""
    slots = SlotController(64, SlotBounds(least=12, most=128, group=4, num_workers=3))
    assert slots.observe(EngineLoad(num_tokens=1), in_use).after == after


def test_preemptions_count_once_and_an_engine_that_starts_again_counts_from_zero() -> None:
    slots = controller()
    assert slots.observe(EngineLoad(num_preemptions=5), 64).after == 48
    assert slots.observe(EngineLoad(num_preemptions=5, num_tokens=1), 48).after == 56
    assert slots.observe(EngineLoad(num_tokens=2), 56).after == 64
    assert slots.observe(EngineLoad(num_preemptions=1), 64).after == 48


def test_the_budget_stops_at_its_bounds() -> None:
    slots = controller(124)
    assert slots.observe(EngineLoad(num_tokens=1), 124).after == 128
    assert slots.observe(EngineLoad(num_tokens=2), 128).reason == "at the upper bound"
    slots = controller(8)
    assert slots.observe(EngineLoad(kv_usage=1.0), 8).reason == "KV cache 100% full; at the lower bound"


@pytest.mark.parametrize(
    ("step_s", "after"),
    [(0.020, 72), (0.021, 72), (0.0226, 64)],
    ids=["steps take no longer", "a little longer", "longer by the same share"],
)
def test_slots_that_bring_no_tokens_are_not_added(step_s: float, after: int) -> None:
    """Each of two engines has half of the slots; nothing is known of the other."""
    speed = EngineSpeed(steps=((16.0, 0.010), (32.0, 0.020), (36.0, step_s)))
    decision = controller().observe(EngineLoad(num_tokens=1), 64, [speed, EngineSpeed()])
    assert decision.after == after
    assert ("hardly more tokens" in decision.reason) is (after == 64)


@pytest.mark.parametrize(
    ("first", "group", "falls", "rises"),
    [
        (64, 4, [48], [56, 64, 64]),
        (160, 8, [120], [136, 152, 160, 160]),
        (256, 8, [192, 144], [176, 208, 240, 256, 256]),
        (255, 5, [190], [220, 250, 255, 255]),
    ],
)
def test_slots_that_a_full_cache_took_come_back_whatever_the_engine_was_measured_at(
    first: int, group: int, falls: list[int], rises: list[int]
) -> None:
    """With more requests it was measured last while the cache was full."""
    slots = SlotController(first, SlotBounds(least=group, most=4 * first, group=group))
    slow = EngineSpeed(steps=((falls[-1], 0.010), (first, 0.10)))
    fallen = [slots.observe(EngineLoad(kv_usage=0.95), slots.budget, [slow]).after for _ in falls]
    found = [
        slots.observe(EngineLoad(kv_usage=0.4, num_tokens=look + 1), slots.budget, [slow]) for look in range(len(rises))
    ]
    assert fallen == falls
    assert [decision.after for decision in found] == rises
    assert found[-1].reason == f"more slots than {first} bring hardly more tokens"


@pytest.mark.parametrize(("usage", "after"), [(KV_ROOM, 72), (KV_ROOM + 0.01, 64), (KV_HIGH - 0.01, 64)])
def test_no_slots_are_added_where_running_requests_may_fill_the_cache(usage: float, after: int) -> None:
    decision = controller().observe(EngineLoad(kv_usage=usage, num_tokens=1), 64)
    assert decision.after == after
    assert ("still fill" in decision.reason) is (after == 64)


FULL, ROOM = 0.95, 0.4


@pytest.mark.parametrize(
    ("looks", "found"),
    [
        ([(FULL, 64)], True),
        ([(FULL, 64), (ROOM, 48)], True),
        ([(ROOM, 64), (FULL, 72)], False),
        ([(ROOM, 64), (FULL, 72), (FULL, 70), (FULL, 64)], False),
        ([(ROOM, 64), (FULL, 72), (FULL, 70), (FULL, 64), (FULL, 60)], True),
    ],
    ids=["full at first", "once is enough", "an added slot", "added slots end", "added slots have ended"],
)
@pytest.mark.parametrize("preempts", [False, True])
def test_the_fewest_slots_are_too_many_only_where_no_other_was_in_use(
    looks: list[tuple[float, int]], found: bool, preempts: bool
) -> None:
    slots, num_preemptions = SlotController(64, SlotBounds(least=64, most=128, group=4)), 7
    slots.begin(EngineLoad(num_preemptions=num_preemptions))
    for num_tokens, (usage, in_use) in enumerate(looks, 1):
        num_preemptions += preempts and usage == FULL
        slots.observe(EngineLoad(in_use, 0, ROOM if preempts else usage, num_preemptions, num_tokens), in_use)
    assert slots.was_full_with_few is found
    slots.begin(EngineLoad(num_preemptions=num_preemptions))
    assert not slots.was_full_with_few


@pytest.mark.parametrize(
    ("least", "looks", "found"),
    [
        (32, [(FULL, 64), (FULL, 40)], False),
        (32, [(FULL, 64), (FULL, 48), (FULL, 40), (FULL, 36), (FULL, 32)], False),
        (32, [(FULL, 64), (FULL, 48), (FULL, 40), (FULL, 36), (FULL, 32), (FULL, 32)], True),
        (4, [(FULL, 64), (FULL, 48), (FULL, 36), (FULL, 32), (FULL, 24)], True),
        (4, [(FULL, 64), (FULL, 48), (FULL, 36), (FULL, 36)], False),
        (48, [(FULL, 64), (FULL, 48), (FULL, 48)], True),
    ],
    ids=["at first", "some have to end", "with half", "with less than half", "with more", "a bound above half"],
)
def test_slots_fall_to_half_before_they_are_few(least: int, looks: list[tuple[float, int]], found: bool) -> None:
    slots = SlotController(64, SlotBounds(least=least, most=128, group=4))
    for usage, in_use in looks:
        slots.observe(EngineLoad(in_use, kv_usage=usage, num_tokens=in_use), in_use)
    assert slots.was_full_with_few is found


LOADS = st.builds(
    EngineLoad,
    running=st.just(0),
    waiting=st.integers(0, 1),
    kv_usage=st.floats(0, 1),
    num_preemptions=st.integers(0, 2),
    num_tokens=st.integers(0, 1),
)


@given(start=st.integers(8, 128), looks=st.lists(st.tuples(LOADS, st.integers(0, 140))))
def test_the_budget_stays_between_its_bounds_in_whole_groups(start: int, looks: list[tuple[EngineLoad, int]]) -> None:
    slots = controller(start)
    for load, in_use in looks:
        slots.observe(load, in_use)
        assert BOUNDS.least <= slots.budget <= BOUNDS.most
        assert slots.budget % BOUNDS.group == 0


@given(num_slots=st.integers(1, 400), num_workers=st.integers(1, 20), group=st.integers(1, 16))
def test_workers_share_all_whole_groups_and_none_has_two_more_than_another(
    num_slots: int, num_workers: int, group: int
) -> None:
    shares = share_slots(num_slots, num_workers=num_workers, group=group)
    assert len(shares) == num_workers
    assert all(share % group == 0 for share in shares)
    assert sum(shares) == num_slots - num_slots % group
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] <= group
