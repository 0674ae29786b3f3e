"""The training worker that sends weights by our channel.

On every training rank, inside verl's `CheckpointEngineManager.update_weights` (backend "naive"):

    rank with the server handle    PartialRolloutServer.receive_weights ──→ one call in every engine worker
    every rank                     WeightSender ══ its own channel ══→ the engine worker of the same rank

Both run at the same time; the rank with the handle also waits for the server, which has then set the weight version.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast

import ray
import torch
from ray.exceptions import RayError
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.vllm_rollout import ServerAdapter

from partial_rollout.errors import PartialRolloutError, WeightProtocolError, WeightUpdateError
from partial_rollout.runtime.remote_call import answer_of, root_cause
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.weights.fan_out import ENGINE_FAILURES
from partial_rollout.weights.sender import ANSWER_SHARE, SENDER_SHARE, WeightSender

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable
    from concurrent.futures import Future

    from partial_rollout.weights.directory import ChannelAddress

WIRE_FORMAT = "named_tensors"

logger = logging.getLogger(__name__)


class Gathering:
    """Yields tensors as the ranks gather them; `error` is what gathering raised, which is no failure of an engine.

    This is no generator: a failure of the sender would end a generator that it iterates over, and gathering must go on.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gather when iterated over; a second iteration goes on where the first has stopped."""
        self._weights = iter(weights)
        self.error: Exception | None = None

    def __iter__(self) -> Gathering:
        """Return itself."""
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        """The next tensor."""
        try:
            return next(self._weights)
        except StopIteration:
            raise
        except Exception as error:
            self.error = error
            raise


class ChannelAdapter(ServerAdapter):
    """verl's adapter with another `update_weights`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what ServerAdapter takes."""
        super().__init__(*args, **kwargs)
        settings = PartialRolloutConfig.from_rollout(self.config.custom)
        self._settings = settings
        self.failure: Exception | None = None
        """Why the engine could not take this update; the rank goes on without it."""
        self._update_number = 0
        self._server: Any = None

    async def update_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = WIRE_FORMAT,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = False,
    ) -> None:
        """Send all weights, or a LoRA adapter's; returns when the engine generates with them as version `global_steps`.

        Blocks the actor's loop while it sends, as verl's does: gathering a tensor is a collective of this thread. So
        when the engine fails, the tensors are still gathered to the end, and `failure` says what happened.

        Args:
            weights: names and tensors, gathered as they are asked for.
            global_steps: the new weight version.
            wire_format: verl's name for what `weights` yields; only whole tensors are carried.
            peft_config: of the adapter that the tensors belong to; None for a model's own.
            base_sync_done: the engine has the base weights already, so the adapter's follow.

        Raises:
            WeightProtocolError: base weights under an adapter, or sparse updates, which the channel does not carry.
        """
        if wire_format != WIRE_FORMAT or (peft_config is not None and not base_sync_done):
            raise WeightProtocolError(
                f"the weight channel carries whole tensors and LoRA adapters, not wire_format={wire_format!r} or the "
                "weights below an adapter: set partial_rollout.weights.backend=verl, or for the latter "
                "actor_rollout_ref.rollout.load_format=safetensors"
            )
        self._update_number += 1
        gathering = Gathering(weights)
        await self._unless_failed(self._send(gathering, version=global_steps, peft_config=peft_config))
        # First: a rank that cannot gather has failed itself, whatever became of the engine.
        if gathering.error is not None:
            raise gathering.error
        if self.failure is not None:
            await self._give_up(self.failure)
            # Each tensor is a collective: the other ranks would wait in it for this one.
            with torch.no_grad():
                for _ in gathering:
                    pass

    async def resume(self, tags: list[str]) -> None:
        """Give the engine its memory back; nothing after a failure, as the engine is going to be relaunched."""
        await self._unless_failed(super().resume(tags))

    async def _unless_failed(self, action: Coroutine[Any, Any, None]) -> None:
        if self.failure is not None:
            action.close()  # Python warns of a coroutine that nobody has awaited
            return
        try:
            await action
        except ENGINE_FAILURES as error:
            logger.warning("replica %d does not take weights", self.replica_rank, exc_info=error)
            self.failure = cast("Exception", root_cause(error))  # who reads its words has no use for remote tracebacks

    async def _give_up(self, failure: Exception) -> None:
        """Tell the server, whose call to the engine would otherwise wait for all workers, a stuck one included."""
        try:
            told = self._leading_server().give_up_update.remote(
                update_number=self._update_number, reason=str(failure) or repr(failure)
            )
            await self._answer(told, "take notice of a lost weight update")
        except (PartialRolloutError, RayError, ValueError) as error:
            logger.warning("replica %d was not told that its weight update is lost: %s", self.replica_rank, error)

    async def _send(self, weights: Iterable[tuple[str, torch.Tensor]], **options: Any) -> None:
        address = await self._connect()
        update: Future[Any] | None = None

        def raise_failed_update() -> None:
            if update is not None and update.done():
                update.result()

        with torch.no_grad(), self._sender(address, raise_failed_update) as sender:
            if self._has_server:
                # Not awaited: the server answers when it has received what `send` sends, and `send` asks meanwhile.
                update = self._server.receive_weights.remote(update_number=self._update_number, **options).future()
            sender.send(weights)
        if update is not None:
            # The worker has received everything; what is left is the engine's own work on it.
            await self._bounded(asyncio.wrap_future(update), self._settings.timeouts.weights_s, "load new weights")

    def _sender(self, address: ChannelAddress, check: Any) -> WeightSender:
        return WeightSender(
            address,
            self.zmq_handle,
            update_number=self._update_number,
            buffer_bytes=self._settings.weights.buffer_bytes,
            device=torch.device(get_device_name()),
            timeout_s=SENDER_SHARE * self._settings.timeouts.weights_s,
            check=check,
        )

    async def _connect(self) -> ChannelAddress:
        """Ask the server of this rank's node before each update: one that was started again has another channel."""
        if self._server is None:  # the server is started after the training workers
            self._server = self._find_server(self.node_rank)
        return await self._answer(self._server.weight_channel.remote(), "tell its weight channel")

    def _find_server(self, node_rank: int) -> Any:
        return ray.get_actor(f"{self._get_server_name_prefix()}server_{self.replica_rank}_{node_rank}")

    def _leading_server(self) -> Any:
        """The server that calls the engine: the one on the replica's first node."""
        return self._server if self.node_rank == 0 and self._server is not None else self._find_server(0)

    async def _answer(self, answer: Any, what: str) -> Any:
        return await self._bounded(answer, ANSWER_SHARE * self._settings.timeouts.weights_s, what)

    async def _bounded(self, answer: Any, timeout_s: float, what: str) -> Any:
        who_waits = f"training worker waits for replica {self.replica_rank} to {what}"
        return await answer_of(answer, timeout_s=timeout_s, who_waits=who_waits)


class ChannelActorWorker(ActorRolloutRefWorker):
    """verl's training worker with our adapter."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue] - added at run time
    def init_model(self) -> None:
        """Build as verl does, then replace the adapter.

        Missing hook: verl looks the adapter's class up in a table nobody can add to.
        """
        super().init_model()
        rollout = getattr(self, "rollout", None)
        if rollout is not None:
            self.rollout = ChannelAdapter(
                config=rollout.config, model_config=rollout.model_config, device_mesh=rollout.device_mesh
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> None:
        """Run verl's update to its end on every rank, since ranks meet in it, and only then say that it failed.

        Raises:
            WeightUpdateError: this rank's engine did not take the weights.
        """
        adapter = cast("ChannelAdapter", self.rollout)
        adapter.failure = None
        await super().update_weights(global_steps=cast("int", global_steps), mode=mode)
        if adapter.failure is not None:
            raise WeightUpdateError(f"replica {adapter.replica_rank}: {adapter.failure}")
