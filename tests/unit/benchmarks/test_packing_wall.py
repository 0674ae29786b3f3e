"""The wall clock of planners: what runs on GPUs, on a CPU with a tiny model; what a limit leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from benchmarks import bench_packing_wall
from benchmarks.bench_packing_wall import repeats_whole, spread, summary, whole
from benchmarks.packing_steps import (
    LOSS_CHUNK,
    SMALL,
    Training,
    policy_gradient,
    training,
)

PACKED = {"strided", "verl", "fixed", "budget", "global"}
PADDED = {"strided", "verl", "fixed", "global (by length)"}
FEW = ["--shape=tiny", "--shrink=32", "--per-rank=4", "--per-row=2"]
TINY = [*FEW, "--token-budget=256", "--batches=1", "--repeats=1"]


def row(method: str, number: int, batch: int = 0, seconds: float = 1.0) -> dict[str, Any]:
    return {"method": method, "repeat": number, "batch": batch, "seconds": seconds} | {
        "micro_batches": 2,
        "padding_share_if_padded": 0.5,
    }


def test_a_comparison_that_was_cut_off_counts_where_all_methods_ran():
    methods = ("strided", "ours")
    kept = [row(method, 1, batch) for batch in (0, 1) for method in methods] + [row(name, 2) for name in methods]
    records = [row(name, 0) for name in methods] + kept + [row("strided", 2, 1, seconds=100.0)]
    assert whole(records, len(methods)) == kept
    assert repeats_whole(kept, num_batches=2) == 1
    assert summary(kept)["ours"]["seconds"]["q3"] == 1.0


def test_a_failed_rank_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def ranks(_run: Any, arguments: tuple[Any, ...], nprocs: int) -> None:
        rows = [{"part": "padded"} | row(name, 1) for name in PADDED] + [{"part": "packed"} | row("strided", 0)]
        Path(arguments[-1]).write_text("".join(json.dumps(each) + "\n" for each in rows))
        raise ProcessRaisedException(f"one of {nprocs}\nOutOfMemoryError: full\n", error_index=0, error_pid=1)

    out = tmp_path / "result.json"
    monkeypatch.setattr(bench_packing_wall, "spawn", ranks)
    monkeypatch.setattr(sys, "argv", ["bench_packing_wall", *TINY, f"--json={out}"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="OutOfMemoryError: full"):
        bench_packing_wall.main()
    result = json.loads(out.read_text())
    assert (result["ended"], result["repeats_whole"]) == ("OutOfMemoryError: full", {"packed": 0, "padded": 1})
    assert (set(result["padded"]), result["packed"]) == (PADDED, {})


def test_a_limit_that_is_over_leaves_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "new" / "result.json"
    monkeypatch.setattr(bench_packing_wall, "spawn", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["bench_packing_wall", *TINY, f"--json={out}", "--limit-s=0", "--parts=padded"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench_packing_wall.main()
    result = json.loads(out.read_text())
    assert (result["ended"], result["repeats_whole"], result["padded"]) == ("limit", {"padded": 0}, {})
    assert "packed" not in result


def test_one_value_has_no_spread():
    assert spread([0.5]) == {"median": 0.5, "q1": 0.5, "q3": 0.5}


def plain(logits: torch.Tensor, tokens: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Sum of advantage x log-prob: logits (B, T, V), the others (B, T)."""
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (log_probs * advantages[:, 1:]).sum()


@pytest.mark.parametrize("width", [7, LOSS_CHUNK // 2 + 3])
def test_the_loss_in_chunks_is_the_loss(width: int):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, (2, width), generator=generator)
    advantages = torch.randn(2, width, generator=generator)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for loss in (plain, policy_gradient):
        logits = torch.randn(2, width, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        logits.requires_grad_()
        value = loss(logits, tokens, advantages)
        value.backward()
        assert logits.grad is not None
        found.append((value.detach(), logits.grad))
    torch.testing.assert_close(found[1], found[0])


def test_the_small_shape_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert training(SMALL) == Training("cpu", "gloo", "float32", gradient_checkpointing=False)
    assert training("tiny") == Training("cuda", "nccl", "bfloat16", gradient_checkpointing=True)


def test_one_gpu_is_too_few(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="--shape=8b takes 2 GPUs, not 1"):
        training("8b")
