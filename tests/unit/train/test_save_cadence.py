"""When a run saves by time, and when it has no room to."""

from __future__ import annotations

import pytest

from partial_rollout.settings.memory import GIB
from partial_rollout.train.save_cadence import SaveCadence, lack_of_room

MINUTES = 20.0


class Clock:
    """Shows what the test sets, in minutes."""

    minutes = 7.0

    def __call__(self) -> float:
        return 60.0 * self.minutes


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cadence(clock: Clock) -> SaveCadence:
    cadence = SaveCadence(MINUTES, clock)
    clock.minutes = 30.0  # the start took 23 minutes
    cadence.begin(0)
    return cadence


def test_a_step_is_due_when_the_minutes_since_the_last_save_have_passed(cadence: SaveCadence, clock: Clock) -> None:
    due: list[float] = []
    for step, minutes in enumerate(range(31, 80, 3), 1):
        clock.minutes = minutes
        if cadence.is_due(step, is_last=False):
            due.append(minutes)
            cadence.saved(step, 6.0)
    assert due == [52, 73]


@pytest.mark.parametrize(
    ("saved", "seconds", "due"),
    [
        pytest.param(49.0, 6.0, 69.0, id="a save for another reason puts the next one off"),
        pytest.param(50.0, 120.0, 90.0, id="saving takes no more than a twentieth of the time"),
    ],
)
def test_a_save_decides_when_the_next_one_is_due(
    cadence: SaveCadence, clock: Clock, saved: float, seconds: float, due: float
) -> None:
    clock.minutes = saved
    cadence.saved(4, seconds)
    clock.minutes = due - 1.0
    assert not cadence.is_due(9, is_last=False)
    clock.minutes = due
    assert cadence.is_due(9, is_last=False)


def test_the_last_step_is_due_in_a_run_that_has_saved(cadence: SaveCadence, clock: Clock) -> None:
    assert not cadence.is_due(3, is_last=True)
    clock.minutes = 50.0
    cadence.saved(8, 6.0)
    assert not cadence.is_due(8, is_last=True)  # verl has saved it
    assert cadence.is_due(9, is_last=True)


def test_the_last_step_is_due_in_a_run_that_goes_on_from_a_checkpoint(cadence: SaveCadence) -> None:
    """Short as it is: otherwise its weights would be those of the checkpoint, and the steps since then lost."""
    cadence.begin(8)
    assert not cadence.is_due(8, is_last=True)
    assert not cadence.is_due(9, is_last=False)
    assert cadence.is_due(9, is_last=True)


def test_what_had_no_room_is_tried_again_later(cadence: SaveCadence, clock: Clock) -> None:
    clock.minutes = 50.0
    assert cadence.is_due(8, is_last=False)
    cadence.put_off()
    clock.minutes = 51.0
    assert not cadence.is_due(9, is_last=False)
    clock.minutes = 70.0
    assert cadence.is_due(30, is_last=False)


def test_without_minutes_nothing_is_ever_due(clock: Clock) -> None:
    cadence = SaveCadence(None, clock)
    cadence.begin(0)
    clock.minutes = 9999.0
    cadence.saved(3, 1.0)
    assert not cadence.is_due(4, is_last=True)


@pytest.mark.parametrize(
    ("num_bytes", "disk", "memory", "lack"),
    [
        (3 * GIB, 2 * GIB, 9 * GIB, "the disk has 2.0 GiB free"),
        (3 * GIB, 9 * GIB, 1 * GIB, "memory, through which it goes, has 1.0 GiB free"),
        (3 * GIB, 3 * GIB, 3 * GIB, ""),
        (None, 0, 0, ""),
    ],
)
def test_room_is_that_of_disk_and_memory(num_bytes: int | None, disk: int, memory: int, lack: str) -> None:
    told = lack_of_room(num_bytes, disk, memory)
    assert told.endswith(lack)
    assert bool(told) == bool(lack)
