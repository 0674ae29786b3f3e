"""The second process of a benchmark: it answers, and neither end waits for the other for ever."""

from __future__ import annotations

import pytest

from benchmarks.child import Child

MODULE = "tests.unit.benchmarks.second_process"
END_S = 60.0


@pytest.fixture
def child():
    with Child(MODULE) as child:
        yield child
    assert child.process.poll() is not None


def test_it_answers_one_after_the_other(child):
    for number in (3, 4):
        child.ask("double", number=number)
        assert child.answer() == 2 * number


def test_an_answer_that_does_not_come_is_an_error(child):
    child.ask("stall")
    with pytest.raises(RuntimeError, match="no answer of the second process within 0 s"):
        child.answer(timeout_s=0.01)


def test_it_is_told_that_the_process_has_ended(child):
    child.ask("stall")
    child.kill()
    with pytest.raises(RuntimeError, match="the second process ended"):
        child.answer()


def test_it_ends_with_its_parent_even_while_it_waits(child):
    """Whose end closes the pipe."""
    child.ask("stall")
    child.process.stdin.close()
    assert child.process.wait(END_S) == 0
