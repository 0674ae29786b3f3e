"""The mean over time of a value that holds between changes."""

from __future__ import annotations


class TimeWeightedMean:
    """Mean of a value that holds between changes, e.g. running requests; times in seconds, never going back."""

    def __init__(self, now_s: float, value: float = 0.0) -> None:
        """Start measuring at `now_s`."""
        self._since_s = self._last_s = now_s
        self._value = value
        self._area = 0.0

    def change(self, delta: float, now_s: float) -> None:
        """Add `delta` to the value from `now_s` on."""
        self._advance(now_s)
        self._value += delta

    def restart(self, now_s: float) -> None:
        """Forget the past; the present value stays."""
        self._since_s = self._last_s = now_s
        self._area = 0.0

    def mean(self, now_s: float) -> float:
        """Mean since the start or the last restart; the present value if no time has passed."""
        self._advance(now_s)
        elapsed_s = self._last_s - self._since_s
        return self._area / elapsed_s if elapsed_s > 0 else self._value

    def _advance(self, now_s: float) -> None:
        if now_s < self._last_s:
            raise ValueError(f"time went back from {self._last_s} to {now_s} s")
        self._area += self._value * (now_s - self._last_s)
        self._last_s = now_s
