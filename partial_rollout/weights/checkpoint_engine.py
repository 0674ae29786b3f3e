"""Sends the weights of training ranks to engines on devices of their own, on this node or another one.

verl makes a checkpoint engine in every training rank and gives it the weights, tensor by tensor, as the ranks gather
them together. This one sends them straight to the engines' workers by our channel:

    every rank   gathers every tensor with the others
    rank r       PartialRolloutServer.receive_weights ──→ one call in every worker of engines r, r + R, r + 2R, ...
                 WeightSender ══ a channel for each worker: shared memory on this node, TCP to another ══→ worker

Only the sending side of verl's interface is used: the other one needs a process beside each worker of an engine, and a
further copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayError
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name

from partial_rollout.errors import InternalError, PartialRolloutError, WeightUpdateError
from partial_rollout.runtime.remote_call import answer_of
from partial_rollout.settings.derived import CHECKPOINT_ENGINE
from partial_rollout.weights.fan_out import ENGINE_FAILURES, FanOut
from partial_rollout.weights.line import TCP, Patience
from partial_rollout.weights.sender import ANSWER_SHARE, SENDER_SHARE, WeightSender
from partial_rollout.weights.transport import Transports

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence
    from concurrent.futures import Future

    from partial_rollout.weights.directory import ChannelAddress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """An engine that a rank serves."""

    replica_rank: int
    server: Any
    """Handle of the server actor that leads the engine."""
    num_workers: int


def share_targets(targets: Sequence[Target], num_ranks: int) -> list[list[Target]]:
    """The engines of each training rank: engine r is served by rank r modulo the number of ranks."""
    return [list(targets[rank::num_ranks]) for rank in range(num_ranks)]


def this_node() -> tuple[str, str]:
    """Ray's name and the address of the node on which this process runs."""
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


class _Update:
    """One update of one engine."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.call: Future[Any] | None = None

    def check(self) -> None:
        """Raise what the engine's call has raised."""
        if self.call is not None and self.call.done():
            self.call.result()


