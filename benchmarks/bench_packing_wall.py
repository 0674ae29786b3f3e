"""Wall clock of a mini-batch's forward and backward on two ranks, by who decides which samples train together.

    python -m benchmarks.bench_packing_wall --json benchmarks/results/bench_packing_wall.json
    python -m benchmarks.bench_packing_wall --shape qwen3-0.6b --shrink 1 --limit-s 60 \\
        --token-budget 16384 --per-rank 32 --batches 3 --repeats 2 --warm-up-batches 1 --parts packed --json OUT

Two processes with one thread each are two data-parallel ranks; they meet in a barrier after every micro-batch, as
FSDP's collectives make them. Two parts:

- `packed`: rows without padding, attention of each sequence on its own (`varlen_sdpa`). Strided order, verl's own
  partition and micro-batches, and our planners, with the counts verl's dispatch needs; same token budget.
- `padded`: rows padded to their longest sample, attention `sdpa`: what a run without `use_remove_padding` does.
  Strided and verl's partition in micro-batches of `--per-row` samples, and ours.

A small Qwen3 is trained on two CPU ranks (gloo), on lengths of the published distribution divided by `--shrink` (so
that attention's share of the time is about that of a 7B model at full length with `--shrink 8`). Another `--shape` is
trained on two GPUs of one host (NCCL, bf16) where there are GPUs, with gradient checkpointing as in the recipes and
without cuDNN's attention, which builds a plan for each new length. The clock waits for the GPUs.

Every repeat runs every method on every batch once, in an order that turns with each repeat. Reported: seconds a step
(median, quartiles over batches and repeats), and the ratio to strided on the same batch of the same repeat. Each run is
also written beside the result at once (`.rows.jsonl`, repeat 0 is the warm-up), so that a run that fails leaves what it
measured; `--limit-s` counts from the end of the imports and includes the start of the ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, rearrange_micro_batches

from benchmarks.packing_steps import MAX_POSITIONS, NUM_RANKS, SMALL, Trainee, packed_step, padded_step, training
from partial_rollout.advise.result import circumstances, devices, store, versions
from partial_rollout.advise.shapes import SHAPES
from partial_rollout.packing import FixedCountPlanner, GlobalPlanner, Plan, TokenBudgetPlanner
from partial_rollout.packing import attention as varlen_attention
from partial_rollout.packing.batch import cost_of
from partial_rollout.packing.plan import sample_padding_share
from partial_rollout.packing.planners import PaddedPlanner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.packing_steps import Step
    from partial_rollout.packing.attention import Sample

    Method = Callable[[list[int], int], Plan]

WARM_UP_REPEATS = 1
COMPLETION_MEDIAN, COMPLETION_SIGMA, COMPLETION_CAP = 700, 0.9, 4096
CUT_SHARE, CUT_SHARE_OF_LOG_NORMAL = 0.10, 0.0248
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_CAP = 256, 0.4, 1024
PARTS = ("packed", "padded")


def draw_lengths(num: int, seed: int) -> list[int]:
    """Tokens of prompt and completion of `num` samples."""
    rng, further = random.Random(seed), (CUT_SHARE - CUT_SHARE_OF_LOG_NORMAL) / (1 - CUT_SHARE_OF_LOG_NORMAL)
    lengths: list[int] = []
    for _ in range(num):
        completion = rng.lognormvariate(math.log(COMPLETION_MEDIAN), COMPLETION_SIGMA)
        cut = rng.random() < further or completion > COMPLETION_CAP
        prompt = min(PROMPT_CAP, rng.lognormvariate(math.log(PROMPT_MEDIAN), PROMPT_SIGMA))
        lengths.append((COMPLETION_CAP if cut else max(1, round(completion))) + max(1, round(prompt)))
    return lengths


def strided(per_rank: int) -> Method:
    """Samples in turn; each rank cuts its own into micro-batches of `per_rank`."""

    def plan(lengths: list[int], num_ranks: int) -> Plan:
        ranks = [range(rank, len(lengths), num_ranks) for rank in range(num_ranks)]
        starts = range(0, len(ranks[0]), per_rank)
        return as_plan([[list(rank[at : at + per_rank]) for rank in ranks] for at in starts])

    return plan


def verl_path(token_budget: int) -> Method:
    """What verl's trainer and engine do with `use_dynamic_bsz`: partition, then micro-batches on each rank."""

    def plan(lengths: list[int], num_ranks: int) -> Plan:
        ranks = partition(workload(lengths), num_ranks)
        number = 1
        while True:
            cut = [rank_micro_batches([lengths[i] for i in rank], token_budget, number) for rank in ranks]
            if len({len(rows) for rows in cut}) == 1:
                break
            number = max(map(len, cut))
        rows = [[[rank[i] for i in row] for row in rows] for rank, rows in zip(ranks, cut, strict=True)]
        return as_plan([list(micro_batch) for micro_batch in zip(*rows, strict=True)])

    return plan


