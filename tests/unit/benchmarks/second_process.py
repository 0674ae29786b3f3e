"""What test_child starts."""

from __future__ import annotations

from benchmarks.child import serve, wait_for_the_end


def double(number: int) -> int:
    return 2 * number


if __name__ == "__main__":
    serve({"double": double, "stall": wait_for_the_end})
