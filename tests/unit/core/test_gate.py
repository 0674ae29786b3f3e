from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from partial_rollout.core.gate import TRANSITIONS, Gate, GateEvent, GateState, Verdict
from partial_rollout.errors import IllegalTransition

EVENTS = {GateEvent.CLOSE: Gate.close, GateEvent.DRAINED: Gate.drained, GateEvent.OPEN: Gate.open}


def gate_in(state: GateState) -> Gate:
    gate = Gate()
    if state is not GateState.OPEN:
        gate.close()
    if state is GateState.CLOSED:
        gate.drained()
    return gate


@pytest.mark.parametrize("state", GateState)
@pytest.mark.parametrize("event", GateEvent)
def test_every_pair_of_state_and_event_does_what_the_table_says(state, event):
    gate = gate_in(state)
    if (state, event) in TRANSITIONS:
        EVENTS[event](gate)
        assert gate.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=rf"{state.value}.*{event.value}"):
            EVENTS[event](gate)
        assert gate.state is state


def test_a_waiter_parked_through_an_opening_and_a_closing_does_not_pass():
    gate = gate_in(GateState.CLOSED)
    ticket = gate.park("a")
    gate.open()
    gate.close()
    assert not gate.may_pass(ticket)
    with pytest.raises(IllegalTransition, match="'a' may not be admitted"):
        gate.admit(ticket, 1.0)


def test_a_request_is_on_its_way_from_its_admission_until_it_has_arrived_or_left():
    gate = Gate()
    early, gone = gate.park("a"), gate.park("b")
    assert not gate.is_arriving(early)
    for ticket in (early, gone):
        gate.admit(ticket, 0.0)
        assert gate.is_arriving(ticket)
    gate.arrived(early)
    gate.leave(gone)
    assert not gate.is_arriving(early)
    assert not gate.is_arriving(gone)


def test_drained_with_requests_inside_is_refused_and_names_them():
    gate = Gate()
    gate.admit(gate.park("a"), 0.0)
    gate.close()
    with pytest.raises(IllegalTransition, match=r"\['a'\]"):
        gate.drained()


def test_weights_may_come_after_a_drain_only_and_requests_not_during_one():
    gate = Gate()
    ticket = gate.park("a")
    gate.admit(ticket, now_s=0.0)
    gate.require_openable()
    with pytest.raises(IllegalTransition, match="gate open: a drain has to come first"):
        gate.require_drained()
    gate.close()
    for not_now in (gate.require_drained, gate.require_openable):
        with pytest.raises(IllegalTransition, match="gate draining"):
            not_now()
    gate.leave(ticket)
    gate.drained()
    gate.require_drained()
    gate.require_openable()


def test_reject_lasts_until_the_gate_moves():
    gate = gate_in(GateState.CLOSED)
    ticket = gate.park("a")
    assert gate.reject() == 1
    assert gate.verdict(ticket) is Verdict.REJECT
    gate.close()
    assert gate.verdict(ticket) is Verdict.WAIT
    gate.reject()
    gate.open()
    assert gate.verdict(ticket) is Verdict.PASS


def test_the_same_request_id_may_be_inside_twice():
    gate = Gate()
    first, second = gate.park("a"), gate.park("a")
    gate.admit(first, 0.0)
    gate.admit(second, 0.0)
    gate.leave(first)
    assert gate.in_flight_ids() == ["a"]


def test_statistics_count_and_tell_the_age_of_the_oldest_admitted_request():
    gate = Gate()
    gate.admit(gate.park("a"), 2.0)
    gate.close()
    gate.park("b")
    gate.park("c")
    statistics = gate.statistics(10.0)
    assert statistics.oldest_in_flight_s == 8.0
    assert (statistics.in_flight, statistics.arriving, statistics.parked) == (1, 1, 2)


@pytest.mark.parametrize("call", [Gate.leave, Gate.arrived, Gate.unpark, Gate.verdict])
def test_a_ticket_used_twice_is_refused(call):
    gate = Gate()
    ticket = gate.park("a")
    gate.admit(ticket, 0.0)
    gate.arrived(ticket)
    gate.leave(ticket)
    with pytest.raises(IllegalTransition, match="'a'"):
        call(gate, ticket)


@given(st.lists(st.sampled_from(sorted(GateEvent)), max_size=30))
def test_openings_of_a_closed_gate_are_counted(events):
    gate, openings = Gate(), 0
    for event in events:
        before = gate.state
        if (before, event) in TRANSITIONS:
            EVENTS[event](gate)
            openings += before is GateState.CLOSED and gate.state is GateState.OPEN
        assert gate.openings == openings


class Traffic(RuleBasedStateMachine):
    """Any order of requests and orders; the model is three sets."""

    waiting = Bundle("waiting")
    inside = Bundle("inside")

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.parked: set[int] = set()
        self.entered: set[int] = set()
        self.arriving: set[int] = set()
        self.rejecting = False

    @rule(target=waiting, request_id=st.sampled_from("abc"))
    def park(self, request_id):
        ticket = self.gate.park(request_id)
        self.parked.add(ticket.number)
        return ticket

    @rule(target=inside, ticket=consumes(waiting))
    def try_to_enter(self, ticket):
        if self.gate.may_pass(ticket):
            assert self.gate.state is GateState.OPEN
            assert not self.rejecting
            self.gate.admit(ticket, 0.0)
            self.entered.add(ticket.number)
            self.arriving.add(ticket.number)
        else:
            self.gate.unpark(ticket)
        self.parked.remove(ticket.number)
        return ticket

    @rule(ticket=inside)
    def arrive(self, ticket):
        if ticket.number in self.arriving:
            self.gate.arrived(ticket)
            self.arriving.remove(ticket.number)

    @rule(ticket=consumes(inside))
    def leave(self, ticket):
        if ticket.number in self.entered:
            self.gate.leave(ticket)
            self.entered.remove(ticket.number)
            self.arriving.discard(ticket.number)

    @rule()
    def close(self):
        self.gate.close()
        self.rejecting = False

    @rule()
    def reject(self):
        assert self.gate.reject() == len(self.parked)
        self.rejecting = True

    @precondition(lambda self: self.gate.state is GateState.DRAINING)
    @rule()
    def drained(self):
        if self.entered:
            with pytest.raises(IllegalTransition):
                self.gate.drained()
        else:
            self.gate.drained()

    @precondition(lambda self: self.gate.state is not GateState.DRAINING)
    @rule()
    def open(self):
        self.gate.open()
        self.rejecting = False

    @invariant()
    def counts_match(self):
        statistics = self.gate.statistics(0.0)
        assert statistics.parked == len(self.parked)
        assert statistics.in_flight == len(self.entered) == self.gate.num_in_flight
        assert statistics.arriving == len(self.arriving) == self.gate.num_arriving

    @invariant()
    def a_closed_gate_has_nobody_inside(self):
        assert self.gate.state is not GateState.CLOSED or not self.entered


TestTraffic = Traffic.TestCase
