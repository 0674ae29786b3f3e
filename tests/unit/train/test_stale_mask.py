"""Exactly the tokens that old weights sampled leave the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from partial_rollout.train import stale_mask
from partial_rollout.train.stale_mask import StaleTokens, mask_stale_tokens, masked
from partial_rollout.types import TrajectorySummary, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence


class MaskStore:
    """The masks of trajectories, as TransferQueue keeps them."""

    def __init__(self, **masks: list[int]) -> None:
        self.masks = {name: torch.tensor(mask) for name, mask in masks.items()}
        self.written: dict[str, dict[str, list[int]]] = {}

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        assert (partition_id, select_fields) == ("train", ["response_mask"])
        rows = torch.nested.as_nested_tensor([self.masks[key] for key in keys], layout=torch.jagged)
        return TensorDict({"response_mask": rows}, batch_size=[len(keys)])

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Any) -> None:
        for name in ("response_mask", "loss_mask"):
            rows = [row.tolist() for row in fields[name].unbind()]
            self.written.setdefault(name, {}).update(zip(keys, rows, strict=True))


def trajectory(key: str, *spans: tuple[int, int]) -> TrajectorySummary:
    versions = [version for version, _ in spans]
    return TrajectorySummary(
        key, 3, 9, min(versions), max(versions), version_spans=tuple(VersionSpan(*s) for s in spans)
    )


@pytest.mark.parametrize(
    ("row", "spans", "expected"),
    [
        ([1, 1, 1, 1], [(2, 3), (4, 1)], [0, 0, 0, 1]),
        ([1, 0, 0, 1, 1], [(2, 2), (4, 1)], [0, 0, 0, 0, 1]),
        ([1, 1], [(2, 1), (4, 1), (2, 9)], [0, 1]),
        ([1, 1, 1], [(2, 1), (4, 1)], [0, 1, 1]),
        ([1, 1], [], [0, 0]),
    ],
    ids=["prefix", "tool answers are skipped", "cut response", "tokens without a span", "no spans"],
)
def test_a_row(row: list[int], spans: list[tuple[int, int]], expected: list[int]) -> None:
    given = torch.tensor(row)
    assert masked(given, [VersionSpan(*span) for span in spans], oldest_version=3).tolist() == expected
    assert given.tolist() == row


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MaskStore:
    store = MaskStore(a_0_0=[1, 1, 1], a_1_0=[1, 1], a_2_0=[1, 1], a_2_1=[1, 0, 1])
    monkeypatch.setattr(stale_mask, "tq", store)
    return store


def test_only_rows_with_old_tokens_are_written_under_both_names(store: MaskStore) -> None:
    members = [trajectory("a_0_0", (2, 2), (3, 1)), trajectory("a_1_0", (3, 2))]
    assert mask_stale_tokens(members, oldest_version=3, partition_id="train", mini_batch=2) == StaleTokens(2, 0)
    assert store.written == {"response_mask": {"a_0_0": [0, 0, 1]}, "loss_mask": {"a_0_0": [0, 0, 1]}}
    assert mask_stale_tokens(members, oldest_version=2, partition_id="train", mini_batch=2) == StaleTokens()


def test_a_trajectory_of_several_outputs_is_masked_as_a_whole(store: MaskStore) -> None:
    outputs = [TrajectorySummary("a_2_0", 3, 2, 2, 4), trajectory("a_2_1", (2, 1), (4, 1))]
    members = [*outputs, trajectory("a_1_0", (4, 2))]
    assert mask_stale_tokens(members, oldest_version=3, partition_id="train", mini_batch=3) == StaleTokens(4, 0)
    assert store.written["loss_mask"] == {"a_2_0": [0, 0], "a_2_1": [0, 0, 0]}


def test_a_batch_of_nothing_but_old_tokens_is_left_as_it_is(store: MaskStore) -> None:
    stale = mask_stale_tokens([trajectory("a_1_0", (2, 2))], oldest_version=3, partition_id="train", mini_batch=2)
    assert stale == StaleTokens(num_masked=0, num_trained=2)
    assert store.written == {}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_a_mini_batch_without_a_token_has_no_loss_with_verl(mode: str) -> None:
    """Why whole mini-batches are never masked; when this fails they may be."""
    agg_loss = pytest.importorskip("verl.trainer.ppo.core_algos").agg_loss
    assert torch.isnan(agg_loss(torch.ones(2, 3), torch.zeros(2, 3), mode))


def test_fewer_trajectories_than_a_mini_batch_lose_all_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of six are too old: whichever two meet in a mini-batch, one of them has a token."""
    keys = [f"a_{index}_0" for index in range(6)]
    store = MaskStore(**{key: [1, 1] for key in keys})
    monkeypatch.setattr(stale_mask, "tq", store)
    members = [trajectory(key, (version, 2)) for key, version in zip(keys, (4, 2, 1, 2, 2, 2), strict=True)]
    assert mask_stale_tokens(members, oldest_version=3, partition_id="train", mini_batch=2) == StaleTokens(2, 8)
    kept = [key for key in keys if any(store.written["loss_mask"].get(key, [1]))]
    assert kept == [keys[0], keys[1], *keys[3:]]


@pytest.mark.parametrize(
    ("spans", "mini_batch", "masked"),
    [([((2, 1), (4, 1))] * 6, 2, 6), ([((2, 2),)] * 2 + [((4, 2),)] * 4, 4, 4)],
    ids=["each has a token left", "too few to fill a mini-batch"],
)
def test_nothing_old_is_trained_where_each_mini_batch_has_a_token_anyway(
    spans: list[tuple[tuple[int, int], ...]], mini_batch: int, masked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [trajectory(f"a_{index}_0", *each) for index, each in enumerate(spans)]
    monkeypatch.setattr(stale_mask, "tq", MaskStore(**{member.key: [1, 1] for member in members}))
    found = mask_stale_tokens(members, oldest_version=3, partition_id="train", mini_batch=mini_batch)
    assert found == StaleTokens(masked, 0)
