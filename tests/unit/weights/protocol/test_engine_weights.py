"""An update that nobody waits for any more has failed, and an engine is used only with whole weights."""

from __future__ import annotations

import pytest

from partial_rollout.errors import EngineDead
from partial_rollout.weights.protocol.engine_weights import EngineWeights, Weights


def test_requests_may_come_while_an_update_is_under_way_and_the_gate_stays_closed() -> None:
    weights = EngineWeights()
    weights.begun(2, "weight update 2")
    weights.require_whole("replica 0")
    with pytest.raises(EngineDead, match="replica 0 must not be used, weight update 2 has not ended"):
        weights.require_settled("replica 0")
    assert weights.succeeded(2)
    weights.require_settled("replica 0")
    assert weights.given_up() is None


def test_an_update_that_is_given_up_has_failed() -> None:
    weights = EngineWeights()
    weights.begun(2, "weight update 2")
    assert weights.given_up() == "weight update 2 has not ended"
    assert weights.state is Weights.BROKEN
    for require in (weights.require_whole, weights.require_settled):
        with pytest.raises(EngineDead, match="half an update"):
            require("replica 0")


def test_the_late_failure_of_an_update_that_was_given_up_does_not_break_the_relaunched_engine() -> None:
    weights = EngineWeights()
    weights.begun(2, "weight update 2")
    weights.given_up()
    weights.relaunched()
    weights.failed("weight update 2 failed: the engine died", 2)
    assert weights.state is Weights.INITIAL
    weights.begun(3, "weight update 3")
    weights.failed("weight update 3 failed", 3)
    assert weights.state is Weights.BROKEN


def test_the_late_success_of_an_update_that_was_given_up_makes_nothing_whole() -> None:
    weights = EngineWeights()
    weights.begun(2, "weight update 2")
    weights.failed("rank 1 lost its worker", 2)
    assert not weights.succeeded(2)
    assert weights.state is Weights.BROKEN
    weights.relaunched()
    assert not weights.succeeded(2)
    assert weights.state is Weights.INITIAL
    weights.begun(3, "weight update 3")
    assert not weights.succeeded(2)
    assert weights.succeeded(3)


def test_an_update_can_be_given_up_before_its_call_and_after_its_success_but_not_after_the_next_one() -> None:
    weights = EngineWeights()
    weights.failed("rank 1 never reached its worker", 1)
    with pytest.raises(EngineDead, match="rank 1 never reached"):
        weights.require_receivable("replica 0")
    weights.relaunched()
    weights.require_receivable("replica 0")
    weights.failed("said twice", 1)
    assert weights.state is Weights.INITIAL
    weights.begun(2, "weight update 2")
    assert weights.succeeded(2)
    weights.failed("the confirmation was lost", 2)
    assert weights.given_up() == "the confirmation was lost"
    weights.relaunched()
    weights.begun(3, "weight update 3")
    weights.failed("the confirmation was lost", 2)
    assert weights.succeeded(3)
    assert weights.given_up() is None


def test_what_fails_beside_an_update_counts_also_after_a_relaunch() -> None:
    weights = EngineWeights()
    weights.begun(1, "weight update 1")
    weights.failed("NaN", 1)
    weights.relaunched()
    weights.failed("it did not wake up")
    assert weights.state is Weights.BROKEN
    assert weights.given_up() == "it did not wake up"


def test_the_late_failure_of_an_update_says_nothing_where_the_engine_has_failed_beside_it() -> None:
    weights = EngineWeights()
    weights.begun(2, "weight update 2")
    weights.failed("it did not wake up")
    weights.relaunched()
    weights.failed("weight update 2 failed: the engine died", 2)
    assert weights.state is Weights.INITIAL


def test_a_report_of_an_update_before_the_one_under_way_says_nothing() -> None:
    weights = EngineWeights()
    weights.begun(4, "weight update 4")
    weights.failed("rank 1 gave weight update 3 up", 3)
    assert weights.state is Weights.WHOLE
    assert weights.succeeded(4)
