"""The planner in the trainer: which one, the order of the batch, what ranks are told, and what is reported."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from transformers import Qwen3Config
from verl.trainer.ppo.v1 import PPOTrainer

from partial_rollout.config import PackingConfig, PartialRolloutConfig
from partial_rollout.core.packing import FixedCountPlanner, GlobalPlanner, Plan, TokenBudgetPlanner
from partial_rollout.core.packing.padded import PaddedPlanner
from partial_rollout.errors import InternalError
from partial_rollout.train import packing
from partial_rollout.train.packing import MICRO_BATCH_FIELD, BatchPacker, layout, make_batch_packer
from partial_rollout.train.trainer import PartialRolloutTrainer

if TYPE_CHECKING:
    from tensordict import TensorDict

LENGTHS = [40, 7, 30, 6, 20, 5, 10, 4]
KEYS = [f"uid{number}_0_0" for number in range(len(LENGTHS))]


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The micro-batch of each key, as ranks will read it."""
    found: dict[str, int] = {}

    def put(keys: list[str], partition_id: str, fields: TensorDict) -> None:
        found.update(zip(keys, fields[MICRO_BATCH_FIELD].flatten().tolist(), strict=True))

    monkeypatch.setattr(packing.tq, "kv_batch_put", put)
    return found


def batch_of(keys: list[str]) -> KVBatchMeta:
    """In an order of verl's choice."""
    tags = [{"seq_len": LENGTHS[KEYS.index(key)]} for key in keys]
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train")


def arrange(planner: Any, num_ranks: int = 2, *, pads_rows: bool = False) -> tuple[KVBatchMeta, dict[str, Any]]:
    batch, metrics = batch_of(KEYS[::-1]), {}
    BatchPacker(planner, num_ranks, pads_rows, call_timeout_s=5.0).arrange(batch, KEYS, metrics)
    return batch, metrics


def test_the_order_gives_each_rank_its_rows(stored: dict[str, int]):
    planner = GlobalPlanner(token_budget=60, mini_batch_size=4, equal_counts=True, cost=packing.CostModel.verl())
    plan = planner.plan(LENGTHS, 2)
    batch, _ = arrange(planner)
    for rank, part in enumerate(batch.chunk(2)):
        assert part.keys == [KEYS[i] for row in plan.for_rank(rank) for i in row]
        assert [tag["seq_len"] for tag in part.tags] == [LENGTHS[KEYS.index(key)] for key in part.keys]
        rows = {number: {KEYS[i] for i in row} for number, row in enumerate(plan.for_rank(rank))}
        assert all(key in rows[stored[key]] for key in part.keys)


def test_mini_batches_are_cut_from_the_sampled_order(stored: dict[str, int]):
    """verl cuts each rank's part into equal mini-batches: the first holds the first samples, whatever verl's order."""
    batch, _ = arrange(TokenBudgetPlanner(token_budget=60, mini_batch_size=4, equal_counts=True))
    first = {key for part in batch.chunk(2) for key in part.keys[:2]}
    assert first == set(KEYS[:4])


def test_samples_that_verl_added_come_last(stored: dict[str, int]):
    planner = FixedCountPlanner(per_rank_batch_size=2, mini_batch_size=4)
    batch = batch_of(KEYS)
    BatchPacker(planner, 2, False, call_timeout_s=5.0).arrange(batch, KEYS[2:], {})
    last = {key for part in batch.chunk(2) for key in part.keys[2:]}
    assert {KEYS[0], KEYS[1]} <= last


def test_the_step_reports_the_plan(stored: dict[str, int]):
    _, packed = arrange(TokenBudgetPlanner(token_budget=35, equal_counts=True))
    _, padded = arrange(PaddedPlanner(token_budget=60), pads_rows=True)
    names = {"square_imbalance", "token_imbalance", "padding_share", "rows_over_budget", "planner_ms", "micro_batches"}
    assert packed.keys() == padded.keys() == {f"packing/{name}" for name in names}
    assert packed["packing/rows_over_budget"] == 1
    assert packed["packing/padding_share"] == 0
    assert 0 < padded["packing/padding_share"] < 0.5


