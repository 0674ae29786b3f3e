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
    """

    def __init__(self) -> None:
        """An engine that was just launched holds whole weights: those of its checkpoint."""
        self.state = Weights.WHOLE
        self.failure: str | None = None
        """Why the last update failed; None once one has succeeded."""
        self._begun: str | None = None

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
            raise EngineDead(f"{engine} must not be used, {self._begun} has not ended")

    def begun(self, update: str) -> None:
        """An update is under way; requests may wait for its end."""
        self._begun = update

    def failed(self, reason: str) -> None:
        """An update did not arrive whole; once the engine was relaunched for it, a late report changes nothing."""
        if self.state is not Weights.INITIAL or self._begun is not None:
            self.state, self.failure, self._begun = Weights.BROKEN, reason, None

    def given_up(self) -> str | None:
        """Why the last update failed; one that is still under way has, because whoever asks does not wait for it."""
        if self._begun is not None:
            self.failed(f"{self._begun} has not ended")
        return self.failure

    def succeeded(self) -> None:
        """An update arrived whole."""
        self.state, self.failure, self._begun = Weights.WHOLE, None, None

    def relaunched(self) -> None:
        """The engine was started again; the weights it started with are old, or none at all."""
        self.state, self._begun = Weights.INITIAL, None
