"""vLLM's weight transfer backend for our channel: one class for both interfaces that vLLM has had.

| | 0.24 (GPU) | 0.28 and later (CPU) |
|---|---|---|
| constructor | config, parallel_config, model | config, vllm_config, device, model |
| prepares and finalises the layers | vLLM's worker | this engine |
| receive_weights | update_info, load_weights | update_info |
| tensors are loaded by | load_weights | model.load_weights |

`WorkerExtension.receive_weights` drives start, update and finish inside one worker call, so no step comes in between.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from partial_rollout.errors import ConfigError, VersionError
from partial_rollout.integrations.vllm_plugin import BACKEND
from partial_rollout.weights.checks import ModelShapes, parts_left_out, require_experts, require_parts
from partial_rollout.weights.directory import ChannelAddress
from partial_rollout.weights.loading import Reload, load_from_channel, require_complete, require_own_memory
from partial_rollout.weights.receiver import WeightReceiver

if TYPE_CHECKING:
    from collections.abc import Callable

KNOWN_INTERFACES = {
    "0.24": (("config", "parallel_config", "model"), ("update_info", "load_weights")),
    "0.28": (("config", "vllm_config", "device", "model"), ("update_info",)),
}
"""vLLM version to parameters of the constructor and of `receive_weights`."""


@dataclass
class ChannelInit(WeightTransferInitInfo):
    """No fields: both ends connect anew for each update."""


@dataclass
class ChannelUpdate(WeightTransferUpdateInfo):
    """One update of one channel, as the worker extension hands it to vLLM."""

    channel: str
    update_number: int
    timeout_s: float
    validate: bool
    endpoint: str | None = None
    """Where the sender listens; None: at the server's address, on this node."""


def make_receiver(update: ChannelUpdate, device: torch.device | None) -> WeightReceiver:
    """This engine worker's end of an update; tensors go to `device`."""
    return WeightReceiver(
        ChannelAddress.inherited(),
        update.channel,
        update_number=update.update_number,
        timeout_s=update.timeout_s,
        validate=update.validate,
        device=device,
        endpoint=update.endpoint,
    )


def require_known_interface(base: type = WeightTransferEngine) -> str:
    """The vLLM version whose interface `base` has.

    Raises:
        VersionError: it has another one; says what was found and what is known.
    """
    found = _parameters(base.__init__), _parameters(base.receive_weights)  # pyright: ignore[reportAttributeAccessIssue]
    for known, interface in KNOWN_INTERFACES.items():
        if found == interface:
            return known
    raise VersionError(
        f"vLLM {version('vllm')} has a weight transfer interface this release was not built for: "
        f"WeightTransferEngine{found[0]}.receive_weights{found[1]}; known: {KNOWN_INTERFACES}. Install one of these "
        "versions, or set partial_rollout.weights.backend=verl"
    )


def choose_backend(engine_kwargs: dict[str, Any]) -> None:
    """Add our backend to an engine's arguments, in place.

    Raises:
        ConfigError: the user asks for another one.
        VersionError: this vLLM's interface is unknown.
    """
    require_known_interface()
    given = engine_kwargs.setdefault("weight_transfer_config", {"backend": BACKEND})
    if given.get("backend") != BACKEND:
        raise ConfigError(
            f"actor_rollout_ref.rollout.engine_kwargs.vllm.weight_transfer_config={given} is not allowed: "
            "leave it out, or set partial_rollout.weights.backend=verl"
        )


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


class ChannelReceiving:
    """Our part of the backend, for both interfaces; mixed into vLLM's WeightTransferEngine."""

    init_info_cls = ChannelInit
    update_info_cls = ChannelUpdate
    supports_draft_weight_update = False
    model: Any
    model_config: Any

    def __init__(self, *args: Any) -> None:
        """Take what vLLM's own class takes; the model is loaded already.

        Raises:
            VersionError: as `require_known_interface`.
        """
        require_known_interface()
        super().__init__(*args)
        self._reload = Reload(self.model)
        self._packed: dict[str, list[str]] = getattr(self.model, "packed_modules_mapping", {})
        self._shapes = ModelShapes(self.model, self._packed)
        self._device = next(self.model.parameters()).device

    def init_transfer_engine(self, init_info: ChannelInit) -> None:
        """Do nothing: there is nothing to prepare."""

    def start_weight_update(self) -> None:
        """Prepare the layers; not called by vLLM 0.24, whose worker does it."""
        self._reload.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive an update. vLLM 0.28's own method waits for an accelerator, which raises where there is none."""
        if torch.accelerator.is_available():
            super().update_weights(update_info)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            self.receive_weights(ChannelUpdate(**update_info))

    def receive_weights(self, update_info: ChannelUpdate, load_weights: Callable[..., Any] | None = None) -> None:
        """Receive and load all weights.

        Raises:
            WeightUpdateError: of a class that says why; the model is undefined then and must not be used.
        """
        expected = self._reload.expected()
        with make_receiver(update_info, self._device) as receiver:
            loaded = load_from_channel(load_weights or self.model.load_weights, receiver, self._shapes.check)
            require_own_memory(self.model, receiver)
        require_complete(expected, loaded)
        require_parts(self._packed, receiver.names, without=parts_left_out(self.model))
        require_experts(receiver.names)

    def finish_weight_update(self) -> None:
        """Finalise the layers; not called by vLLM 0.24, whose worker does it and whose heads are not packed."""
        self._reload.finish(self.model_config)

    def shutdown(self) -> None:
        """Do nothing: nothing is held between updates."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Part of vLLM 0.24's interface; our sender is `WeightSender`."""
        raise NotImplementedError("weights are sent by partial_rollout.weights.sender.WeightSender")


class ChannelTransferEngine(ChannelReceiving, WeightTransferEngine):
    """The backend `partial_rollout`."""