def test_plans_are_for_the_ranks_that_verl_sends_batches_to(stored: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PPOTrainer, "_balance_batch", lambda _, batch, metrics: batch)
    trainer = object.__new__(PartialRolloutTrainer)
    trainer.packer = BatchPacker(FixedCountPlanner(2), 2, False, call_timeout_s=5.0)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1]})
    assert len(trainer._balance_batch(batch_of(KEYS), {}).keys) == len(KEYS)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1, 2, 3]})
    with pytest.raises(InternalError, match="plans are for 2 ranks, verl sends batches to 4"):
        trainer._balance_batch(batch_of(KEYS), {})


def test_a_plan_that_verl_would_cut_elsewhere_is_refused():
    uneven = Plan((((0,), (1, 2)), ((3, 4), (5,))), (1, 1))
    with pytest.raises(InternalError, match=r"mini-batch 0 gives ranks \[1, 2\] samples"):
        layout(uneven)
    assert layout(replace(uneven, micro_batches_per_mini_batch=(2,))) == ([0, 3, 4, 1, 2, 5], [0, 1, 1, 0, 0, 1])


# ---- which planner ----


def config_of(*, remove_padding: bool, sequence_parallel: int = 1) -> Any:
    actor = {
        "ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 3, "ppo_max_token_len_per_gpu": 100,
        "ulysses_sequence_parallel_size": 1, "fsdp_config": {"ulysses_sequence_parallel_size": sequence_parallel},
    }  # fmt: skip
    model = {"use_remove_padding": remove_padding}
    roles = {"actor": actor, "model": model, "rollout": {"n": 4}}
    return OmegaConf.create({"actor_rollout_ref": roles, "trainer": {"nnodes": 2, "n_gpus_per_node": 4}})


def made(monkeypatch: pytest.MonkeyPatch, *, sequence_parallel: int = 1, remove_padding: bool = True, **options: Any):
    monkeypatch.setattr(packing, "_text_config", lambda _: Qwen3Config())
    settings = PartialRolloutConfig(packing=PackingConfig(**options))
    return make_batch_packer(config_of(remove_padding=remove_padding, sequence_parallel=sequence_parallel), settings)


def test_verls_own_path_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    assert made(monkeypatch, planner="verl") is None


@pytest.mark.parametrize(
    ("name", "remove_padding", "kind"),
    [
        ("global", True, GlobalPlanner),
        ("budget", True, TokenBudgetPlanner),
        ("fixed", True, FixedCountPlanner),
        ("global", False, PaddedPlanner),
        ("budget", False, PaddedPlanner),
        ("fixed", False, FixedCountPlanner),
    ],
)
def test_the_planner_fits_the_rows(monkeypatch: pytest.MonkeyPatch, name: str, remove_padding: bool, kind: type):
    packer = made(monkeypatch, planner=name, remove_padding=remove_padding)
    assert packer is not None
    assert type(packer.planner) is kind
    assert packer.planner.mini_batch_size == 32
    assert packer.pads_rows is not remove_padding


def test_sizes_not_given_are_verls(monkeypatch: pytest.MonkeyPatch):
    assert made(monkeypatch, planner="fixed").planner.per_rank_batch_size == 3
    assert made(monkeypatch, planner="fixed", per_rank_batch_size=5).planner.per_rank_batch_size == 5
    shared = made(monkeypatch, planner="budget", sequence_parallel=4)
    assert (shared.planner.token_budget, shared.num_ranks) == (400, 2)
    assert made(monkeypatch, planner="budget", token_budget=7).planner.token_budget == 7


def test_the_cost_is_the_models_or_verls(monkeypatch: pytest.MonkeyPatch):
    assert made(monkeypatch, cost_model="verl").planner.cost == packing.CostModel.verl()
    models = made(monkeypatch, cost_model="model").planner.cost
    assert models.linear > 1000 * models.quadratic > 0
    assert models != packing.CostModel.verl()


def test_a_model_that_hides_its_sizes_is_costed_as_verl_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packing, "_text_config", lambda _: SimpleNamespace(hidden_size=8))
    hidden = make_batch_packer(config_of(remove_padding=True), PartialRolloutConfig())
    assert hidden is not None
    assert isinstance(hidden.planner, GlobalPlanner)
    assert hidden.planner.cost == packing.CostModel.verl()
