"""Wall clock of a mini-batch's forward and backward on two CPU ranks, by who decides which samples train together.

    python -m benchmarks.bench_packing_wall --json benchmarks/results/bench_packing_wall.json

Two processes with one thread each are two data-parallel ranks; they meet in a gloo barrier after every micro-batch, as
FSDP's collectives make them. A small Qwen3 is trained on lengths of the published distribution divided by `--shrink`
(so that attention's share of the time is about that of a 7B model at full length with `--shrink 8`). Two parts:

- `packed`: rows without padding, attention of each sequence on its own (`varlen_sdpa`). Strided order, verl's own
  partition and micro-batches, and our planners, with the counts verl's dispatch needs; same token budget.
- `padded`: rows padded to their longest sample, attention `sdpa`: what a CPU run without `use_remove_padding` does.
  Strided and verl's partition in micro-batches of `--per-row` samples, and ours.

Every round runs every method on every batch once, in an order that turns from round to round. Reported: seconds a step
(median, quartiles over batches and rounds), and the ratio to strided on the same batch of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import transformers
from torch.multiprocessing import spawn
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.bench_packing import as_plan, draw_lengths, partition, strided, verl_path, workload
from benchmarks.result import circumstances, store
from partial_rollout.core.packing import CostModel, FixedCountPlanner, GlobalPlanner, Plan, TokenBudgetPlanner
from partial_rollout.core.packing.padded import PaddedPlanner, sample_padding_share
from partial_rollout.train import varlen_attention
from partial_rollout.train.packer import Sample, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Method = Callable[[list[int], int], Plan]
    Part = tuple[dict[str, Method], Callable[[Qwen3ForCausalLM, list[Sample]], None], str]

NUM_RANKS = 2
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
PORT = 29655
WARM_UP_ROUNDS = 1


def cost_model() -> CostModel:
    """Of the model below."""
    return CostModel.from_model(
        hidden_size=SIZES["hidden_size"],
        num_layers=SIZES["num_hidden_layers"],
        num_heads=SIZES["num_attention_heads"],
        num_kv_heads=SIZES["num_key_value_heads"],
        head_dim=SIZES["head_dim"],
        intermediate_size=SIZES["intermediate_size"],
        vocab_size=SIZES["vocab_size"],
    )


def packed_methods(options: argparse.Namespace) -> dict[str, Method]:
    """Strided first: the base of the ratios."""
    budget = options.token_budget
    return {
        "strided": strided(options.per_row),
        "verl": verl_path(budget),
        "fixed": FixedCountPlanner(per_rank_batch_size=options.per_row).plan,
        "budget": TokenBudgetPlanner(token_budget=budget, equal_counts=True).plan,
        "global": GlobalPlanner(token_budget=budget, equal_counts=True, cost=cost_model()).plan,
    }


def padded_methods(options: argparse.Namespace) -> dict[str, Method]:
    """With `fixed` and ours bounded by the same number of padded tokens as the widest row of the others."""

    def verl_counts(lengths: list[int], num_ranks: int) -> Plan:
        order = [i for rank in verl_ranks(lengths, num_ranks) for i in rank]
        return cut(order, num_ranks, options.per_row)

    budget = options.per_row * max(max(lengths) for lengths in batches(options))
    return {
        "strided": strided(options.per_row),
        "verl": verl_counts,
        "fixed": FixedCountPlanner(per_rank_batch_size=options.per_row).plan,
        "global (by length)": PaddedPlanner(token_budget=budget).plan,
    }


def verl_ranks(lengths: list[int], num_ranks: int) -> list[list[int]]:
    """verl's equal-size partition by its workload."""
    return partition(workload(lengths), num_ranks)


def cut(order: Sequence[int], num_ranks: int, per_row: int) -> Plan:
    """Equal consecutive parts for the ranks, each in rows of `per_row`."""
    size = len(order) // num_ranks
    ranks = [order[at : at + size] for at in range(0, len(order), size)]
    return as_plan([[list(rank[at : at + per_row]) for rank in ranks] for at in range(0, size, per_row)])


