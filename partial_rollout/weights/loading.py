"""New weights into a model that vLLM has already processed: layer by layer, complete or an error."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from partial_rollout.errors import WeightMismatch, WeightUpdateError
from partial_rollout.weights.names import any_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from vllm.config import ModelConfig

    from partial_rollout.weights.receiver import WeightReceiver

NUM_NAMED_PARAMETERS = 8
"""Parameter names an error message spells out."""
OPTIONAL_PARAMETERS = ("q_scale", "k_scale", "v_scale", "prob_scale")
"""Of quantised attention layers; vLLM has a value for them when a checkpoint has none."""
HEAD = "lm_head"
EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<tensor>.+)")
"""A tensor of one expert, as checkpoints that keep experts apart name it."""


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
        """Names of the parameters to be filled, to ask for between `start` and loading.

        A layer that is complete is processed at once, and a quantised one then has its scales as parameters.
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


def parts_left_out(model: Any) -> frozenset[str]:
    """Parts of fused modules that some of the model's layers do without, by its configuration.

    Layers whose values are their keys, or that use the keys and values of another layer, as in Gemma 3n and 4.
    """
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", config)
    if getattr(text, "num_kv_shared_layers", 0):
        return frozenset(("k_proj", "v_proj"))
    return frozenset(("v_proj",)) if getattr(text, "attention_k_eq_v", False) else frozenset()


def require_parts(
    packed: Mapping[str, Sequence[str]], received: Iterable[str], *, without: Collection[str] = ()
) -> None:
    """Check that of every fused module (`qkv_proj`) all parts (`q_proj`, `k_proj`, `v_proj`) came, or itself.

    vLLM reports a fused parameter as filled when any of its parts was. Parts in `without` may be missing, and a bias
    that comes for no layer, since some attention has none for keys.

    Raises:
        WeightMismatch: a part was not sent; the model is undefined and must not be used.
    """
    names = set(received)
    layers = {any_layer(name) for name in names}
    for fused, parts in packed.items():
        for name in names:
            for sibling in _siblings(name, [part for part in parts if part not in without]):
                needed = sibling.endswith(".weight") or any_layer(sibling) in layers
                if needed and sibling not in names:
                    raise WeightMismatch(f"weight update: {sibling} was not sent, a part of {fused} beside {name}")


def _siblings(name: str, parts: Sequence[str]) -> list[str]:
    words = name.split(".")
    if len(words) < 2 or words[-2] not in parts:
        return []
    return [".".join([*words[:-2], other, words[-1]]) for other in parts]


def require_experts(received: Iterable[str]) -> None:
    """Check that every expert of a layer came with the same tensors, and every such layer with as many experts.

    vLLM keeps all experts of a layer in one parameter, and reports it as filled when any expert was.

    Raises:
        WeightMismatch: one was not sent; the model is undefined and must not be used.
    """
    found: defaultdict[str, set[tuple[int, str]]] = defaultdict(set)
    for match in filter(None, map(EXPERT.fullmatch, received)):
        found[match["layer"]].add((int(match["expert"]), match["tensor"]))
    number = 1 + max((expert for parts in found.values() for expert, _ in parts), default=-1)
    for layer, parts in found.items():
        tensors = sorted({tensor for _, tensor in parts})
        missing = sorted({*itertools.product(range(number), tensors)} - parts)
        if missing:
            expert, tensor = missing[0]
            raise WeightMismatch(f"weight update: {layer}.{expert}.{tensor} was not sent, one of {number} experts")


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
        # No generator of our own in between: it would hold a tensor, and with it a buffer, for longer than the model.
        return load_weights(map(checked, receiver.tensors()))
    except WeightUpdateError:
        raise
    except Exception as error:
        busy_with = receiver.current or "no tensor"
        raise WeightMismatch(f"weight update failed while loading {busy_with}: {error!r}") from error


def require_own_memory(model: torch.nn.Module, receiver: WeightReceiver) -> None:
    """After loading: no parameter or buffer may be a tensor that the channel has lent.

    It would stay as it is, since nobody writes to its buffer any more, but keep all buffers of the update in memory.

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
