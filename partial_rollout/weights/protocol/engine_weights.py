"""Whether what an inference engine holds as weights may be used."""

from __future__ import annotations

from enum import Enum

from partial_rollout.errors import EngineDead


class Weights(Enum):
    """What an engine holds."""

    WHOLE = "whole weights"
    BROKEN = "half an update"
    INITIAL = "what it was started with after a failed update"


class EngineWeights:
    """The weights of one engine, which generates only with whole ones.

    WHOLE -succeeded→ WHOLE,  WHOLE -failed→ BROKEN -relaunched→ INITIAL -succeeded→ WHOLE,  INITIAL -failed→ BROKEN

    A report names the number of its update, because a call that nobody waits for any more may end much later. A success
    counts while its update is under way; a failure counts until the next update begins or the engine is relaunched.

    >>> weights = EngineWeights()
    >>> weights.begun(1, "weight update 1 (version 5)")
    >>> weights.failed("the worker died", 1)
    >>> weights.require_whole("replica 0")
    Traceback (most recent call last):
        ...
    partial_rollout.errors.EngineDead: replica 0 must not be used, it holds half an update: the worker died
    >>> weights.relaunched()
    >>> weights.begun(2, "weight update 2 (version 5)")
    >>> weights.succeeded(2), weights.state.value
    (True, 'whole weights')
    """

    def __init__(self) -> None:
        """Start with whole weights: an engine that was just launched holds those of its checkpoint."""
        self.state = Weights.WHOLE
        self.failure: str | None = None
        """Why the last update failed; None once one has succeeded."""
        self._begun: tuple[int, str] | None = None
        self._last_update_number = 0
        self._settled_update_number = 0
        """Reports of updates up to this one say nothing about the engine as it is now."""

    def require_whole(self, engine: str) -> None:
        """Raise EngineDead unless the engine may generate."""
        if self.state is not Weights.WHOLE:
            raise EngineDead(f"{engine} must not be used, it holds {self.state.value}: {self.failure}")

    def require_receivable(self, engine: str) -> None:
        """Raise EngineDead unless an update may begin; after a failed one only a relaunch helps.

        vLLM takes a tensor-parallel worker's late answer to a failed call for its answer to the next one.
        """
        if self.state is Weights.BROKEN:
            raise EngineDead(f"{engine} must be relaunched before new weights: {self.failure}")

    def require_settled(self, engine: str) -> None:
        """Raise EngineDead unless the engine holds whole weights and no update is under way."""
        self.require_whole(engine)
        if self._begun is not None:
            raise EngineDead(f"{engine} must not be used, {self._begun[1]} has not ended")

    def begun(self, update_number: int, update: str) -> None:
        """Update `update_number` is under way; requests may wait for its end."""
        self._begun = update_number, update
        self._settled_update_number = max(self._settled_update_number, update_number - 1)
        self._last_update_number = update_number

    def failed(self, reason: str, update_number: int | None = None) -> None:
        """Update `update_number` did not arrive whole, or for None the engine failed beside any update."""
        if update_number is not None:
            if update_number <= self._settled_update_number:
                return
            self._last_update_number = max(self._last_update_number, update_number)
        self.state, self.failure, self._begun = Weights.BROKEN, reason, None

    def given_up(self) -> str | None:
        """Why the last update failed; an update that is still under way counts as failed: the asker does not wait."""
        if self._begun is not None:
            update_number, update = self._begun
            self.failed(f"{update} has not ended", update_number)
        return self.failure

    def succeeded(self, update_number: int) -> bool:
        """Update `update_number` arrived whole; False if it had been given up, which stays so."""
        if self._begun is None or self._begun[0] != update_number:
            return False
        self.state, self.failure, self._begun = Weights.WHOLE, None, None
        return True

    def relaunched(self) -> None:
        """The engine was started again; the weights it started with are old, or none at all."""
        self.state, self._begun, self._settled_update_number = Weights.INITIAL, None, self._last_update_number
