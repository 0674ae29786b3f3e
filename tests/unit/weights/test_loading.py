from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from partial_rollout.errors import WeightMismatch
from partial_rollout.weights.loading import require_own_memory
from tests.unit.weights.support import SLOT_BYTES, make_receiver, send_all

NUMEL = SLOT_BYTES // 4


def copy(model, name, tensor):
    model.register_parameter(name, torch.nn.Parameter(tensor.clone()))


def keep_as_parameter(model, name, tensor):
    model.register_parameter(name, torch.nn.Parameter(tensor))


def keep_a_part_as_buffer(model, name, tensor):
    model.register_buffer(name, tensor.view(2, -1)[1])


def update(address, load):
    """A model that `load` filled from a channel, and the receiver afterwards."""
    model, weights = torch.nn.Module(), [(name, torch.ones(NUMEL)) for name in "abc"]
    with ThreadPoolExecutor(1) as pool, make_receiver(address) as receiver:
        sent = pool.submit(send_all, address, weights)
        for name, tensor in receiver.tensors():
            load(model, name, tensor)
        del tensor
        sent.result()
    return model, receiver


@pytest.mark.parametrize("keep", [keep_as_parameter, keep_a_part_as_buffer])
def test_a_loader_that_makes_what_it_was_lent_part_of_the_model_is_named(channels, keep):
    model, receiver = update(channels.address, lambda *item: (keep if item[1] == "b" else copy)(*item))
    with pytest.raises(WeightMismatch, match=r"parameter 'b' instead of copying it.*weights\.backend=verl"):
        require_own_memory(model, receiver)


def test_copies_are_the_models_own_even_while_somebody_else_keeps_a_tensor(channels):
    kept = []
    model, receiver = update(channels.address, lambda *item: (copy(*item), kept.append(item[2])))
    assert receiver.has_lent
    require_own_memory(model, receiver)
    kept.clear()
    assert not receiver.has_lent
