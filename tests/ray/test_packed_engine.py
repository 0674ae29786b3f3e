"""Two ranks of verl's FSDP engine: a plan changes who computes what and in how many pieces, and nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch

from partial_rollout.run.quickstart import warm_start
from partial_rollout.run.quickstart.tokenizer import build_tokenizer
from tests.preloaded import client
from tests.ray.packed_ranks import LENGTHS, LOSS_MODES, NUM_RANKS, PLANNERS

if TYPE_CHECKING:
    from pathlib import Path

RANKS_TIMEOUT_S = 300
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
"""Sums of fp32 in another order."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, repository: Path, nursery: Path) -> dict[str, Any]:
    """What the ranks of `packed_ranks` computed."""
    folder = tmp_path_factory.mktemp("ranks")
    tokenizer = build_tokenizer(warm_start.MAX_POSITIONS)
    torch.manual_seed(0)
    warm_start.build_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [_start(rank, port, folder, repository, nursery) for rank in range(NUM_RANKS)]
    outputs = [rank.communicate(timeout=RANKS_TIMEOUT_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][-4000:]
    return torch.load(folder / "found.pt", weights_only=False)


def _start(rank: int, port: str, folder: Path, repository: Path, nursery: Path) -> subprocess.Popen[str]:
    environment = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "RAY_LOCAL_RANK": str(rank), "RAY_LOCAL_WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.Popen(
        [client(nursery), "-m", "tests.ray.packed_ranks", str(folder)],
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=repository,
    )  # fmt: skip


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("mode", LOSS_MODES)
def test_loss_and_gradient_of_a_mini_batch_are_verls(found: dict[str, Any], mode: str, planner: str):
    verls, ours = found[mode]["verl"], found[mode][planner]
    assert ours["loss"] == pytest.approx(verls["loss"], rel=1e-4)
    assert verls["gradient"].norm() > 1e-3
    torch.testing.assert_close(ours["gradient"], verls["gradient"], **TOLERANCE)


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_micro_batch_reports_its_metrics(found: dict[str, Any], planner: str):
    ours = found["token-mean"][planner]
    assert ours["rows"] > 1
    assert ours["reported_rows"] == [ours["rows"]]
    assert set(ours["metrics"].values()) == {ours["rows"]}
    assert ours["metrics"].keys() == found["token-mean"]["verl"]["metrics"].keys()


@pytest.mark.parametrize("planner", PLANNERS)
def test_log_probs_come_back_to_their_samples(found: dict[str, Any], planner: str):
    verls, ours = found["log_probs"]["verl"], found["log_probs"][planner]
    assert sorted(ours) == list(range(len(LENGTHS)))
    for index, length in enumerate(LENGTHS):
        # The last value belongs to a token that follows the sample: nobody reads it, and it depends on the neighbour.
        assert len(ours[index]) == length
        torch.testing.assert_close(ours[index][:-1], verls[index][:-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "varlen_sdpa"])
@pytest.mark.parametrize("planner", ["verl", *PLANNERS])
def test_packed_rows_have_the_gradient_of_padded_ones(found: dict[str, Any], attention: str, planner: str):
    padded, packed = found["token-mean"]["verl"], found["packed"][attention][planner]
    torch.testing.assert_close(packed["gradient"], padded["gradient"], **TOLERANCE)


def test_ranks_with_different_numbers_of_rows_all_raise(found: dict[str, Any]):
    assert "ranks have from 1 to 2 rows in one mini-batch" in found["uneven"]


def test_verl_chooses_the_packed_engine(found: dict[str, Any]):
    assert "PackedFSDPEngine" in found["engine"]