def rank_micro_batches(lengths: list[int], token_budget: int, at_least: int) -> list[list[int]]:
    """verl's micro-batches of one rank, without the all-reduce that agrees on their number."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    batch = TensorDict({"input_ids": mask, "attention_mask": mask}, batch_size=len(lengths))
    # verl says list[None] in its annotations.
    return cast("list[list[int]]", rearrange_micro_batches(batch, token_budget, min_num_micro_batch=at_least)[1])


def partition(weights: list[int], num_ranks: int) -> list[list[int]]:
    """verl's partition into parts of equal size, by Karmarkar-Karp."""
    parts: Any = get_seqlen_balanced_partitions(weights, num_ranks, equal_size=True)
    return parts


def workload(lengths: list[int]) -> list[int]:
    """verl's 24576 * L + L^2."""
    return calculate_workload(torch.tensor(lengths)).tolist()


def as_plan(micro_batches: list[list[list[int]]]) -> Plan:
    """A plan nobody checked."""
    return Plan(tuple(tuple(map(tuple, rows)) for rows in micro_batches), (len(micro_batches),))


def packed_methods(options: argparse.Namespace) -> dict[str, Method]:
    """Strided first: the base of the ratios."""
    budget, cost = options.token_budget, cost_of(SHAPES[options.shape].config(MAX_POSITIONS))
    return {
        "strided": strided(options.per_row),
        "verl": verl_path(budget),
        "fixed": FixedCountPlanner(per_rank_batch_size=options.per_row).plan,
        "budget": TokenBudgetPlanner(token_budget=budget, equal_counts=True).plan,
        "global": GlobalPlanner(token_budget=budget, equal_counts=True, cost=cost).plan,
    }


def padded_methods(options: argparse.Namespace) -> dict[str, Method]:
    """With `fixed` and ours bounded by the same number of padded tokens as the widest row of the others."""

    def verl_counts(lengths: list[int], num_ranks: int) -> Plan:
        order = [i for rank in partition(workload(lengths), num_ranks) for i in rank]
        return cut(order, num_ranks, options.per_row)

    budget = options.per_row * max(max(lengths) for lengths in batches(options))
    return {
        "strided": strided(options.per_row),
        "verl": verl_counts,
        "fixed": FixedCountPlanner(per_rank_batch_size=options.per_row).plan,
        "global (by length)": PaddedPlanner(token_budget=budget).plan,
    }


def cut(order: Sequence[int], num_ranks: int, per_row: int) -> Plan:
    """Equal consecutive parts for the ranks, each in rows of `per_row`."""
    size = len(order) // num_ranks
    ranks = [order[at : at + size] for at in range(0, len(order), size)]
    return as_plan([[list(rank[at : at + per_row]) for rank in ranks] for at in range(0, size, per_row)])


