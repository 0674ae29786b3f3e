"""One training rank sends the tensors that it gathers to the workers of several engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import zmq
from ray.exceptions import RayError

from partial_rollout.errors import PartialRolloutError, WeightPeerLost
from partial_rollout.weights.sender import WeightSender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from partial_rollout.weights.line import Patience

ENGINE_FAILURES = (PartialRolloutError, RayError, zmq.ZMQError, OSError, RuntimeError, ValueError)
"""What an update can raise because the engine's end failed, with errors of the socket and the GPU."""


class FanOut:
    """Sends every tensor to all workers of all engines; an engine that fails is left out, and the others go on.

    The senders have been entered, and share `patience`. While this rank waits for a silent engine, the healthy engines
    wait for this rank; `patience` keeps that wait so short that they do not fail too, even with several silent engines.
    """

    def __init__(self, senders: Mapping[int, Sequence[WeightSender]], patience: Patience) -> None:
        """Send by these senders, by the replica's rank."""
        self._senders, self._patience = dict(senders), patience
        self.failures: dict[int, Exception] = {}
        """Why engines were left out, by the replica's rank."""

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send all; returns when every engine has confirmed or failed.

        All tensors are gathered in any case, since the other ranks meet this one in the gathering.

        Raises:
            Exception: what `weights` raised; all engines are told.
        """
        try:
            self._each(WeightSender.connect)
            with torch.no_grad():
                for name, tensor in weights:
                    self._each(lambda sender, name=name, tensor=tensor: sender.put(name, tensor))
            self._each(WeightSender.end)
            self._each(WeightSender.confirm)
        except Exception as error:
            for rank in list(self._senders):
                self._drop(rank, error)
            raise
        for rank in list(self._senders):
            self._drop(rank, None)

    def _each(self, action: Callable[[WeightSender], object]) -> None:
        self._patience.has_lost = False
        for rank, senders in list(self._senders.items()):
            try:
                for sender in senders:
                    action(sender)
            except ENGINE_FAILURES as error:
                self.failures[rank] = error
                self._patience.has_lost |= isinstance(error, WeightPeerLost)
                self._drop(rank, error)

    def _drop(self, rank: int, error: Exception | None) -> None:
        """Close the engine's connections; its workers are told of an error."""
        for sender in self._senders.pop(rank):
            sender.__exit__(type(error) if error else None, error, None)
