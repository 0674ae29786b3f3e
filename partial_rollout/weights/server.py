"""verl's vLLM server with weight updates by our channel."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.v1.engine.exceptions import EngineDeadError

from partial_rollout.errors import WeightUpdateError
from partial_rollout.rollout.admission import Broadcast
from partial_rollout.rollout.control import control, while_healthy
from partial_rollout.weights.protocol.engine_weights import EngineWeights
from partial_rollout.weights.sender import ANSWER_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.settings.block import PartialRolloutConfig
    from partial_rollout.weights.directory import ChannelAddress, ChannelDirectory


class GivenUpUpdates:
    """Ends the call of a weight update when a training rank has lost its worker.

    vLLM waits for all workers of a call, and only the rank of a stuck worker knows that it is stuck.
    """

    def __init__(self) -> None:
        """Start with no update given up."""
        self._reasons: dict[int, str] = {}
        self._changed = Broadcast()

    def give_up(self, update_number: int, reason: str) -> None:
        """Note that update `update_number` is lost, whether its call has begun or not."""
        self._reasons.setdefault(update_number, reason)
        self._changed.notify()

    async def wait(self, update_number: int) -> None:
        """Raise WeightUpdateError as soon as update `update_number` is given up."""
        await self._changed.wait_for(lambda: update_number in self._reasons)
        raise WeightUpdateError(self._reasons[update_number])


async def _take_weights(engine: Any, options: dict[str, Any]) -> None:
    """Let the workers receive, then forget caches as verl's `clear_kv_cache` does, which does not check the result."""
    await engine.collective_rpc(method="receive_weights", kwargs=options)
    if not await engine.reset_prefix_cache(reset_connector=True):
        raise WeightUpdateError("the prefix cache of the old weights was not cleared: requests still hold blocks")
    await engine.reset_mm_cache()
    await engine.reset_encoder_cache()


class ChannelServer(vLLMHttpServer):
    """The server's part of a weight update; it also keeps whether its engine may be used afterwards.

    A subclass runs these methods on the engine's loop (`_on_engine_loop`).
    """

    settings: PartialRolloutConfig
    _channels: ChannelDirectory
    """The folder in which the engine's workers meet the training ranks."""
    _name: str
    _why_dead: str

    def _init_weights(self) -> None:
        self._weights = EngineWeights()
        self._given_up = GivenUpUpdates()

    @control
    async def weight_channel(self) -> ChannelAddress:
        """Where this node's training ranks meet this server's engine workers, and which node it is."""
        return replace(self._channels.address, node_id=ray.get_runtime_context().get_node_id())

    @control
    async def receive_weights(
        self,
        *,
        update_number: int,
        version: int | None,
        peft_config: dict[str, Any] | None = None,
        endpoints: Sequence[str] | None = None,
    ) -> None:
        """Let every engine worker take update `update_number` from its channel; then forget caches and set the version.

        With `peft_config` the workers receive a LoRA adapter, and the base weights stay. `endpoints` are where the
        sender listens for each worker, by rank; None: each at the address of its own channel on this node.

        Raises:
            WeightUpdateError: a worker failed; the engine generates nothing until it was relaunched and sent weights.
            EngineDead: the update before this one failed, and the engine was not relaunched.
        """
        self._weights.require_receivable(self._name)
        timeout_s, validate = self.settings.timeouts.weights_s, self.settings.weights.validate_values
        options = {"update_number": update_number, "timeout_s": timeout_s, "validate": validate}
        update = f"weight update {update_number} (version {version})"
        self._weights.begun(update_number, update)
        take = _take_weights(self.engine, options | {"peft_config": peft_config, "endpoints": endpoints})
        try:
            await while_healthy(self.engine, take, unless=self._given_up.wait(update_number))
        except Exception as error:
            # vLLM's own text of a dead engine names nobody, and points to a stack trace that is in another log.
            why = self._why_dead if isinstance(error, EngineDeadError) else error
            reason = f"{update} failed: {why}"
            self._weights.failed(reason, update_number)
            raise WeightUpdateError(f"{self._name}: {reason}") from error
        if not self._weights.succeeded(update_number):
            raise WeightUpdateError(f"{self._name}: {update} was given up before it arrived: {self._weights.failure}")
        if version is not None:
            self.global_steps = version

    @control
    async def give_up_update(self, *, update_number: int, reason: str) -> None:
        """Take notice that a training rank cannot end an update: the engine counts as failed, whatever its workers say.

        This ends the server's call to the engine, which would otherwise wait for all workers, a stuck one included.
        """
        self._weights.failed(f"weight update {update_number} was given up: {reason}", update_number)
        self._given_up.give_up(update_number, reason)

    @control
    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Give the engine its memory back, as verl does around a weight update; so a failure fails the update.

        Raises:
            WeightUpdateError: the engine has died or did not answer within ANSWER_SHARE of `timeouts.weights_s`.
        """
        call = while_healthy(self.engine, vLLMHttpServer.wake_up(self, tags))
        limit_s = ANSWER_SHARE * self.settings.timeouts.weights_s
        try:
            await asyncio.wait_for(call, limit_s)
        except Exception as error:
            why = self._why_dead if isinstance(error, EngineDeadError) else repr(error)
            if isinstance(error, asyncio.TimeoutError):
                why = f"no answer within {limit_s:g} s, which is a fortieth of partial_rollout.timeouts.resume_s"
            reason = f"the engine did not wake up ({tags}): {why}"
            self._weights.failed(reason)
            raise WeightUpdateError(f"{self._name}: {reason}") from error

    @control
    async def weights_failure(self) -> str | None:
        """Why the last weight update failed, or None if it arrived whole. One that has not ended counts as failed."""
        return self._weights.given_up()
