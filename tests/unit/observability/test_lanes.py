"""Which slot of its lane each request is drawn in."""

from __future__ import annotations

from partial_rollout.observability.lanes import Bar, packed


class CountedSeconds(float):
    """Seconds that count how often they are compared."""

    num_compared = 0

    def __lt__(self, other: float) -> bool:
        CountedSeconds.num_compared += 1
        return float(self) < float(other)

    def __le__(self, other: float) -> bool:
        CountedSeconds.num_compared += 1
        return float(self) <= float(other)


def bar(start_s: float, end_s: float) -> Bar:
    return Bar("s0", start_s, end_s, 1, 8, f"p{start_s}", 0, "", 0, 4, "completed")


def test_a_bar_takes_the_first_slot_that_is_free_when_it_begins() -> None:
    bars = [bar(0, 9), bar(1, 3), bar(2, 4), bar(3, 5), bar(4, 5), bar(9, 10)]
    assert list(packed(bars).values()) == [0, 1, 2, 1, 2, 0]


def test_slots_of_many_requests_at_once_are_found_without_looking_at_all_of_them() -> None:
    CountedSeconds.num_compared = 0
    bars = [bar(float(number), CountedSeconds(10_000 + number)) for number in range(2_000)]
    assert max(packed(bars).values()) == 1_999
    assert CountedSeconds.num_compared < 2_000 * 12  # looked at one by one it would be 2 million
