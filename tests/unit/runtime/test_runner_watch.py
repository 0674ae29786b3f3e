"""The driver tells a frozen task runner from a busy one, also where it cannot hear of it for a while."""

from __future__ import annotations

import pytest

from partial_rollout.runtime.heartbeat import interval_s
from partial_rollout.runtime.runner_watch import RunnerSilence, Sign
from partial_rollout.types import Process

CLAIM_S = 300.0
LOOK_S = interval_s(CLAIM_S)
RUNNER = Process("task runner", "task runner", "10.0.0.7", 4711)


def sign(count: int) -> Sign:
    return Sign(RUNNER, count, "trained step 3")


class Driver:
    """Looks at regular intervals; `told` has what it was told, with the time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.silence = RunnerSilence(CLAIM_S, self.now_s)
        self.told: list[tuple[float, float, bool]] = []
        """Time since the beginning, seconds of silence, whether it is the end."""

    def look(self, count: int | None, for_s: float, *, by_s: float = LOOK_S) -> None:
        end_s = self.now_s + for_s
        while self.now_s < end_s:
            self.now_s += by_s
            late = self.silence.look(None if count is None else sign(count), self.now_s)
            if late is not None:
                self.told.append((self.now_s - 1000.0, late.waited_s, late.is_over))


def test_a_frozen_task_runner_is_named_after_a_tenth_of_the_time_and_given_up_once() -> None:
    driver = Driver()
    for count in range(1, 61):
        driver.look(count, LOOK_S)
    assert driver.told == []
    driver.look(60, 2 * CLAIM_S)
    ends = [told for told in driver.told if told[2]]
    assert driver.told[0] == (330.0, 30.0, False)
    assert ends == [(600.0, CLAIM_S, True)]
    assert driver.silence.sign == sign(60)


def test_one_that_freezes_before_its_first_sign_is_given_up_as_well() -> None:
    driver = Driver()
    driver.look(None, 2 * CLAIM_S)
    assert [told[0] for told in driver.told if told[2]] == [CLAIM_S]
    assert driver.silence.sign.doing == "was starting"


def test_time_in_which_nobody_could_say_counts_for_nothing() -> None:
    driver = Driver()
    driver.look(1, LOOK_S)
    for _ in range(10):
        driver.now_s += CLAIM_S / 5
        driver.silence.unknown(driver.now_s)
    driver.look(1, LOOK_S)
    assert driver.told == []


def test_a_driver_that_was_stopped_for_an_hour_calls_nobody_silent() -> None:
    driver = Driver()
    driver.look(1, LOOK_S)
    driver.now_s += 3600.0
    driver.look(1, LOOK_S)  # its signs come later
    assert driver.told == []
    driver.look(2, LOOK_S)
    assert driver.told == []


@pytest.mark.parametrize("claim_s", [10.0, 300.0])
def test_the_driver_looks_often_enough_to_warn_in_time(claim_s: float) -> None:
    assert interval_s(claim_s) <= 0.1 * claim_s / 4
