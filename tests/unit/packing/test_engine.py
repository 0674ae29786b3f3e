"""What the packed engine does around verl's forward and backward; tests/ray runs them on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from partial_rollout.errors import ConfigError
from partial_rollout.packing import engine as packed_engine
from partial_rollout.packing.batch import MICRO_BATCH_FIELD
from partial_rollout.packing.engine import PackedFSDPEngine

ROWS = ([0, 1], [2], [3, 4, 5])
NUMBERS = [number for number, row in enumerate(ROWS) for _ in row]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> PackedFSDPEngine:
    """Without ranks and model; `seen` lists what verl's engine was called with."""
    made = object.__new__(PackedFSDPEngine)
    made.seen = []
    made.fails_at = None

    def verls(self: Any, data: TensorDict, loss_function: Any, forward_only: bool) -> dict[str, Any]:
        if len(self.seen) == self.fails_at:
            raise RuntimeError("out of memory")
        size = tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", None)
        self.seen.append((data["sample"].flatten().tolist(), size, self._is_last_row))
        return {"model_output": {}, "loss": [1.0], "metrics": {"kl": [0.5]}}

    monkeypatch.setattr(FSDPEngineWithLMHead, "forward_backward_batch", verls)
    monkeypatch.setattr(PackedFSDPEngine, "_agree", lambda *_: None)
    return made


def batch() -> TensorDict:
    fields = {MICRO_BATCH_FIELD: torch.tensor(NUMBERS)[:, None], "sample": torch.arange(len(NUMBERS))[:, None]}
    return TensorDict(fields, batch_size=len(NUMBERS))


def test_each_row_is_one_micro_batch_and_only_the_last_one_syncs(engine: Any):
    engine.forward_backward_batch(batch(), None)
    assert engine.seen == [(row, len(row), row is ROWS[-1]) for row in ROWS]


def test_training_reports_how_many_rows_it_ran(engine: Any):
    output = engine.forward_backward_batch(batch(), None)
    assert output["metrics"] == {"kl": [0.5] * 3, "packing_rows": [3]}
    assert output["loss"] == [1.0] * 3
    assert "packing_rows" not in engine.forward_backward_batch(batch(), None, forward_only=True)["metrics"]


def test_a_failed_row_leaves_the_engine_as_it_was(engine: Any):
    """Gradients of a later batch must sync."""
    engine.fails_at = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.forward_backward_batch(batch(), None)
    assert engine._is_last_row


def test_an_engine_that_the_user_chose_is_not_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "acme")
    with pytest.raises(ConfigError, match="VERL_ENGINE_VENDOR=acme .*packing.planner=verl"):
        packed_engine.register_engine()