def batches(options: argparse.Namespace) -> list[list[int]]:
    """Lengths of every batch."""
    num = options.per_rank * NUM_RANKS
    return [[max(2, n // options.shrink) for n in draw_lengths(num, seed)] for seed in range(options.batches)]


def run_rank(rank: int, options: argparse.Namespace, out: str) -> None:
    """One rank: every method on every batch, round after round; rank 0 writes the seconds."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**cast("dict[str, Any]", SIZES), max_position_embeddings=8192))
    parts: dict[str, Part] = {
        "packed": (packed_methods(options), packed_step, varlen_attention.NAME),
        "padded": (padded_methods(options), padded_step, "sdpa"),
    }
    found = {name: measure(model, rank, options, part) for name, part in parts.items()}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(
    model: Qwen3ForCausalLM,
    rank: int,
    options: argparse.Namespace,
    part: Part,
) -> list[dict[str, Any]]:
    """A record for each method, batch and round after the warm-up."""
    methods, step, attention = part
    model.set_attn_implementation(attention)
    names, records = list(methods), []
    for number in range(options.rounds + WARM_UP_ROUNDS):
        for batch, lengths in enumerate(batches(options)):
            samples = [make_sample(length) for length in lengths]
            turn = (number + batch) % len(names)
            for name in names[turn:] + names[:turn]:
                plan = methods[name](lengths, NUM_RANKS)
                seconds = timed(model, step, [[samples[i] for i in row] for row in plan.for_rank(rank)])
                records.append(
                    {"method": name, "batch": batch, "round": number, "seconds": seconds} | shape(plan, lengths)
                )
    return [record for record in records if record["round"] >= WARM_UP_ROUNDS]


def shape(plan: Plan, lengths: list[int]) -> dict[str, float]:
    """What the plan looks like."""
    return {"micro_batches": plan.num_micro_batches, "padding_share_if_padded": sample_padding_share(plan, lengths)}


def timed(model: Qwen3ForCausalLM, step: Callable[..., None], rows: list[list[Sample]]) -> float:
    """Seconds from the first barrier to the last."""
    model.zero_grad()
    dist.barrier()
    started = time.perf_counter()
    for row in rows:
        step(model, row)
        dist.barrier()
    return time.perf_counter() - started


def make_sample(length: int) -> Sample:
    """Tokens do not matter for the time."""
    return Sample(torch.randint(SIZES["vocab_size"], (length,)), {"advantages": torch.randn(length)})


def packed_step(model: Qwen3ForCausalLM, samples: list[Sample]) -> None:
    """Forward and backward of one packed row."""
    row = pack(samples)
    logits = model(row.input_ids, position_ids=row.position_ids, use_cache=False).logits
    policy_gradient(logits, row.input_ids, row.fields["advantages"]).backward()


def padded_step(model: Qwen3ForCausalLM, samples: list[Sample]) -> None:
    """Forward and backward of one padded row."""
    tokens = torch.nn.utils.rnn.pad_sequence([sample.tokens for sample in samples], batch_first=True)
    values = [sample.response["advantages"] for sample in samples]
    advantages = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
    lengths = torch.tensor([len(sample.tokens) for sample in samples])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    logits = model(tokens, attention_mask=mask, use_cache=False).logits
    policy_gradient(logits, tokens, advantages).backward()


def policy_gradient(logits: torch.Tensor, tokens: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Sum of advantage x log-prob."""
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (log_probs * advantages[:, 1:]).sum()


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """By method."""
    base = {(r["batch"], r["round"]): r["seconds"] for r in records if r["method"] == "strided"}
    found: dict[str, Any] = {}
    for name in dict.fromkeys(record["method"] for record in records):
        mine = [record for record in records if record["method"] == name]
        ratios = [record["seconds"] / base[record["batch"], record["round"]] for record in mine]
        found[name] = {
            "seconds": spread([record["seconds"] for record in mine]),
            "ratio_to_strided": spread(ratios),
            "micro_batches": round(statistics.mean(record["micro_batches"] for record in mine), 2),
            "padding_share_if_padded": round(statistics.mean(r["padding_share_if_padded"] for r in mine), 3),
        }
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4)}


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--per-rank", type=int, default=16, help="samples a rank in a mini-batch (default: %(default)s)"
    )
    parser.add_argument("--per-row", type=int, default=4, help="samples of a row, where counted (default: %(default)s)")
    parser.add_argument("--token-budget", type=int, default=1024, help="tokens of a packed row (default: %(default)s)")
    parser.add_argument("--shrink", type=int, default=8, help="divisor of the lengths (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=6, help="mini-batches (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="times each is run by each method (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result here")
    return parser.parse_args()


def main() -> None:
    """Run both ranks and print what they measured."""
    options = parse()
    run = circumstances(options)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "records.json"
        spawn(run_rank, (options, str(out)), nprocs=NUM_RANKS)
        records = json.loads(out.read_text())
    result = {
        **run,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "model": SIZES,
        **{part: summary(found) for part, found in records.items()},
    }
    print(json.dumps(result, indent=2))
    store(result, options.json)


if __name__ == "__main__":
    main()
