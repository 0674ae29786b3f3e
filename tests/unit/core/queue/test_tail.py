"""Tail policies: what a round is made of, that nothing is lost and that nothing waits for ever."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partial_rollout.core.queue.tail import (
    FewAtATime,
    Partial,
    Reorder,
    RoundPlan,
    RoundView,
    TailPolicy,
    Wait,
    make_policy,
)
from partial_rollout.errors import StaleClaim
from partial_rollout.settings.block import PartialRolloutConfig, TailConfig
from partial_rollout.types import PromptMeta, TakeResult
from tests.round_driver import BATCH, Trainer, summaries

if TYPE_CHECKING:
    from collections.abc import Callable


def view(pending: int = 0, done: int = 0, deferrals: tuple[int, ...] = ()) -> RoundView:
    return RoundView(pending, 0, done, deferrals)


# ---- what a policy decides ----


def test_partial_fills_the_queue_and_lets_everything_start() -> None:
    plan = Partial(capacity=8).plan(RoundView(pending=1, ongoing=2, done=3))
    assert plan == RoundPlan("open", num_fresh=2)
    assert plan.num_started == math.inf


def test_sync_starts_exactly_a_batch() -> None:
    assert Wait(4).plan(view()) == RoundPlan("whole", num_started=4, num_fresh=4)


def test_what_another_policy_left_behind_comes_first() -> None:
    assert Wait(4).plan(view(pending=5, done=1, deferrals=(1,))) == RoundPlan("whole", 1, 1, num_started=2)
    # No more than the batch lacks: the step would wait for whatever goes on.
    assert Wait(4).plan(view(done=3, deferrals=(1, 1, 1))) == RoundPlan("whole", 1, 1, num_started=0)
    assert Wait(4).plan(view(done=5, deferrals=(1,))) == RoundPlan("whole", num_started=0)
    assert Partial(8).plan(view(deferrals=(3, 1))) == RoundPlan("open", num_resumed=2, num_fresh=6)


REORDER = Reorder(batch=4, gen_batch=6, max_deferrals=3)


@pytest.mark.parametrize(
    ("seen", "plan"),
    [
        (view(), RoundPlan("short", num_started=6, num_fresh=6)),
        (view(pending=1, done=2, deferrals=(2,)), RoundPlan("short", num_started=4, num_fresh=3)),
        (view(pending=9, deferrals=(2, 2, 1)), RoundPlan("short", num_started=6)),
        (view(pending=2, done=3, deferrals=(2, 2, 1, 1, 1)), RoundPlan("long", 4, 4, num_started=0)),
        (view(done=4, deferrals=(2, 2, 1, 1)), RoundPlan("short", num_started=0)),
        (view(done=1, deferrals=(3, 1)), RoundPlan("mixed", 2, 2, num_started=3, num_fresh=3)),
    ],
    ids=["first", "left over", "pending", "long", "empty", "overdue"],
)
def test_reorder(seen: RoundView, plan: RoundPlan) -> None:
    assert REORDER.plan(seen) == plan


@pytest.mark.parametrize(
    ("seen", "plan"),
    [
        (view(), RoundPlan("short", num_started=6, num_fresh=6)),
        (view(deferrals=(1,)), RoundPlan("mixed", 1, num_started=5, num_fresh=5)),
        (view(deferrals=(3, 1, 1)), RoundPlan("mixed", 1, 1, num_started=5, num_fresh=5)),
        (view(deferrals=(2, 2, 1, 1)), RoundPlan("mixed", 1, num_started=4, num_fresh=4)),
        (view(deferrals=(2, 2, 1, 1, 1)), RoundPlan("long", 4, 4, num_started=0)),
        (view(done=4, deferrals=(3, 1)), RoundPlan("short", num_started=0)),
    ],
    ids=["first", "joins", "overdue", "as many as join are left behind", "after a restart", "a batch is done"],
)
def test_few_at_a_time(seen: RoundView, plan: RoundPlan) -> None:
    assert FewAtATime(batch=4, gen_batch=6, max_deferrals=3, max_joining=1).plan(seen) == plan


@pytest.mark.parametrize(
    ("tail", "policy"),
    [
        (TailConfig(), Partial(16)),
        (TailConfig(policy="wait"), Wait(8)),
        (TailConfig(policy="reorder"), Reorder(8, 10, 8)),
        (TailConfig(policy="reorder", gen_batch_size=12), Reorder(8, 12, 8)),
        (TailConfig(policy="reorder", max_deferred_per_round=3), FewAtATime(8, 10, 8, 3)),
    ],
)
def test_the_configuration_chooses(tail: TailConfig, policy: TailPolicy) -> None:
    assert make_policy(PartialRolloutConfig(tail=tail), 8) == policy


# ---- rounds of the queue ----


def taken(result: TakeResult) -> list[str]:
    return [group.uid for group in result.groups]


def after_a_short_round(policy: TailPolicy = REORDER) -> Trainer:
    """p0 to p3 are trained, p4 and p5 deferred."""
    trainer = Trainer(policy)
    trainer.begin()
    trainer.claim()
    trainer.finish("p0", "p1", "p2", "p3")
    result = trainer.take()
    assert taken(result) == ["p0", "p1", "p2", "p3"]
    assert result.deferred == (trainer.claims["p4"], trainer.claims["p5"])
    return trainer


def test_nothing_starts_between_rounds() -> None:
    trainer = Trainer(REORDER)
    trainer.queue.admit([PromptMeta("early", 1, 0)])
    assert trainer.claim() == []
    assert not trainer.queue.next_group_size
    trainer.begin()
    trainer.claim(free_slots=BATCH)
    trainer.finish(*trainer.claims)
    trainer.take()
    assert trainer.queue.statistics().pending > 0
    assert trainer.claim() == []


def test_deferred_groups_keep_their_claims_and_are_trained_together() -> None:
    trainer = after_a_short_round()
    held = dict(trainer.claims)
    trainer.begin()
    trainer.claim()
    trainer.finish("p6", "p7", "p8", "p9")
    trainer.take()
    assert (trainer.queue.statistics().deferred, trainer.queue.statistics().ongoing) == (4, 0)
    assert trainer.begin().kind == "long"
    assert trainer.queue.can_claim("w0", free_slots=0)
    assert trainer.claim(free_slots=0) == ["p4", "p5", "p10", "p11"]
    assert not trainer.queue.can_claim("w0", free_slots=1000)
    assert trainer.claims | held == trainer.claims
    trainer.finish("p11", "p10", "p5")
    assert trainer.take() == TakeResult()
    trainer.finish("p4")
    result = trainer.take()
    assert set(taken(result)) == {"p4", "p5", "p10", "p11"}
    assert {group.uid: group.num_deferrals for group in result.groups} == {"p4": 2, "p5": 2, "p10": 1, "p11": 1}
    assert trainer.kinds == ["short", "short", "long"]


def test_a_group_that_finishes_while_it_is_deferred_is_trained_next() -> None:
    trainer = after_a_short_round()
    trainer.finish("p4")
    assert (trainer.queue.statistics().done, trainer.queue.statistics().deferred) == (1, 1)
    assert trainer.begin().num_started == 5
    trainer.claim()
    trainer.finish("p6", "p7", "p8")
    assert taken(trainer.take())[0] == "p4"


def test_a_dropped_member_of_a_long_round_is_replaced() -> None:
    trainer = after_a_short_round()
    trainer.begin()
    trainer.claim()
    trainer.finish("p6", "p7", "p8", "p9")
    trainer.take()
    trainer.begin()
    trainer.claim()
    trainer.queue.drop(trainer.claims.pop("p4"), "prompt_too_long")
    trainer.finish("p5", "p10", "p11")
    assert trainer.take() == TakeResult(num_missing=1)
    trainer.admit(1)
    assert trainer.claim() == ["p12"]
    trainer.finish("p12")
    assert set(taken(trainer.take())) == {"p5", "p10", "p11", "p12"}


def test_a_failed_member_of_a_long_round_starts_before_older_pending_ones() -> None:
    """The round waits for it; p0, which was given back in every round and is older, must not take its place."""
    trainer = Trainer(Reorder(BATCH, 6, max_deferrals=9))
    deferred = []
    while trainer.begin().kind == "short":
        claimed = trainer.claim()
        trainer.queue.give_back(trainer.claims.pop("p0"))
        trainer.finish(*claimed[1 : 1 + BATCH])
        deferred += claimed[1 + BATCH :]
        trainer.take()
    assert trainer.claim() == deferred == ["p5", "p10", "p15", "p20"]
    assert trainer.queue.statistics().pending == 1
    trainer.fail("p10")
    assert trainer.claim() == ["p10"]


def test_a_lost_workers_deferred_groups_start_again_in_their_turn() -> None:
    trainer = after_a_short_round()
    old = trainer.claims.pop("p4")
    trainer.queue.release_worker("w0")
    assert trainer.queue.statistics().deferred == 2
    with pytest.raises(StaleClaim):
        trainer.queue.finish(old, summaries("p4"))
    trainer.begin()
    assert "p4" not in trainer.claim()
    trainer.finish("p6", "p7", "p8", "p9")
    trainer.take()
    assert trainer.begin().kind == "long"
    assert set(trainer.claim()) == {"p4", "p5", "p10", "p11"}
    assert trainer.queue.statistics().conserved


def test_a_claim_that_its_worker_did_not_fetch_in_the_round_is_deferred_again() -> None:
    trainer = Trainer(FewAtATime(BATCH, 6, max_deferrals=9, max_joining=1))
    trainer.begin()
    trainer.claim()
    trainer.finish("p0", "p1", "p2", "p3")
    trainer.take()
    trainer.begin()  # p4 may go on, but only another worker asks
    others = {claim.uid: claim for claim in trainer.queue.claim("w1", 1000)}
    for uid in list(others)[:BATCH]:
        trainer.queue.finish(others[uid], summaries(uid))
    trainer.take()
    assert trainer.claim() == []
    trainer.begin()
    assert trainer.claim(free_slots=0) == ["p4"]


def test_a_batch_waits_for_overdue_groups_though_enough_others_are_done() -> None:
    trainer = after_a_short_round(Reorder(BATCH, 6, max_deferrals=1))
    assert trainer.begin().kind == "mixed"
    trainer.claim()
    trainer.finish("p6", "p7", "p8", "p9", "p5")
    assert trainer.take() == TakeResult()
    trainer.finish("p4")
    assert taken(trainer.take()) == ["p4", "p5", "p6", "p7"]


def test_resumed_claims_take_their_slots_from_those_that_are_free() -> None:
    trainer = after_a_short_round(Reorder(BATCH, 6, max_deferrals=1))
    trainer.begin()
    assert trainer.claim(free_slots=3) == ["p4", "p5", "p6"]


def before_a_long_round() -> Trainer:
    """p4, p5, p10 and p11 are deferred, and are enough for a batch."""
    trainer = after_a_short_round()
    trainer.begin()
    trainer.claim()
    trainer.finish("p6", "p7", "p8", "p9")
    trainer.take()
    return trainer


def test_a_claim_that_ends_before_its_worker_has_fetched_it_is_not_handed_out() -> None:
    """The report was under way when the prompt was deferred."""
    trainer = before_a_long_round()
    trainer.begin()
    trainer.fail("p4")
    assert trainer.claim() == ["p5", "p10", "p11", "p4"]


def test_a_worker_is_called_for_resumed_claims_until_the_last_one_has_ended() -> None:
    trainer = before_a_long_round()
    trainer.begin()
    for uid in ("p4", "p5", "p10", "p11"):
        assert trainer.queue.can_claim("w0", free_slots=0)
        trainer.finish(uid)
    assert not trainer.queue.can_claim("w0", free_slots=0)


def test_trajectories_of_deferred_groups_are_not_counted_as_claimed() -> None:
    trainer = before_a_long_round()
    counts = [trainer.queue.statistics().claimed_trajectories]
    for event in (trainer.begin, trainer.claim, lambda: trainer.finish("p4")):
        event()
        counts.append(trainer.queue.statistics().claimed_trajectories)
    assert counts == [0, 4, 4, 3]


def test_order_and_counts_of_deferred_groups_survive_a_restart() -> None:
    trainer = before_a_long_round()
    before = trainer.queue.snapshot()
    trainer.restart()
    assert trainer.queue.snapshot() == before
    assert [meta.uid for meta in before.deferred] == ["p4", "p5", "p10", "p11"]
    assert before.deferrals == {"p4": 2, "p5": 2, "p10": 1, "p11": 1}
    assert trainer.begin().kind == "long"
    assert trainer.claim() == ["p4", "p5", "p10", "p11"]


# ---- nothing is lost, nothing waits for ever ----


def policies() -> st.SearchStrategy[TailPolicy]:
    gen_batch, deferrals = st.integers(BATCH + 1, 2 * BATCH), st.integers(1, 5)
    few = st.builds(FewAtATime, st.just(BATCH), gen_batch, deferrals, st.integers(1, BATCH))
    return st.one_of(st.just(Wait(BATCH)), st.builds(Reorder, st.just(BATCH), gen_batch, deferrals), few)


ORDERS: dict[str, Callable[[Random, list[str]], str]] = {
    "random": lambda rng, uids: rng.choice(uids),
    "oldest first": lambda rng, uids: uids[0],
    "newest first": lambda rng, uids: uids[-1],
    "some are long": lambda rng, uids: min(uids, key=lambda uid: (int(uid[1:]) % 3 == 0, uid)),
}


def run_round(trainer: Trainer, rng: Random, order: str, num_slots: int) -> None:
    """Claims come and groups finish or fail one by one, in the given order, until the batch is taken."""
    trainer.begin()
    while not (result := trainer.take()).groups:
        trainer.admit(result.num_missing)
        deferred = {meta.uid for meta in trainer.queue.snapshot().deferred}
        ongoing = [uid for uid in trainer.claims if uid not in deferred]
        claimed = trainer.claim(num_slots - len(ongoing))
        ongoing += [uid for uid in claimed if uid not in ongoing]
        uid = ORDERS[order](rng, ongoing)
        trainer.fail(uid) if rng.random() < 0.1 else trainer.finish(uid)
    assert len(result.groups) == BATCH
    if rng.random() < 0.05:
        trainer.restart()


@given(
    policy=policies(),
    seed=st.integers(0, 2**32),
    order=st.sampled_from(sorted(ORDERS)),
    num_slots=st.integers(1, 3 * BATCH),
)
@settings(max_examples=300, deadline=None)
def test_every_prompt_is_trained_or_dropped_in_bounded_time(
    policy: TailPolicy, seed: int, order: str, num_slots: int
) -> None:
    trainer, rng = Trainer(policy), Random(seed)
    for _ in range(30):
        run_round(trainer, rng, order, num_slots)
        now = trainer.queue.statistics()
        assert now.conserved
        assert now.in_flight <= policy.capacity
        assert now.taken == BATCH * trainer.step
    ends = {uid: trainer.ended.get(uid, trainer.step) for uid in trainer.admitted}
    assert max(ends[uid] - step + 1 for uid, step in trainer.admitted.items()) <= (policy.max_steps or 0)
