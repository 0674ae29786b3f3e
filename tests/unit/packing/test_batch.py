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

from partial_rollout.errors import InternalError
from partial_rollout.packing import GlobalPlanner, PaddedPlanner, Plan
from partial_rollout.packing import batch as packing
from partial_rollout.packing.batch import MICRO_BATCH_FIELD, BatchPacker, layout, make_batch_packer
from partial_rollout.settings.block import PackingConfig, PartialRolloutConfig
from tests.unit.train.support import bare_trainer

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def arrange(planner: Any) -> KVBatchMeta:
    batch = batch_of(KEYS[::-1])
    BatchPacker(planner, 2, pads_rows=False, call_timeout_s=5.0).arrange(batch, KEYS, {})
    return batch


def test_the_order_gives_each_rank_its_rows(stored: dict[str, int]):
    planner = GlobalPlanner(token_budget=60, mini_batch_size=4)
    plan = planner.plan(LENGTHS, 2)
    batch = arrange(planner)
    for rank, part in enumerate(batch.chunk(2)):
        assert part.keys == [KEYS[i] for row in plan.for_rank(rank) for i in row]
        assert [tag["seq_len"] for tag in part.tags] == [LENGTHS[KEYS.index(key)] for key in part.keys]
        rows = {number: {KEYS[i] for i in row} for number, row in enumerate(plan.for_rank(rank))}
        assert all(key in rows[stored[key]] for key in part.keys)


def test_mini_batches_are_cut_from_the_sampled_order(stored: dict[str, int]):
    """verl cuts each rank's part into equal mini-batches: the first holds the first samples, whatever verl's order."""
    batch = arrange(GlobalPlanner(token_budget=60, mini_batch_size=4))
    first = {key for part in batch.chunk(2) for key in part.keys[:2]}
    assert first == set(KEYS[:4])


def test_samples_that_verl_added_come_last(stored: dict[str, int]):
    planner = GlobalPlanner(token_budget=60, mini_batch_size=4)
    batch = batch_of(KEYS)
    BatchPacker(planner, 2, False, call_timeout_s=5.0).arrange(batch, KEYS[2:], {})
    last = {key for part in batch.chunk(2) for key in part.keys[2:]}
    assert {KEYS[0], KEYS[1]} <= last


@pytest.mark.parametrize(("pads_rows", "padding_share"), [(False, 0.0), (True, 1 - 96 / 116)])
def test_the_step_reports_the_plan(stored: dict[str, int], monkeypatch, pads_rows: bool, padding_share: float):
    """Rows of 10 + 30 and 20 + 20 tokens, then of 7 and 9."""

    class Given(GlobalPlanner):
        def plan(self, lengths: Sequence[int], num_ranks: int) -> Plan:
            return Plan((((0, 1), (2, 3)), ((4,), (5,))), (1, 1), rows_over_budget=3)

    monkeypatch.setattr(packing.time, "perf_counter", iter([1.0, 1.25]).__next__)
    batch = KVBatchMeta(keys=KEYS[:6], tags=[{"seq_len": n} for n in (10, 30, 20, 20, 7, 9)], partition_id="train")
    metrics: dict[str, Any] = {}
    BatchPacker(Given(1), 2, pads_rows, call_timeout_s=5.0).arrange(batch, KEYS[:6], metrics)
    assert metrics == {
        "packing/square_imbalance": pytest.approx((200 / 900 + 32 / 65) / 2),
        "packing/token_imbalance": pytest.approx((0 + 2 / 8) / 2),
        "packing/padding_share": pytest.approx(padding_share),
        "packing/rows_over_budget": 3,
        "packing/micro_batches": 2,
        "packing/planner_ms": 250.0,
    }


def test_plans_are_for_the_ranks_that_verl_sends_batches_to(stored: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PPOTrainer, "_balance_batch", lambda _, batch, metrics: batch)
    trainer = bare_trainer(packer=BatchPacker(GlobalPlanner(60), 2, False, call_timeout_s=5.0))
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


SIZES = {
    "data": {"max_prompt_length": 20, "max_response_length": 30},
    "algorithm": {"use_kl_in_reward": False},
    "trainer": {"nnodes": 2, "n_gpus_per_node": 4},
    "actor_rollout_ref": {
        "actor": {
            "use_dynamic_bsz": False, "ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 3, "use_kl_loss": False,
            "ppo_max_token_len_per_gpu": 100, "ulysses_sequence_parallel_size": 1,
            "fsdp_config": {"ulysses_sequence_parallel_size": 1},
        },
        "rollout": {"n": 4, "log_prob_use_dynamic_bsz": False, "log_prob_max_token_len_per_gpu": 80},
        "ref": {"log_prob_use_dynamic_bsz": False, "log_prob_max_token_len_per_gpu": 60},
        "model": {"use_remove_padding": True},
    },
}  # fmt: skip
"""What is read of verl's configuration."""
DYNAMIC = {
    "actor.use_dynamic_bsz": True,
    "rollout.log_prob_use_dynamic_bsz": True,
    "ref.log_prob_use_dynamic_bsz": True,
}


