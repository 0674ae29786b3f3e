"""Loads new weights into a model that vLLM has already processed: layer by layer, all of them or an error."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from partial_rollout.errors import WeightMismatch, WeightUpdateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.config import ModelConfig

    from partial_rollout.weights.receiver import WeightReceiver

NUM_NAMED_PARAMETERS = 8
"""Parameter names an error message spells out."""
OPTIONAL_PARAMETERS = ("q_scale", "k_scale", "v_scale", "prob_scale")
"""Parameters of quantised attention layers; vLLM has a value for them when a checkpoint has none."""
HEAD = "lm_head"


class Reload:
    """Reloads a model in place, again and again: `start`, `expected`, load tensors, `finish`.

    vLLM packs some layers after loading (linears on a CPU, quantised ones anywhere) and drops the plain weight, so
    loading in place fails there; layerwise reload restores each layer first and packs it again when it is complete.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Take a model that vLLM has loaded and processed."""
        self._model = model
        self._tied = _tied_heads(model)

    def start(self) -> None:
        """Restore every layer to what can be loaded."""
        initialize_layerwise_reload(self._model)

    def expected(self) -> set[str]:
        """Names of the parameters to be filled; ask between `start` and loading.

        Later is too late: a layer is processed as soon as it is complete, and a quantised one then has more parameters.
        """
        return {name for name, _ in self._model.named_parameters() if self._is_sent(name)}

    def _is_sent(self, name: str) -> bool:
        is_tied = name.rpartition(".")[0] in self._tied
        return not is_tied and name.rpartition(".")[2] not in OPTIONAL_PARAMETERS

    def finish(self, model_config: ModelConfig) -> None:
        """Process what was loaded as after a start."""
        finalize_layerwise_reload(self._model, model_config)
        for head in self._tied.values():
            # A tied head keeps its own packed copy of the embedding, which a reload does not refresh: without this
            # line every later token is silently sampled from old logits.
            head.quant_method.process_weights_after_loading(head)


def require_complete(expected: set[str], loaded: set[str]) -> None:
    """Check that all parameters were filled.

    Raises:
        WeightMismatch: some were not sent; the model is undefined and must not be used.
    """
    missing = sorted(expected - loaded)
    if missing:
        raise WeightMismatch(
            f"weight update: {len(missing)} of {len(expected)} parameters were not sent, "
            f"first: {missing[:NUM_NAMED_PARAMETERS]}"
        )


def load_from_channel(
    load_weights: Callable[[Iterable[Any]], set[str]],
    receiver: WeightReceiver,
    check: Callable[[str, torch.Tensor], None],
) -> set[str]:
    """Feed the channel's tensors to the model as they come; return the names of the parameters they filled.

    `check` sees every tensor before the model does and raises WeightMismatch for one that it must not take.

    Raises:
        WeightMismatch: the model does not take a tensor; names it.
        WeightUpdateError: the channel failed.
    """

    def checked(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
        check(*item)
        return item

    try:
        # A generator in place of `map` would hold a tensor, and with it a buffer, for longer than the model does.
        return load_weights(map(checked, receiver.tensors()))
    except WeightUpdateError:
        raise
    except Exception as error:
        busy_with = receiver.current or "no tensor"
        raise WeightMismatch(f"weight update failed while loading {busy_with}: {error!r}") from error


def require_own_memory(model: torch.nn.Module, receiver: WeightReceiver) -> None:
    """Check after loading that no parameter or buffer of the model is a tensor which the channel has lent.

    Its values would stay right, since nobody writes to that memory again, but it would keep the memory of the update.

    Raises:
        WeightMismatch: a parameter is such a tensor; names it.
    """
    # The usual case: the model has copied everything, and there is no need to look at each of its tensors.
    if not receiver.has_lent:
        return
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if receiver.lends(tensor):
            raise WeightMismatch(
                f"the model's loader made a received tensor itself the parameter {name!r} instead of copying it: "
                "set partial_rollout.weights.backend=verl"
            )


def _tied_heads(model: torch.nn.Module) -> dict[str, Any]:
    """Output heads, by name, that share their weight with an input embedding; one can be below a language model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    heads = {name: module for name, module in modules.items() if name.rpartition(".")[2] == HEAD}
    weights: list[Any] = [
        module.weight
        for name, module in modules.items()
        if name not in heads and isinstance(module, VocabParallelEmbedding)
    ]
    return {name: head for name, head in heads.items() if any(_is_shared(head, weight) for weight in weights)}


def _is_shared(head: Any, weight: torch.Tensor) -> bool:
    own = getattr(head, "weight", None)
    return own is weight or (isinstance(own, torch.Tensor) and own.numel() > 0 and own.data_ptr() == weight.data_ptr())
