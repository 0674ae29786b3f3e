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

    def failed(self, reason: str) -> None:
        """An update did not arrive whole."""
        self.state, self.failure = Weights.BROKEN, reason

    def succeeded(self) -> None:
        """An update arrived whole."""
        self.state, self.failure = Weights.WHOLE, None

    def relaunched(self) -> None:
        """The engine was started again; the weights it started with are old, or none at all."""
        self.state = Weights.INITIAL
