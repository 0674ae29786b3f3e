"""New weights into a model that vLLM has already processed: layer by layer, complete or an error."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from partial_rollout.errors import WeightMismatch, WeightUpdateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import ModelConfig

    from partial_rollout.weights.receiver import WeightReceiver

NUM_NAMED_PARAMETERS = 8
"""Parameter names an error message spells out."""


def reload_model(model: torch.nn.Module, model_config: ModelConfig, load: Callable[[], set[str]]) -> None:
    """Reload `model` in place; `load` loads all tensors and returns the names of the parameters it filled.

    vLLM packs some layers after loading (linears on a CPU, quantised ones anywhere) and drops the plain weight, so
    loading in place fails there; layerwise reload restores each layer first and packs it again when it is complete.

    Raises:
        WeightMismatch: parameters were not sent.
        Exception: what `load` raised. In both cases the model is undefined and must not be used.
    """
    expected = {name for name, _ in model.named_parameters()}
    tied = _tied_head(model)
    initialize_layerwise_reload(model)
    missing = sorted(expected - load())
    if missing:
        raise WeightMismatch(
            f"weight update: {len(missing)} of {len(expected)} parameters were not sent, "
            f"first: {missing[:NUM_NAMED_PARAMETERS]}"
        )
    finalize_layerwise_reload(model, model_config)
    if tied is not None:
        # A tied head keeps its own packed copy of the embedding, which a reload does not refresh: without this line
        # every later token is silently sampled from old logits.
        tied.quant_method.process_weights_after_loading(tied)


def load_from_channel(model: Any, receiver: WeightReceiver) -> set[str]:
    """Feed the channel's tensors to the model as they come; return the names of the parameters they filled.

    Raises:
        WeightMismatch: the model does not take a tensor; names it.
        WeightUpdateError: the channel failed.
    """
    try:
        return model.load_weights(receiver.tensors())
    except WeightUpdateError:
        raise
    except Exception as error:
        busy_with = receiver.current or "no tensor"
        raise WeightMismatch(f"weight update failed while loading {busy_with}: {error!r}") from error


def require_own_memory(model: torch.nn.Module, receiver: WeightReceiver) -> None:
    """After an update: no parameter or buffer may be a tensor that the channel has lent.

    It would stay as it is, since nobody writes to its slot any more, but keep all slots of the update in memory.

    Raises:
        WeightMismatch: one is; names it.
    """
    if not receiver.has_lent:
        return
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if receiver.lends(tensor):
            raise WeightMismatch(
                f"the model's loader made a received tensor itself the parameter {name!r} instead of copying it: "
                "set partial_rollout.weights.backend=verl"
            )


def _tied_head(model: torch.nn.Module) -> Any:
    """Return the output head if it shares its weight with the input embedding."""
    head, body = getattr(model, "lm_head", None), getattr(model, "model", None)
    embedding = getattr(body, "embed_tokens", None)
    if head is None or embedding is None or not isinstance(getattr(head, "weight", None), torch.Tensor):
        return None
    return head if head.weight is embedding.weight or _same_storage(head.weight, embedding.weight) else None


def _same_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.numel() > 0 and first.data_ptr() == second.data_ptr()
