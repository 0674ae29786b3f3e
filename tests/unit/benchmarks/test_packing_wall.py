"""The wall clock of planners: what runs on GPUs, on a CPU with a tiny model; what a limit leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.tensor import DTensor
from torch.multiprocessing import ProcessRaisedException

from benchmarks import bench_packing_wall
from benchmarks.bench_packing_wall import (
    LOSS_CHUNK,
    SMALL,
    Trainee,
    Training,
    batches,
    packed_step,
    parse,
    policy_gradient,
    result_of,
    spread,
    summary,
    training,
)
from partial_rollout.packing import attention as varlen_attention

PADDED = {"strided", "verl", "global (by length)"}
TINY = [
    "--shape=tiny", "--shrink=32", "--per-rank=4", "--per-row=2", "--token-budget=256", "--batches=1", "--repeats=1",
]  # fmt: skip


def record(number: int, batch: int = 0, *, part: str = "packed", names: set[str] | None = None) -> dict[str, Any]:
    """Each method takes as many seconds as there are before it, and one more."""
    ordered = ["strided", *sorted((names or {"strided", "ours"}) - {"strided"})]
    numbers = {"micro_batches": 2, "padding": 0.5}
    methods = {name: {"seconds": 1.0 + at} | numbers for at, name in enumerate(ordered)}
    return {"part": part, "repeat": number, "batch": batch, "methods": methods}


def test_a_comparison_that_was_cut_off_counts_whole_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["bench_packing_wall", "--batches=2", "--repeats=3", "--parts=packed"])
    records = [record(number, batch) for number in (0, 1) for batch in (0, 1)] + [record(2)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(each) + "\n" for each in records))
    result = result_of(parse(), rows, "")
    assert (result["ended"], result["whole_repeats"]) == ("limit", {"packed": 1})
    assert result["packed"]["ours"]["ratio_to_strided"] == {"median": 2.0, "q1": 2.0, "q3": 2.0}


def test_the_warm_up_does_not_count():
    slow = record(0)
    slow["methods"]["ours"]["seconds"] = 100.0
    assert summary([slow, record(1), record(2)])["ours"]["seconds"]["q3"] == 2.0


def test_batches_have_a_tenth_of_their_responses_at_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["bench_packing_wall", "--batches=100", "--per-rank=32", "--shrink=1"])
    drawn = [length for batch in batches(parse()) for length in batch]
    assert len(drawn) == 100 * 64
    assert sum(length > 4096 for length in drawn) / len(drawn) == pytest.approx(0.1, abs=0.02)


def test_a_failed_rank_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def ranks(_run: Any, arguments: tuple[Any, ...], nprocs: int) -> None:
        rows = [record(1, part="padded", names=PADDED), record(0)]
        Path(arguments[-1]).write_text("".join(json.dumps(each) + "\n" for each in rows))
        raise ProcessRaisedException(f"one of {nprocs}\nOutOfMemoryError: full\n", error_index=0, error_pid=1)

    out = tmp_path / "result.json"
    monkeypatch.setattr(bench_packing_wall, "spawn", ranks)
    monkeypatch.setattr(sys, "argv", ["bench_packing_wall", *TINY, f"--json={out}"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="OutOfMemoryError: full"):
        bench_packing_wall.main()
    result = json.loads(out.read_text())
    assert (result["ended"], result["whole_repeats"]) == ("OutOfMemoryError: full", {"packed": 0, "padded": 1})
    assert (set(result["padded"]), result["packed"]) == (PADDED, {})


def test_a_dry_run_shows_methods_and_batches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["bench_packing_wall", *TINY, "--dry-run"])
    monkeypatch.setattr(bench_packing_wall, "spawn", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench_packing_wall.main()
    packed, padded = capsys.readouterr().out.splitlines()
    assert "['strided', 'verl', 'global']" in packed
    assert "['strided', 'verl', 'global (by length)']" in padded


def test_a_limit_that_is_over_leaves_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "new" / "result.json"
    monkeypatch.setattr(bench_packing_wall, "spawn", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["bench_packing_wall", *TINY, f"--json={out}", "--limit-s=0", "--parts=padded"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench_packing_wall.main()
    result = json.loads(out.read_text())
    assert (result["ended"], result["whole_repeats"], result["padded"]) == ("limit", {"padded": 0}, {})
    assert "packed" not in result


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_are_sharded_over_both_ranks_if_asked(monkeypatch: pytest.MonkeyPatch, sharded: bool):
    """A single rank of a group of one: every parameter is its part of a sharded one, and gradients come."""
    monkeypatch.setattr(sys, "argv", ["bench_packing_wall", *TINY, *(["--fsdp2"] if sharded else [])])
    monkeypatch.setattr(bench_packing_wall, "NUM_RANKS", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainee = Trainee(parse(), 0, get_free_port())
    try:
        trainee.model.set_attn_implementation(varlen_attention.NAME)
        packed_step(trainee, [trainee.make_sample(5), trainee.make_sample(3)])
        assert {isinstance(each, DTensor) for each in trainee.model.parameters()} == {sharded}
        assert all(each.grad is not None for each in trainee.model.parameters())
    finally:
        dist.destroy_process_group()


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
    assert training("tiny", checkpointing=False) == Training("cuda", "nccl", "bfloat16", gradient_checkpointing=False)


def test_one_gpu_is_too_few(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="--shape=8b takes 2 GPUs, not 1"):
        training("8b")
