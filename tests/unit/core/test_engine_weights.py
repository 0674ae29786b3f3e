"""An update that nobody waits for any more has failed, and an engine is used only with whole weights."""

from __future__ import annotations

import pytest

from partial_rollout.core.engine_weights import EngineWeights, Weights
from partial_rollout.errors import EngineDead


def test_requests_may_come_while_an_update_is_under_way_and_the_gate_stays_closed() -> None:
    weights = EngineWeights()
    weights.begun("weight update 2")
    weights.require_whole("replica 0")
    with pytest.raises(EngineDead, match="replica 0 must not be used, weight update 2 has not ended"):
        weights.require_settled("replica 0")
    weights.succeeded()
    weights.require_settled("replica 0")
    assert weights.given_up() is None


def test_an_update_that_is_given_up_has_failed() -> None:
    weights = EngineWeights()
    weights.begun("weight update 2")
    assert weights.given_up() == "weight update 2 has not ended"
    assert weights.state is Weights.BROKEN
    with pytest.raises(EngineDead, match="half an update"):
        weights.require_whole("replica 0")


def test_the_late_failure_of_an_update_that_was_given_up_does_not_break_the_relaunched_engine() -> None:
    weights = EngineWeights()
    weights.begun("weight update 2")
    weights.given_up()
    weights.relaunched()
    weights.failed("weight update 2 failed: the engine died")
    assert weights.state is Weights.INITIAL
    weights.begun("weight update 3")
    weights.failed("weight update 3 failed")
    assert weights.state is Weights.BROKEN
