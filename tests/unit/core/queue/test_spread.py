"""Groups without spread: dropped under a reason of their own, replaced at once, and never taken for a broken agent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partial_rollout.core.queue.ledger import NO_SPREAD
from partial_rollout.core.queue.spread import shared_metric
from partial_rollout.core.queue.staleness import StalenessBound
from partial_rollout.core.queue.tail import FewAtATime, Partial, Reorder, TailPolicy, Wait
from partial_rollout.types import TrajectorySummary
from tests.round_driver import BATCH, Trainer


def group(*metrics: float | None, version: int = 0, uid: str = "a") -> list[TrajectorySummary]:
    return [
        TrajectorySummary(f"{uid}_{index}_0", 3, 5, version, version, metric=metric)
        for index, metric in enumerate(metrics)
    ]


@given(
    st.one_of(
        st.lists(st.sampled_from([0.0, 0.1, 1 / 3, 1.0, -1.0, 1e300, float("nan"), float("inf")]), min_size=1),
        st.tuples(st.floats(-10, 10), st.integers(1, 600)).map(lambda drawn: [drawn[0]] * drawn[1]),
    )
)
@settings(max_examples=200, deadline=None)
def test_a_group_has_no_spread_if_numpy_finds_a_deviation_of_zero(metrics: list[float]) -> None:
    with np.errstate(all="ignore"):
        is_dropped = len(metrics) > 1 and float(np.std(metrics)) == 0.0
    assert shared_metric(group(*metrics)) == (metrics[0] if is_dropped else None)


def test_a_group_that_has_not_all_metrics_is_trained() -> None:
    """Such a group is from a checkpoint, or from a run, in which groups were not filtered."""
    assert shared_metric(group(None, None)) is None
    assert shared_metric(group(1.0, 1.0, None)) is None


class Filtering(Trainer):
    """A trainer whose prompts have two trajectories, of which `flat` prompts have the same metric."""

    def finish_as(self, uid: str, *metrics: float, version: int = 0) -> bool:
        return self.queue.finish(self.claims.pop(uid), group(*metrics, uid=uid, version=version))

    def dropped(self) -> dict[str, int]:
        now = self.queue.statistics()
        assert now.conserved, now
        return now.dropped


POLICIES = [
    Partial(2 * BATCH),
    Wait(BATCH),
    Reorder(batch=BATCH, gen_batch=BATCH + 2, max_deferrals=3),
    FewAtATime(batch=BATCH, gen_batch=BATCH + 2, max_deferrals=3, max_joining=1),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_group_without_spread_is_replaced_at_once_under_every_tail_policy(policy: TailPolicy) -> None:
    trainer = Filtering(policy)
    trainer.begin()
    first, second, *others = trainer.claim()
    assert not trainer.finish_as(first, 0.0, 0.0)
    assert not trainer.finish_as(second, 1.0, 1.0)
    assert trainer.queue.can_take(BATCH)
    result = trainer.take()
    assert (result.groups, result.num_missing, result.num_filtered) == ((), 2, 2)
    assert result.filtered == {0.0: 1, 1.0: 1}
    trainer.admit(result.num_missing)
    assert not trainer.queue.can_take(BATCH)  # they are asked for once
    started = trainer.claim()
    assert len(started) == 2  # the round lets them start
    *most, last = (others + started)[:BATCH]
    for uid in most:
        assert trainer.finish_as(uid, 0.0, 1.0)
    assert not trainer.queue.can_take(BATCH)
    trainer.finish_as(last, 0.0, 1.0)
    result = trainer.take()
    assert len(result.groups) == BATCH
    assert result.filtered == {}
    assert trainer.dropped() == {NO_SPREAD: 2}
    assert trainer.queue.statistics().failed_attempts == 0


def test_one_prompt_starts_for_a_group_without_spread_though_more_wait() -> None:
    trainer = Filtering(Reorder(batch=BATCH, gen_batch=BATCH + 1, max_deferrals=3))
    trainer.begin()
    first, *_ = trainer.claim()
    trainer.admit(2)  # as of a run that was started again with other settings
    trainer.finish_as(first, 0.0, 0.0)
    result = trainer.take()
    assert result.num_missing == 1
    trainer.admit(result.num_missing)
    assert len(trainer.claim()) == 1


def test_failures_and_groups_without_spread_are_told_apart() -> None:
    trainer = Filtering(Wait(BATCH))
    trainer.begin()
    first, second, *_ = trainer.claim()
    trainer.finish_as(first, 0.0, 0.0)
    trainer.queue.drop(trainer.claims.pop(second), "bad_data")
    result = trainer.take()
    assert (result.num_missing, result.num_filtered) == (2, 1)
    assert trainer.dropped() == {NO_SPREAD: 1, "bad_data": 1}


def test_what_is_dropped_while_the_batch_is_trained_is_part_of_the_next_round_and_of_its_count() -> None:
    trainer = Filtering(Partial(2 * BATCH))
    trainer.begin()
    uids = trainer.claim()
    for uid in uids[:BATCH]:
        trainer.finish_as(uid, 0.0, 1.0)
    trainer.take()
    trainer.finish_as(uids[BATCH], 0.5, 0.5)
    assert trainer.begin().num_fresh == BATCH + 1
    assert not trainer.queue.can_take(BATCH)
    for uid in [*uids[BATCH + 1 :], *trainer.claim()][:BATCH]:
        trainer.finish_as(uid, 0.0, 1.0)
    result = trainer.take()
    assert (len(result.groups), result.filtered) == (BATCH, {0.5: 1})


def test_a_deferred_group_whose_report_was_under_way_is_dropped_as_well() -> None:
    trainer = Filtering(Reorder(batch=BATCH, gen_batch=BATCH + 1, max_deferrals=3))
    trainer.begin()
    *uids, late = trainer.claim()
    for uid in uids:
        trainer.finish_as(uid, 0.0, 1.0)
    assert [claim.uid for claim in trainer.take().deferred] == [late]
    assert not trainer.finish_as(late, 1.0, 1.0)
    now = trainer.queue.statistics()
    assert (now.deferred, now.dropped, now.conserved) == (0, {NO_SPREAD: 1}, True)


def test_a_group_that_the_batch_must_contain_does_not_hold_it_up_when_it_has_no_spread() -> None:
    trainer = Filtering(Reorder(batch=BATCH, gen_batch=2 * BATCH, max_deferrals=3))
    trainer.begin()
    uids = trainer.claim()
    for uid in uids[:BATCH]:
        trainer.finish_as(uid, 0.0, 1.0)
    trainer.take()
    trainer.begin()
    assert trainer.kinds[-1] == "long"
    long = trainer.claim()
    trainer.finish_as(long[0], 1.0, 1.0)
    for uid in long[1:]:
        trainer.finish_as(uid, 0.0, 1.0)
    trainer.admit(trainer.take().num_missing)
    (fresh,) = trainer.claim()
    trainer.finish_as(fresh, 0.0, 1.0)
    assert {each.uid for each in trainer.take().groups} == {*long[1:], fresh}


@pytest.mark.parametrize("past", ["drop", "restart"])
def test_a_group_that_is_too_old_and_without_spread_is_dropped_for_the_latter(past: str) -> None:
    """The group is not tried again: another prompt is worth more."""
    trainer = Filtering(Partial(2 * BATCH), StalenessBound(max_staleness=1, past=past))
    trainer.begin()
    old, *_ = trainer.claim()
    trainer.queue.version = 5
    trainer.finish_as(old, 1.0, 1.0, version=0)
    assert trainer.dropped() == {NO_SPREAD: 1}
    assert trainer.queue.statistics().restarted == 0


def test_a_checkpoint_keeps_the_count_and_the_metrics_of_finished_groups() -> None:
    trainer = Filtering(Partial(2 * BATCH))
    trainer.begin()
    first, second, *_ = trainer.claim()
    trainer.finish_as(first, 1.0, 1.0)
    trainer.finish_as(second, 1.0, 0.0)
    trainer.restart()
    assert trainer.dropped() == {NO_SPREAD: 1}
    (done,) = trainer.queue.snapshot().done
    assert [trajectory.metric for trajectory in done.trajectories] == [1.0, 0.0]
    assert trainer.begin().num_fresh == 1
