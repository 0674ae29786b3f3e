from __future__ import annotations

import pytest

from partial_rollout.diffusion.hold import Hold, HoldState
from partial_rollout.errors import IllegalTransition


def test_it_holds_at_a_boundary_and_runs_when_released():
    hold = Hold()
    assert hold.hold("update")
    assert hold.state is HoldState.HOLDING
    hold.boundary()
    assert hold.state is HoldState.HELD
    assert hold.release("update")
    assert hold.state is HoldState.RELEASING
    hold.running()
    assert hold.state is HoldState.RUNNING


def test_until_it_runs_it_is_told_again():
    hold = Hold()
    hold.hold("update")
    hold.boundary()
    assert hold.release("update")
    assert hold.release("update")
    hold.running()
    assert not hold.release("update")


def test_one_that_is_being_released_can_be_held_again():
    hold = Hold()
    hold.hold("update")
    hold.boundary()
    hold.release("update")
    assert hold.hold("drain")
    assert hold.state is HoldState.HOLDING
    hold.boundary()
    assert hold.holders == ["drain"]


def test_the_last_holder_decides():
    hold = Hold()
    hold.hold("update")
    hold.boundary()
    assert not hold.hold("drain")
    assert not hold.release("update")
    assert hold.state is HoldState.HELD
    assert hold.holders == ["drain"]
    assert hold.release("drain")


def test_a_hold_that_never_reached_a_boundary_can_be_let_go():
    hold = Hold()
    hold.hold("update")
    assert hold.release("update")
    hold.running()
    assert not hold.release("update")


def test_a_running_engine_has_no_boundary():
    with pytest.raises(IllegalTransition, match="running: event 'boundary'"):
        Hold().boundary()


def test_one_that_is_being_released_has_no_boundary():
    hold = Hold()
    hold.hold("update")
    hold.release("update")
    with pytest.raises(IllegalTransition, match="releasing: event 'boundary'"):
        hold.boundary()


def test_only_what_was_released_runs():
    hold = Hold()
    hold.hold("update")
    with pytest.raises(IllegalTransition, match="holding: event 'running'"):
        hold.running()