def batches(options: argparse.Namespace) -> list[list[int]]:
    """Lengths of every batch."""
    num = options.per_rank * NUM_RANKS
    return [[max(2, n // options.shrink) for n in draw_lengths(num, seed)] for seed in range(options.batches)]


def methods_of(part: str, options: argparse.Namespace) -> dict[str, Method]:
    """The planners that a part compares."""
    return packed_methods(options) if part == "packed" else padded_methods(options)


def run_rank(rank: int, options: argparse.Namespace, port: int, deadline: float, rows: str) -> None:
    """One rank: every method on every batch, repeat after repeat; rank 0 appends each record to `rows` at once."""
    torch.set_num_threads(1)
    trainee = Trainee(options.shape, rank, port)
    with Path(rows if rank == 0 else os.devnull).open("a", encoding="utf-8") as out:
        for part in options.parts:
            for record in measure(trainee, options, part, deadline):
                out.write(json.dumps({"part": part} | record) + "\n")
                out.flush()
    dist.destroy_process_group()


def measure(trainee: Trainee, options: argparse.Namespace, part: str, deadline: float) -> Iterator[dict[str, Any]]:
    """A record for each method, batch and repeat; the first repeats warm up; no repeat begins after `deadline`."""
    methods, step = methods_of(part, options), packed_step if part == "packed" else padded_step
    trainee.model.set_attn_implementation(varlen_attention.NAME if part == "packed" else "sdpa")
    names = list(methods)
    for number in range(options.repeats + WARM_UP_REPEATS):
        if not trainee.agree(time.monotonic() < deadline):
            return
        num_batches = options.warm_up_batches if number < WARM_UP_REPEATS else None
        for batch, lengths in enumerate(batches(options)[:num_batches]):
            samples = [trainee.make_sample(length) for length in lengths]
            turn = (number + batch) % len(names)
            for name in names[turn:] + names[:turn]:
                plan = methods[name](lengths, NUM_RANKS)
                seconds = timed(trainee, step, [[samples[i] for i in row] for row in plan.for_rank(trainee.rank)])
                yield {"method": name, "batch": batch, "repeat": number, "seconds": seconds} | shape(plan, lengths)


def shape(plan: Plan, lengths: list[int]) -> dict[str, float]:
    """What the plan looks like."""
    return {"micro_batches": plan.num_micro_batches, "padding_share_if_padded": sample_padding_share(plan, lengths)}


def timed(trainee: Trainee, step: Step, rows: list[list[Sample]]) -> float:
    """Seconds from the first barrier to the last."""
    trainee.model.zero_grad()
    trainee.meet()
    started = time.perf_counter()
    for row in rows:
        step(trainee, row)
        trainee.meet()
    return time.perf_counter() - started


def whole(records: list[dict[str, Any]], num_methods: int) -> list[dict[str, Any]]:
    """Records after the warm-up, of batches and repeats in which every method was measured."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for record in records:
        if record["repeat"] >= WARM_UP_REPEATS:
            groups.setdefault((record["repeat"], record["batch"]), []).append(record)
    return [record for group in groups.values() if len(group) == num_methods for record in group]


def repeats_whole(records: list[dict[str, Any]], num_batches: int) -> int:
    """Repeats of which all batches are in `records`."""
    found = {(record["repeat"], record["batch"]) for record in records}
    repeats = [number for number, _ in found]
    return sum(repeats.count(number) == num_batches for number in set(repeats))


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """By method."""
    base = {(r["batch"], r["repeat"]): r["seconds"] for r in records if r["method"] == "strided"}
    found: dict[str, Any] = {}
    for name in dict.fromkeys(record["method"] for record in records):
        mine = [record for record in records if record["method"] == name]
        ratios = [record["seconds"] / base[record["batch"], record["repeat"]] for record in mine]
        found[name] = {
            "seconds": spread([record["seconds"] for record in mine]),
            "ratio_to_strided": spread(ratios),
            "micro_batches": round(statistics.mean(record["micro_batches"] for record in mine), 2),
            "padding_share_if_padded": round(statistics.mean(r["padding_share_if_padded"] for r in mine), 3),
        }
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4)}


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default=SMALL, help="of the model (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run (default: both)")
    parser.add_argument(
        "--per-rank", type=int, default=16, help="samples a rank in a mini-batch (default: %(default)s)"
    )
    parser.add_argument("--per-row", type=int, default=4, help="samples of a row, where counted (default: %(default)s)")
    parser.add_argument("--token-budget", type=int, default=1024, help="tokens of a packed row (default: %(default)s)")
    parser.add_argument("--shrink", type=int, default=8, help="divisor of the lengths (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=6, help="mini-batches (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=5, help="times that each method runs each (default: %(default)s)"
    )
    parser.add_argument("--warm-up-batches", type=int, help="mini-batches of the repeat before them (default: all)")
    parser.add_argument("--limit-s", type=float, help="seconds after which no further repeat begins (default: none)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result here, and each row beside it")
    return parser.parse_args()


def run_ranks(options: argparse.Namespace, deadline: float, rows: Path) -> str:
    """Run both ranks; the last line of what went wrong, if anything did."""
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_text("", encoding="utf-8")
    try:
        spawn(run_rank, (options, get_free_port(), deadline, str(rows)), nprocs=NUM_RANKS)
    except (ProcessRaisedException, ProcessExitedException) as error:
        print(error, file=sys.stderr)
        return str(error).strip().splitlines()[-1]
    return ""


def result_of(options: argparse.Namespace, rows: Path, error: str) -> dict[str, Any]:
    """Summaries of what was measured, and how far it got."""
    records = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    parts = {
        part: whole([r for r in records if r["part"] == part], len(methods_of(part, options))) for part in options.parts
    }
    repeats = {part: repeats_whole(found, options.batches) for part, found in parts.items()}
    ended = error or ("limit" if min(repeats.values()) < options.repeats else "done")
    return {"ended": ended, "repeats_whole": repeats} | {part: summary(found) for part, found in parts.items()}


def main() -> None:
    """Run both ranks, print what they measured, and store it even where they failed."""
    options = parse()
    deadline = time.monotonic() + (math.inf if options.limit_s is None else options.limit_s)
    how = training(options.shape)
    run = circumstances(options) | {
        "versions": versions(),
        "devices": devices() if how.device == "cuda" else [],
        "training": asdict(how),
        "model": asdict(SHAPES[options.shape]),
    }
    with tempfile.TemporaryDirectory() as folder:
        rows = options.json.with_suffix(".rows.jsonl") if options.json else Path(folder) / "rows.jsonl"
        error = run_ranks(options, deadline, rows)
        result = run | result_of(options, rows, error)
    print(json.dumps(result, indent=2))
    store(result, options.json)
    if error:
        raise SystemExit(f"a rank failed, and what was measured before is in the result: {error}")


if __name__ == "__main__":
    main()