def config_of(changes: dict[str, Any]) -> Any:
    """`SIZES` with values of `actor_rollout_ref` changed."""
    config = OmegaConf.create(SIZES)
    for key, value in changes.items():
        OmegaConf.update(config.actor_rollout_ref, key, value)
    return config


def made(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    monkeypatch.setattr(packing, "_text_config", lambda _: Qwen3Config())
    settings = PartialRolloutConfig(packing=PackingConfig(**options))
    return make_batch_packer(config_of(changes or {}), settings)


def test_verls_own_path_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    assert made(monkeypatch, planner="verl") is None


@pytest.mark.parametrize(
    ("name", "remove_padding", "kind"),
    [
        ("global", True, GlobalPlanner),
        ("global", False, PaddedPlanner),
    ],
)
def test_the_planner_fits_the_rows(monkeypatch: pytest.MonkeyPatch, name: str, remove_padding: bool, kind: type):
    packer = made(monkeypatch, {"model.use_remove_padding": remove_padding}, planner=name)
    assert type(packer.planner) is kind
    assert packer.planner.mini_batch_size == 32
    assert packer.pads_rows is not remove_padding


@pytest.mark.parametrize(
    ("changes", "budget", "source"),
    [
        ({}, 3 * 50, "actor.ppo_micro_batch_size_per_gpu x (data.max_prompt_length + data.max_response_length)"),
        ({"actor.ppo_micro_batch_size_per_gpu": 1}, 50, "actor.ppo_micro_batch_size_per_gpu x"),
        ({"actor.ppo_micro_batch_size_per_gpu": None}, 100, "actor.ppo_max_token_len_per_gpu x 1 devices"),
        ({"actor.use_dynamic_bsz": True}, 100, "actor.ppo_max_token_len_per_gpu x 1 devices"),
        (DYNAMIC, 80, "rollout.log_prob_max_token_len_per_gpu x 1 devices"),
        (DYNAMIC | {"rollout.log_prob_max_token_len_per_gpu": 900}, 100, "actor.ppo_max_token_len_per_gpu x 1"),
        (DYNAMIC | {"actor.use_kl_loss": True}, 60, "ref.log_prob_max_token_len_per_gpu x 1 devices"),
        (
            DYNAMIC | {"actor.fsdp_config.ulysses_sequence_parallel_size": 4},
            320,
            "rollout.log_prob_max_token_len_per_gpu x 4",
        ),
    ],
)
@pytest.mark.parametrize("remove_padding", [True, False])
def test_rows_fit_into_the_memory_that_verl_was_given(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changes, budget, source, remove_padding
):
    with caplog.at_level("INFO", packing.__name__):
        packer = made(monkeypatch, changes | {"model.use_remove_padding": remove_padding})
    assert packer.planner.token_budget == budget
    assert f"packing: rows of at most {budget} tokens, from {source}" in caplog.text


def test_a_budget_that_is_given_is_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", packing.__name__):
        assert made(monkeypatch, token_budget=7).planner.token_budget == 7
    assert "packing: rows of at most 7 tokens, from partial_rollout.packing.token_budget" in caplog.text


@pytest.mark.parametrize(
    ("changes", "options", "line"),
    [
        ({}, {"planner": "global"}, "packing: planner=global (GlobalPlanner), rows are packed"),
        (
            {"model.use_remove_padding": False},
            {"planner": "global"},
            "packing: planner=global (PaddedPlanner), rows are padded to their longest sample, because"
            " model.use_remove_padding=False",
        ),
    ],
)
def test_the_log_says_what_runs(monkeypatch, caplog: pytest.LogCaptureFixture, changes, options, line: str):
    with caplog.at_level("INFO", packing.__name__):
        made(monkeypatch, changes, **options)
    assert line in caplog.messages


def test_the_cost_is_the_models(monkeypatch: pytest.MonkeyPatch):
    models = made(monkeypatch).planner.cost
    assert models.linear > 1000 * models.quadratic > 0
    assert models != packing.CostModel.verl()


def test_a_model_that_hides_its_sizes_is_costed_as_verl_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packing, "_text_config", lambda _: SimpleNamespace(hidden_size=8))
    hidden = make_batch_packer(config_of({}), PartialRolloutConfig())
    assert hidden is not None
    assert isinstance(hidden.planner, GlobalPlanner)
    assert hidden.planner.cost == packing.CostModel.verl()
