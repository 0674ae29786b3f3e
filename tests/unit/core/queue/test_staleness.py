"""The staleness bound: nothing older is trained, nothing is lost, and an update waits for no more than it must."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.staleness import Ages, StalenessBound, make_bound
from partial_rollout.core.queue.tail import Partial, Reorder, TailPolicy, Wait, make_policy
from partial_rollout.errors import ConfigError
from partial_rollout.settings.block import PartialRolloutConfig, TailConfig
from tests.round_driver import BATCH, Trainer, summaries
from tests.unit.core.queue.queues import ManualClock, claim_all, prompts

if TYPE_CHECKING:
    from partial_rollout.types import TakeResult


@pytest.mark.parametrize("past", ["train", "mask", "drop", "restart", "finish"])
def test_each_way_past_the_bound_is_one_of_its_own_and_none_without_a_bound(past: str) -> None:
    bound = StalenessBound(1, past)
    masks, discards = past != "train", past in ("drop", "restart")
    assert (bound.masks, bound.discards, bound.finishes) == (masks, discards, past == "finish")
    without = StalenessBound(None, past)
    assert (without.masks, without.discards, without.finishes) == (False, False, False)


# ---- who has to finish before an update ----


@pytest.mark.parametrize(
    ("begun", "due"),
    [
        ({}, 0),
        ({5: 9}, 1),
        ({5: 8}, 0),
        ({4: 4, 5: 4}, 0),
        ({4: 5, 5: 3}, 1),
        ({4: 5, 5: 5}, 2),
        ({3: 1, 5: 4}, 1),
        ({1: 2, 4: 4}, 2),
        ({5: 5, 4: 5}, 2),
    ],
    ids=[
        "none",
        "fresh, too many",
        "fresh",
        "just room",
        "old ones",
        "both",
        "at the bound",
        "past it already",
        "both, the older ones last",
    ],
)
def test_what_later_batches_have_no_room_for_is_due(begun: dict[int, int], due: int) -> None:
    """Weights of version 5 are trained and tokens may be 2 versions old: those of 5 fit two more batches, of 4 one."""
    ages = Ages()
    for version, num in begun.items():
        for _ in range(num):
            ages.begin(version)
    ages.version = 5
    assert ages.num_due(StalenessBound(2, "finish"), BATCH) == due


def test_a_prompt_that_begins_now_counts_from_the_weights_of_now() -> None:
    ages = Ages()
    ages.version = 3
    assert ages.begin(None) == 3
    ages.version = 4
    assert ages.num_due(StalenessBound(1, "finish"), BATCH) == 1
    ages.end(3)
    assert ages.num_due(StalenessBound(1, "finish"), BATCH) == 0


# ---- what becomes of the rest ----


def started(past: str, *, max_staleness: int = 1) -> Trainer:
    """p0 to p7 are claimed under version 0, and p0 to p3 are trained."""
    trainer = Trainer(Partial(2 * BATCH), StalenessBound(max_staleness, past))
    trainer.begin()
    trainer.claim()
    trainer.finish("p0", "p1", "p2", "p3")
    assert len(trainer.take().groups) == BATCH
    return trainer


def next_version(trainer: Trainer, *finished: str) -> None:
    """New weights generate; fresh prompts take the free places, and some of them finish."""
    trainer.queue.version += 1
    trainer.begin()
    trainer.claim()
    for uid in finished:
        trainer.queue.finish(trainer.claims.pop(uid), summaries(uid, trainer.queue.version))


def test_finish_makes_the_batch_wait_for_what_would_be_too_old_in_the_next() -> None:
    trainer = started("finish")
    next_version(trainer, "p8", "p9", "p10", "p11")
    assert trainer.queue.num_due(BATCH) == 4
    trainer.finish("p4", "p5", "p6")
    assert trainer.take().groups == ()
    trainer.finish("p7")
    assert [group.uid for group in trainer.take().groups] == ["p4", "p5", "p6", "p7"]


def test_drop_lets_a_done_group_go_that_is_too_old_for_the_next_batch_and_counts_it() -> None:
    trainer = started("drop", max_staleness=0)
    trainer.finish("p4")  # after the batch was taken, by the weights that are being replaced
    next_version(trainer, "p8", "p9", "p10")
    trainer.queue.expire(trainer.claims.pop("p5"))
    assert trainer.take().groups == ()
    trainer.queue.finish(trainer.claims.pop("p6"), summaries("p6", 1))
    result = trainer.take()
    assert {group.uid for group in result.groups} == {"p6", "p8", "p9", "p10"}
    assert [group.uid for group in result.expired] == ["p4"]
    assert trainer.queue.statistics().done == 1  # until its rows are cleared
    assert trainer.queue.discard_expired() == ["p4"]
    assert trainer.queue.discard_expired() == []
    assert trainer.queue.statistics().dropped == {"too_stale": 2}
    assert trainer.queue.statistics().conserved


def test_what_a_batch_leaves_over_and_the_next_may_not_train_expires_with_it() -> None:
    trainer = Trainer(Partial(2 * BATCH), StalenessBound(0, "drop"))
    trainer.begin()
    trainer.claim()
    trainer.finish("p0", "p1", "p2", "p3", "p4")
    assert [group.uid for group in trainer.take().expired] == ["p4"]


def test_drop_lets_an_ongoing_prompt_that_is_too_old_go_at_once() -> None:
    trainer = started("drop")
    assert trainer.queue.expire(trainer.claims.pop("p4")) is False
    assert trainer.queue.statistics().dropped == {"too_stale": 1}


def test_restart_gives_a_prompt_back_until_its_attempts_are_used_up() -> None:
    trainer = started("restart")
    assert trainer.queue.expire(trainer.claims.pop("p4"))
    assert trainer.queue.statistics().restarted == 1
    assert trainer.claim() == ["p4"]
    assert not trainer.queue.expire(trainer.claims.pop("p4"))
    assert trainer.queue.statistics().dropped == {"too_stale": 1}


def test_restarts_and_failures_have_a_count_each_and_both_are_in_a_checkpoint() -> None:
    trainer = started("restart")
    assert trainer.queue.expire(trainer.claims.pop("p4"))
    trainer.claim()
    assert trainer.claims["p4"].attempt == 2
    assert trainer.queue.fail(trainer.claims.pop("p4"))
    snapshot = trainer.queue.snapshot()
    assert (snapshot.restarts, snapshot.failures) == ({"p4": 1}, {"p4": 1})
    trainer.restart()
    now = trainer.queue.statistics()
    assert (now.restarted, now.failed_attempts) == (1, 1)
    assert "p4" in trainer.claim()
    assert not trainer.queue.expire(trainer.claims.pop("p4"))


def test_a_done_group_that_is_restarted_begins_again_ahead_of_fresh_ones() -> None:
    trainer = started("restart", max_staleness=0)
    trainer.finish("p4")
    next_version(trainer, "p8", "p9", "p10")
    trainer.queue.finish(trainer.claims.pop("p5"), summaries("p5", 1))
    assert [group.uid for group in trainer.take().expired] == ["p4"]
    assert trainer.queue.discard_expired() == []
    trainer.begin()
    assert trainer.claim()[0] == "p4"
    assert trainer.queue.statistics().restarted == 1


def test_the_oldest_tokens_are_trained_first() -> None:
    trainer = Trainer(Partial(2 * BATCH), StalenessBound(9, "mask"))
    trainer.begin()
    trainer.claim()
    for uid, version in [("p0", 3), ("p1", 2), ("p2", 2), ("p3", 1), ("p4", 3), ("p5", 0)]:
        trainer.queue.finish(trainer.claims.pop(uid), summaries(uid, version))
    assert [group.uid for group in trainer.take().groups] == ["p5", "p3", "p1", "p2"]


def test_a_round_does_not_wait_for_prompts_that_it_defers() -> None:
    """A later round resumes these as its policy says, which the start has compared with the bound."""
    queue = PromptQueue(Reorder(BATCH, 2 * BATCH, max_deferrals=3), 2, ManualClock(), StalenessBound(0, "finish"))
    queue.admit(prompts(*(f"p{number}" for number in range(2 * BATCH)), n=1))
    queue.begin_round()
    for claim in claim_all(queue)[:BATCH]:
        queue.finish(claim, summaries(claim.uid, 0))
    assert queue.num_due(BATCH) == 0
    assert len(queue.take(BATCH).groups) == BATCH


def test_ages_survive_a_restart() -> None:
    trainer = started("finish")
    assert trainer.queue.snapshot().begun == dict.fromkeys(("p4", "p5", "p6", "p7"), 0)
    trainer.restart()
    next_version(trainer)
    assert trainer.queue.num_due(BATCH) == 4
    trainer.queue.give_back(trainer.claims.pop("p4"))  # its tokens are gone
    assert trainer.queue.num_due(BATCH) == 3


def test_a_round_of_a_restarted_run_starts_another_for_each_that_was_too_old_in_the_checkpoint() -> None:
    """p4 to p7 go on from tokens of version 0, and now a batch may contain none of another version than its own."""
    trainer = started("drop")
    trainer.restart(Wait(BATCH), StalenessBound(0, "drop"))
    trainer.queue.version = 1
    trainer.begin()
    trainer.claim()
    trainer.finish("p4", "p5", "p6", "p7")
    result = trainer.take()
    assert (len(result.groups), result.num_missing) == (0, BATCH)
    trainer.admit(BATCH)
    fresh = trainer.claim()
    assert len(fresh) == BATCH
    for uid in fresh:
        trainer.queue.finish(trainer.claims.pop(uid), summaries(uid, 1))
    assert [group.uid for group in trainer.take().groups] == fresh


def test_a_group_that_must_be_in_the_batch_and_is_too_old_is_not_waited_for() -> None:
    trainer = Trainer(Reorder(BATCH, BATCH + 2, 1))
    trainer.begin()
    trainer.claim()
    trainer.finish("p0", "p1", "p2", "p3")
    trainer.take()
    trainer.restart(bound=StalenessBound(4, "drop"))
    trainer.queue.version = 6
    assert trainer.begin().num_required == 2
    for uid in trainer.claim():
        trainer.queue.finish(trainer.claims.pop(uid), summaries(uid, 0 if uid in ("p4", "p5") else 6))
    result = trainer.take()
    assert {group.uid for group in result.expired} == {"p4", "p5"}
    assert len(result.groups) == BATCH


def test_only_the_first_claim_since_a_restart_goes_on_from_saved_tokens() -> None:
    """A second attempt begins afresh, whichever worker gets it."""
    trainer = started("restart")
    assert not any(claim.goes_on for claim in trainer.claims.values())
    trainer.restart()
    trainer.restart()  # unclaimed, they are in the next checkpoint too
    trainer.begin()
    trainer.claim()
    assert {uid for uid, claim in trainer.claims.items() if claim.goes_on} == {"p4", "p5", "p6", "p7"}
    trainer.queue.expire(trainer.claims.pop("p4"))
    trainer.queue.fail(trainer.claims.pop("p5"))
    trainer.queue.give_back(trainer.claims.pop("p6"))
    trainer.claim()
    assert [trainer.claims[uid].goes_on for uid in ("p4", "p5", "p6", "p7")] == [False, False, False, True]


# ---- contradictions ----


@pytest.mark.parametrize(
    ("tail", "factor", "message"),
    [
        ({"policy": "partial", "past_staleness": "finish", "max_staleness": 1}, 3.0, "prefetch_factor to 2"),
        (
            {"policy": "reorder", "past_staleness": "finish", "max_staleness": 5},
            2.0,
            "at least 11; raise it",
        ),
        ({"policy": "reorder", "past_staleness": "drop", "max_staleness": 10}, 2.0, "past_staleness=train"),
    ],
)
def test_a_bound_that_the_policy_passes_by_design_is_refused(tail: dict, factor: float, message: str) -> None:
    config = PartialRolloutConfig(tail=TailConfig(**tail), prefetch_factor=factor)
    with pytest.raises(ConfigError, match=message):
        make_bound(config.tail, make_policy(config, 8), 8)


@pytest.mark.parametrize(
    "tail",
    [
        {"past_staleness": "finish", "max_staleness": 1},
        {"past_staleness": "drop", "max_staleness": 0},
        {"policy": "wait", "past_staleness": "restart", "max_staleness": 0},
        {"policy": "reorder", "past_staleness": "finish", "max_staleness": 11},
        {"policy": "reorder", "max_staleness": 0},
    ],
)
def test_a_bound_that_can_be_kept_is_allowed(tail: dict) -> None:
    config = PartialRolloutConfig(tail=TailConfig(**tail))
    bound = make_bound(config.tail, make_policy(config, 8), 8)
    assert bound == StalenessBound(config.tail.max_staleness, config.tail.past_staleness)


def test_what_loses_its_tokens_past_the_bound_needs_no_room_in_later_batches() -> None:
    config = PartialRolloutConfig(tail=TailConfig(past_staleness="drop", max_staleness=1), prefetch_factor=3.0)
    assert make_bound(config.tail, make_policy(config, 8), 8).discards


# ---- nothing is older than allowed ----


MOST_REPORTS = 400
"""A batch needs far fewer."""


class Generating(Trainer):
    """Tokens have versions. Workers are random, and their reports may come while the weights are sent."""

    def __init__(self, policy: TailPolicy, bound: StalenessBound, rng: Random, *, newest_first: bool) -> None:
        super().__init__(policy, bound)
        self.rng, self.newest_first = rng, newest_first
        self.oldest: dict[str, int] = {}
        """Version of the oldest token of every unfinished prompt that has one."""

    def end(self, uid: str) -> None:
        version = self.oldest.pop(uid, self.queue.version)
        self.queue.finish(self.claims.pop(uid), summaries(uid, version))

    def fail(self, uid: str) -> None:
        self.oldest.pop(uid, None)
        super().fail(uid)

    def some(self) -> list[str]:
        return self.rng.sample(sorted(self.claims), min(2, len(self.claims)))

    def round(self) -> TakeResult:
        """Groups are claimed, generate, fail and finish one by one until the batch is taken."""
        self.begin()
        for _ in range(MOST_REPORTS):
            if (result := self.take()).groups:
                return result
            self.admit(result.num_missing)
            self.claim(1 + self.rng.randrange(2 * BATCH))
            self.oldest = dict.fromkeys(self.some(), self.queue.version) | self.oldest
            uid = max(
                self.claims, key=lambda uid: self.claims[uid].claim_id if self.newest_first else self.rng.random()
            )
            self.fail(uid) if self.rng.random() < 0.1 else self.end(uid)
        raise AssertionError(f"no batch after {MOST_REPORTS} reports")

    def update(self) -> None:
        """Workers end what is too old, and some claim or finish while the weights are sent."""
        bound = self.queue.bound
        self.queue.discard_expired()
        self.claim(self.rng.randrange(BATCH))
        for uid in self.some() if self.rng.random() < 0.3 else []:
            self.end(uid)
        too_old = [uid for uid, version in self.oldest.items() if version < bound.oldest(self.queue.version + 1)]
        for uid in too_old if bound.discards else []:
            if uid in self.claims:
                self.queue.expire(self.claims.pop(uid))
                del self.oldest[uid]
        if self.rng.random() < 0.1:
            self.restart()
        self.queue.version += 1


@given(
    past=st.sampled_from(["drop", "restart", "finish"]),
    max_staleness=st.integers(0, 3),
    prefetch=st.integers(BATCH, 4 * BATCH),
    seed=st.integers(0, 2**32),
    newest_first=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_no_token_past_the_bound_is_trained(
    past: str, max_staleness: int, prefetch: int, seed: int, newest_first: bool
) -> None:
    if past == "finish":
        prefetch = min(prefetch, (max_staleness + 1) * BATCH)
    bound = StalenessBound(max_staleness, past)
    trainer = Generating(Partial(prefetch), bound, Random(seed), newest_first=newest_first)
    for _ in range(20):
        result, version, now = trainer.round(), trainer.queue.version, trainer.queue.statistics()
        assert len(result.groups) == BATCH
        assert min(group.min_version for group in result.groups) >= version - max_staleness
        assert now.conserved
        assert now.taken == BATCH * trainer.step
        assert past != "finish" or (now.restarted, "too_stale" in now.dropped) == (0, False)
        trainer.update()
        assert trainer.queue.statistics().conserved


POLICIES = [
    (Partial(2 * BATCH), StalenessBound(1, "drop")),
    (Partial(3 * BATCH), StalenessBound(0, "restart")),
    (Wait(BATCH), StalenessBound(0, "drop")),
    (Wait(BATCH), StalenessBound(0, "restart")),
    (Reorder(BATCH, BATCH + 2, 1), StalenessBound(4, "drop")),
    (Reorder(BATCH, 2 * BATCH, 2), StalenessBound(8, "restart")),
]


@given(seed=st.integers(0, 2**32), newest_first=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_policy_goes_on_from_the_checkpoint_of_any_other(seed: int, newest_first: bool) -> None:
    rng = Random(seed)
    trainer = Generating(*rng.choice(POLICIES), rng, newest_first=newest_first)
    for _ in range(20):
        result, version, now = trainer.round(), trainer.queue.version, trainer.queue.statistics()
        assert len(result.groups) == BATCH
        assert min(group.min_version for group in result.groups) >= version - trainer.queue.bound.max_staleness
        assert now.conserved
        trainer.update()
        if rng.random() < 0.2:
            trainer.restart(*rng.choice(POLICIES))