@CheckpointEngineRegistry.register(CHECKPOINT_ENGINE)  # pyright: ignore[reportAttributeAccessIssue] - a function without `self`
class ChannelCheckpointEngine(CheckpointEngine):
    """A training rank's end of the weight updates of engines on devices of their own."""

    def __init__(
        self,
        bucket_size: int,
        *,
        is_master: bool,
        timeout_s: float,
        buffer_bytes: int | None,
        encrypt: bool,
    ) -> None:
        """Take what verl gives, and what `engine_kwargs` has for this backend; verl's `bucket_size` is not used."""
        self._timeout_s, self._buffer_bytes, self._encrypt = timeout_s, buffer_bytes, encrypt
        self._targets: Sequence[Target] = ()
        self._update_number = 0

    def aim(self, targets: Sequence[Target]) -> None:
        """Send to these engines from now on."""
        self._targets = targets

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Send all weights to this rank's engines; returns when they have them as version `global_steps`.

        Blocks the actor's loop while it sends: gathering a tensor is a collective of this thread. All tensors are
        gathered, whatever becomes of the engines.

        Raises:
            WeightUpdateError: engines did not take the weights; names them.
            Exception: what `weights` raised.
        """
        self._update_number += 1
        updates = {target.replica_rank: _Update(target) for target in self._targets}
        failures: dict[int, Exception] = {}
        addresses = await self._on_all(updates, self._ask_address, failures)
        patience = Patience(SENDER_SHARE * self._timeout_s)
        senders: dict[int, list[WeightSender]] = {}
        for rank, address in addresses.items():
            try:
                senders[rank] = self._begin(updates[rank], address, patience, global_steps)
            except ENGINE_FAILURES as error:
                failures[rank] = error
        fan_out = FanOut(senders, patience)
        fan_out.send(weights)
        failures |= fan_out.failures
        # The workers have received everything; what is left is the engines' own work on it.
        sent = {rank: updates[rank] for rank in senders if rank not in failures}
        await self._on_all(sent, self._await_engine, failures)
        lost = {rank: updates[rank] for rank in failures}
        await self._on_all(lost, lambda each: self._give_up(each, failures[each.target.replica_rank]), {})
        if failures:
            reasons = "; ".join(f"replica {rank}: {failure}" for rank, failure in sorted(failures.items()))
            raise WeightUpdateError(reasons)

    def _begin(
        self, update: _Update, address: ChannelAddress, patience: Patience, version: int | None
    ) -> list[WeightSender]:
        """Listen for every worker of an engine, then tell it where."""
        target, (node_id, host) = update.target, this_node()
        is_here = address.node_id == node_id
        anywhere = f"{TCP}[{host}]:*" if ":" in host else f"{TCP}{host}:*"
        senders = [
            WeightSender(
                address,
                f"replica {target.replica_rank} worker {rank}",
                update_number=self._update_number,
                timeout_s=patience.timeout_s,
                check=update.check,
                buffer_bytes=self._buffer_bytes,
                device=torch.device(get_device_name()),
                # The engine has a GPU of its own, on which memory of another one would have to be opened.
                transports=Transports(cuda=None),
                endpoint=None if is_here else anywhere,
                encrypt=self._encrypt and not is_here,
                patience=patience,
            )
            for rank in range(target.num_workers)
        ]
        with contextlib.ExitStack() as stack:
            for sender in senders:
                stack.enter_context(sender)
            # Not awaited: the server answers when its workers have received what is sent meanwhile.
            update.call = target.server.receive_weights.remote(
                update_number=self._update_number, version=version, endpoints=[sender.endpoint for sender in senders]
            ).future()
            stack.pop_all()  # from here on FanOut closes them
        return senders

    async def _ask_address(self, update: _Update) -> ChannelAddress:
        """Before each update: a server that was started again has another secret."""
        answer = update.target.server.weight_channel.remote()
        return await self._bounded(answer, ANSWER_SHARE, update, "tell its weight channel")

    async def _await_engine(self, update: _Update) -> None:
        if update.call is not None:
            await self._bounded(asyncio.wrap_future(update.call), 1.0, update, "load new weights")

    async def _give_up(self, update: _Update, failure: Exception) -> None:
        """Tell the server, whose call to the engine would otherwise wait for all workers, a stuck one included."""
        try:
            told = update.target.server.give_up_update.remote(
                update_number=self._update_number, reason=str(failure) or repr(failure)
            )
            await self._bounded(told, ANSWER_SHARE, update, "take notice of a lost weight update")
        except (PartialRolloutError, RayError, ValueError) as error:
            rank = update.target.replica_rank
            logger.warning("replica %d was not told that its weight update is lost: %s", rank, error)

    async def _on_all(self, updates: dict[int, _Update], action: Any, failures: dict[int, Exception]) -> dict[int, Any]:
        """Act on all at the same time; answers by replica, of those that did not fail."""

        async def caught(update: _Update) -> Any:
            call: Coroutine[Any, Any, Any] = action(update)
            try:
                return await call
            except ENGINE_FAILURES as error:
                failures[update.target.replica_rank] = error

        answers = await asyncio.gather(*map(caught, updates.values()))
        return {rank: answer for rank, answer in zip(updates, answers, strict=True) if rank not in failures}

    async def _bounded(self, answer: Any, share: float, update: _Update, what: str) -> Any:
        who_waits = f"training worker waits for replica {update.target.replica_rank} to {what}"
        return await answer_of(answer, timeout_s=share * self._timeout_s, who_waits=who_waits)

    # ---- the rest of verl's interface, which nothing calls: engines receive by our own extension ----

    def prepare(self) -> Any:
        """Not used."""
        raise _unused("prepare")

    @classmethod
    def build_topology(cls, *args: Any, **kwargs: Any) -> Any:
        """Not used."""
        raise _unused("build_topology")

    def init_process_group(self, **kwargs: Any) -> None:
        """Not used."""
        raise _unused("init_process_group")

    def finalize(self) -> None:
        """Not used."""
        raise _unused("finalize")

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        """Not used."""
        raise _unused("receive_weights")


def _unused(method: str) -> InternalError:
    return InternalError(f"ChannelCheckpointEngine.{method} was called: engines receive by partial_rollout's extension")
