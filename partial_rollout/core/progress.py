"""Whether an engine stands still: it holds requests, nobody keeps it from working, and no token comes. No clock."""

from __future__ import annotations

from partial_rollout.core.deadlines import LEAST_WARN_S, WARN_SHARE

FIRST_TOKENS = 10.0
"""Until an engine has handed over its first tokens it may take so many times longer: some engines compile first."""
HALF = 0.5
"""Share of the limit by which a warning comes, however short the limit is."""


class Progress:
    """Compares an engine's token count with the one before, and knows how long the engine has taken at most.

    idle -> moving -> standing still -> moving
                                     -> stuck, after `limit_s`

    >>> progress = Progress(stall_s=30.0)
    >>> [progress.look(requests=2, tokens=tokens, now_s=now_s) for tokens, now_s in ((0, 0.0), (8, 5.0), (8, 40.0))]
    [0.0, 0.0, 35.0]
    >>> progress.limit_s
    35.0
    >>> progress.is_stuck
    True
    """

    def __init__(self, stall_s: float) -> None:
        """An engine is stuck when it stands still for `stall_s` longer than its longest pause so far."""
        self._stall_s = stall_s
        self._longest_s: float | None = None
        self._tokens = 0
        self._since_s: float | None = None
        self.stood_still_s = 0.0

    @property
    def limit_s(self) -> float:
        """How long the engine may stand still."""
        return self._stall_s * FIRST_TOKENS if self._longest_s is None else self._stall_s + self._longest_s

    @property
    def warn_s(self) -> float:
        """Time after which a warning announces the limit: a tenth of what the engine has beyond its longest pause.

        No warning comes within the first seconds, which an engine may take on a busy machine.
        """
        longest_s = self._longest_s or 0.0
        return max(longest_s + WARN_SHARE * (self.limit_s - longest_s), min(LEAST_WARN_S, HALF * self.limit_s))

    @property
    def is_stuck(self) -> bool:
        """Whether the engine has stood still for longer than it may."""
        return self.stood_still_s >= self.limit_s

    def put_off(self, seconds: float) -> None:
        """Leave out so many seconds before the next look, in which nobody took in what the engine had generated."""
        if self._since_s is not None:
            self._since_s += seconds

    def look(self, *, requests: int, tokens: int, now_s: float) -> float:
        """Tell what the engine holds and has generated in all; returns for how many seconds it has stood still.

        `requests` is 0 while the engine is paused on purpose.
        """
        if tokens != self._tokens:
            # An engine that is fast was idle at the look before, or is now, and has its first tokens all the same.
            pause_s = 0.0 if self._since_s is None else now_s - self._since_s
            self._longest_s, self._since_s = max(self._longest_s or 0.0, pause_s), None
        if not requests:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        self._tokens = tokens
        self.stood_still_s = 0.0 if self._since_s is None else now_s - self._since_s
        return self.stood_still_s
