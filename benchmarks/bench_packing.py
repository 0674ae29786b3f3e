"""How even the micro-batches of each planner are, what a step would cost, and how long planning takes.

    python -m benchmarks.bench_packing --json benchmarks/results/bench_packing.json

Lengths: completions are log-normal (median 700, sigma 0.9); draws over 4,096 are cut there (2.5 %), and further ones
are set to 4,096 until 10 % are; prompts are log-normal (median 256, sigma 0.4), at most 1,024. Four parts:

- `one micro-batch`: 8 or 16 samples a rank, all in one micro-batch (the budget does not bind);
- `batch`: `--batch` samples a rank, trained in micro-batches, under the token budget where the planner knows one;
- `padded`: the same where every row is padded to its longest sample and costs that; strided and verl take 16 a row;
- `large`: planner time for `--large` samples.

Planners: `strided` (rank r takes samples r, r + ranks, ...), `verl_*` (verl's Karmarkar-Karp partition of equal size,
run from verl on lengths, on its own workload, and on L^2), ours. In `batch`, verl is its trainer's whole path: the
partition by workload, then `rearrange_micro_batches` on each rank until all have the same number of micro-batches; its
milliseconds are those of all ranks, one after the other, with the masks it reads the lengths from. The trainer runs
`budget` and `global` with equal counts, `fixed` as it is, and PaddedPlanner for padded rows.

An imbalance is (max - min) / mean over the rows of a micro-batch, mean over micro-batches; `sum L^2` and tokens. The
step is simulated: the dearest row of every micro-batch, summed, by the cost model of Qwen3-0.6B (`step`) and by verl's
of a 7B model (`step_7b`), as the ratio to strided. `global` is told the first. Nothing is trained here. Times are CPU
time: planners wait for nothing, and the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import verl
from tensordict import TensorDict
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, rearrange_micro_batches

from partial_rollout.advise.result import circumstances, store
from partial_rollout.packing import (
    CostModel,
    FixedCountPlanner,
    GlobalPlanner,
    Plan,
    TokenBudgetPlanner,
    plan_statistics,
    step_cost,
)
from partial_rollout.packing.plan import sample_padding_share
from partial_rollout.packing.planners import PaddedPlanner

if TYPE_CHECKING:
    from collections.abc import Callable

    Method = Callable[[list[int], int], Plan]
    StepOf = Callable[[Plan, list[int], CostModel], float]

RANKS = (1, 4, 8, 16)
COMPLETION_MEDIAN, COMPLETION_SIGMA, COMPLETION_CAP = 700, 0.9, 4096
CUT_SHARE, CUT_SHARE_OF_LOG_NORMAL = 0.10, 0.0248
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_CAP = 256, 0.4, 1024
PER_RANK = (8, 16)
UNBOUND_BUDGET = 2**40
OURS_IN_TRAINER = ("fixed", "budget, equal counts", "global, equal counts")
LARGE_RANKS, LARGE_REPEATS = 8, 7
QWEN3_06B = CostModel.from_model(
    hidden_size=1024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
)


def draw_lengths(num: int, seed: int) -> list[int]:
    """Tokens of prompt and completion of `num` samples."""
    rng, further = random.Random(seed), (CUT_SHARE - CUT_SHARE_OF_LOG_NORMAL) / (1 - CUT_SHARE_OF_LOG_NORMAL)
    lengths: list[int] = []
    for _ in range(num):
        completion = rng.lognormvariate(log(COMPLETION_MEDIAN), COMPLETION_SIGMA)
        cut = rng.random() < further or completion > COMPLETION_CAP
        prompt = min(PROMPT_CAP, rng.lognormvariate(log(PROMPT_MEDIAN), PROMPT_SIGMA))
        lengths.append((COMPLETION_CAP if cut else max(1, round(completion))) + max(1, round(prompt)))
    return lengths


def strided(per_rank: int) -> Method:
    """Samples in turn; each rank cuts its own into micro-batches of `per_rank`."""

    def plan(lengths: list[int], num_ranks: int) -> Plan:
        ranks = [range(rank, len(lengths), num_ranks) for rank in range(num_ranks)]
        starts = range(0, len(ranks[0]), per_rank)
        return as_plan([[list(rank[at : at + per_rank]) for rank in ranks] for at in starts])

    return plan


def verl_partition(weigh: Callable[[list[int]], list[int]]) -> Method:
    """verl's equal-size partition over the ranks, one micro-batch."""

    def plan(lengths: list[int], num_ranks: int) -> Plan:
        return as_plan([partition(weigh(lengths), num_ranks)])

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


def verl_counts(per_rank: int) -> Method:
    """What they do without: partition, then `per_rank` samples a row in the order of the partition."""

    def plan(lengths: list[int], num_ranks: int) -> Plan:
        ranks = partition(workload(lengths), num_ranks)
        starts = range(0, len(ranks[0]), per_rank)
        return as_plan([[rank[at : at + per_rank] for rank in ranks] for at in starts])

    return plan


def padded_step_cost(plan: Plan, lengths: list[int], cost: CostModel) -> float:
    """As `step_cost`, every sample as long as the longest of its row."""
    padded = [[len(row) * cost.of(max(lengths[i] for i in row)) for row in rows] for rows in plan.micro_batches]
    return sum(map(max, padded))


def squares(lengths: list[int]) -> list[int]:
    """L^2."""
    return [length**2 for length in lengths]


def as_plan(micro_batches: list[list[list[int]]]) -> Plan:
    """A plan nobody checked."""
    return Plan(tuple(tuple(map(tuple, rows)) for rows in micro_batches), (len(micro_batches),))


@dataclass
class Row:
    """What one planner did over all seeds; one entry a seed."""

    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        """Record one seed."""
        for name, value in values.items():
            self.samples.setdefault(name, []).append(value)

    def summary(self) -> dict[str, float]:
        """Mean of everything, the worst imbalance, and the median time."""
        result = {name: statistics.mean(values) for name, values in self.samples.items()}
        result["square_imbalance_max"] = max(self.samples["square_imbalance"])
        result["planner_ms"] = statistics.median(self.samples["planner_ms"])
        return {name: round(value, 4) for name, value in result.items()}


def compare(
    methods: dict[str, Method], num_samples: int, num_ranks: int, seeds: int, step_of: StepOf = step_cost
) -> dict[str, Any]:
    """Every planner on the same lengths; strided comes first and is the base of the ratios."""
    rows = {name: Row() for name in methods}
    for seed in range(seeds):
        lengths = draw_lengths(num_samples, seed)
        base: dict[str, float] = {}
        for name, method in methods.items():
            started = time.process_time()
            plan = method(lengths, num_ranks)
            elapsed_ms = (time.process_time() - started) * 1e3
            steps = {"step": step_of(plan, lengths, QWEN3_06B), "step_7b": step_of(plan, lengths, CostModel.verl())}
            base = base or steps
            measured = plan_statistics(plan, lengths)
            rows[name].add(
                square_imbalance=measured.square_imbalance,
                token_imbalance=measured.token_imbalance,
                rank_square_imbalance=measured.rank_square_imbalance,
                padding_share=measured.padding_share,
                sample_padding_share=sample_padding_share(plan, lengths),
                micro_batches=measured.num_micro_batches,
                longest_row_tokens=max(sum(lengths[i] for i in row) for rows in plan.micro_batches for row in rows),
                planner_ms=elapsed_ms,
                **{key: value / base[key] for key, value in steps.items()},
                step_to_perfect=steps["step"] * num_ranks / QWEN3_06B.cost(lengths),
            )
    result: dict[str, Any] = {name: row.summary() for name, row in rows.items()}
    verls = [rows[name].samples["square_imbalance"] for name in ("verl_lengths", "verl_workload") if name in rows]
    for name in OURS_IN_TRAINER if verls else ():
        ours = rows[name].samples["square_imbalance"]
        above = sum(own > min(theirs) for own, *theirs in zip(ours, *verls, strict=True))
        result[f"seeds with {name} above verl"] = above
    return result


def one_micro_batch(options: argparse.Namespace, per_rank: int, num_ranks: int) -> dict[str, Any]:
    """Nothing but the balance: all samples in one micro-batch."""
    methods: dict[str, Method] = {
        "strided": strided(per_rank),
        "verl_lengths": verl_partition(list),
        "verl_workload": verl_partition(workload),
        "verl_squares": verl_partition(squares),
        "fixed": FixedCountPlanner(per_rank).plan,
        "budget": TokenBudgetPlanner(UNBOUND_BUDGET).plan,
        "budget, equal counts": TokenBudgetPlanner(UNBOUND_BUDGET, equal_counts=True).plan,
        "global": GlobalPlanner(UNBOUND_BUDGET, QWEN3_06B).plan,
        "global, equal counts": GlobalPlanner(UNBOUND_BUDGET, QWEN3_06B, equal_counts=True).plan,
    }
    return compare(methods, per_rank * num_ranks, num_ranks, options.seeds)


def whole_batch(options: argparse.Namespace, num_ranks: int) -> dict[str, Any]:
    """A training batch in micro-batches; strided and fixed know no token budget."""
    per_rank = PER_RANK[-1]
    methods: dict[str, Method] = {
        "strided": strided(per_rank),
        "verl": verl_path(options.token_budget),
        "fixed": FixedCountPlanner(per_rank).plan,
        "fixed, model cost": FixedCountPlanner(per_rank, QWEN3_06B).plan,
        "budget": TokenBudgetPlanner(options.token_budget).plan,
        "budget, equal counts": TokenBudgetPlanner(options.token_budget, equal_counts=True).plan,
        "global": GlobalPlanner(options.token_budget, QWEN3_06B).plan,
        "global, equal counts": GlobalPlanner(options.token_budget, QWEN3_06B, equal_counts=True).plan,
    }
    return compare(methods, options.batch * num_ranks, num_ranks, options.seeds)


def padded_batch(options: argparse.Namespace, num_ranks: int) -> dict[str, Any]:
    """A training batch in rows that are padded; strided, verl and fixed know no token budget."""
    per_rank = PER_RANK[-1]
    methods: dict[str, Method] = {
        "strided": strided(per_rank),
        "verl": verl_counts(per_rank),
        "fixed": FixedCountPlanner(per_rank).plan,
        "padded": PaddedPlanner(token_budget=options.token_budget).plan,
    }
    return compare(methods, options.batch * num_ranks, num_ranks, options.seeds, padded_step_cost)


def large(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds to plan many samples: least and median of a few repeats."""
    lengths = draw_lengths(options.large, 0)
    methods: dict[str, Method] = {
        "verl_workload": verl_partition(workload),
        "verl": verl_path(options.token_budget),
        "fixed": FixedCountPlanner(PER_RANK[-1]).plan,
        "budget": TokenBudgetPlanner(options.token_budget).plan,
        "budget, equal counts": TokenBudgetPlanner(options.token_budget, equal_counts=True).plan,
        "padded": PaddedPlanner(token_budget=options.token_budget).plan,
        "global": GlobalPlanner(options.token_budget, QWEN3_06B).plan,
        "global, equal counts": GlobalPlanner(options.token_budget, QWEN3_06B, equal_counts=True).plan,
        "global, mini-batches of 1,000": GlobalPlanner(options.token_budget, QWEN3_06B, mini_batch_size=1000).plan,
    }
    result: dict[str, dict[str, float]] = {}
    for name, method in methods.items():
        times: list[float] = []
        for _ in range(LARGE_REPEATS if not name.startswith("verl") else 1):
            started = time.process_time()
            method(lengths, LARGE_RANKS)
            times.append((time.process_time() - started) * 1e3)
        result[name] = {"min_ms": round(min(times), 1), "median_ms": round(statistics.median(times), 1)}
    return result


def show(title: str, rows: dict[str, Any]) -> None:
    """One table."""
    print(f"\n{title}")
    print(f"{'':24}{'sum L^2':>9}{'worst':>9}{'tokens':>9}{'padding':>9}{'micro':>7}{'longest':>9}{'ms':>9}", end="")
    print(f"{'step':>8}{'step_7b':>8}{'perfect':>9}")
    for name, row in rows.items():
        if isinstance(row, dict):
            print(f"{name:24}{row['square_imbalance']:9.4f}{row['square_imbalance_max']:9.4f}", end="")
            print(f"{row['token_imbalance']:9.4f}{row['sample_padding_share']:9.4f}{row['micro_batches']:7.1f}", end="")
            print(f"{row['longest_row_tokens']:9.0f}{row['planner_ms']:9.2f}{row['step']:8.3f}", end="")
            print(f"{row['step_7b']:8.3f}{row['step_to_perfect']:9.3f}")
        else:
            print(f"{name}: {row}")


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="batches drawn for each row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="samples a rank in `batch` (default: %(default)s)")
    parser.add_argument("--token-budget", type=int, default=16_384, help="tokens a row at most (default: %(default)s)")
    parser.add_argument("--large", type=int, default=10_000, help="samples in `large` (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result here")
    return parser.parse_args()


def main() -> None:
    """Run all parts, print tables, store them."""
    options = parse()
    result: dict[str, Any] = {
        **circumstances(options),
        "versions": {"python": platform.python_version(), "verl": verl.__version__, "torch": torch.__version__},
        "seeds": f"0 to {options.seeds - 1}",
        "one_micro_batch": {},
        "batch": {},
        "padded": {},
    }
    for num_ranks in RANKS:
        for per_rank in PER_RANK:
            key = f"dp{num_ranks}_x{per_rank}"
            result["one_micro_batch"][key] = one_micro_batch(options, per_rank, num_ranks)
            show(f"one micro-batch, {num_ranks} ranks x {per_rank} samples", result["one_micro_batch"][key])
    for num_ranks in RANKS:
        result["batch"][f"dp{num_ranks}"] = whole_batch(options, num_ranks)
        show(f"batch of {num_ranks} ranks x {options.batch} samples", result["batch"][f"dp{num_ranks}"])
    for num_ranks in RANKS:
        result["padded"][f"dp{num_ranks}"] = padded_batch(options, num_ranks)
        show(f"padded batch of {num_ranks} ranks x {options.batch} samples", result["padded"][f"dp{num_ranks}"])
    result["large"] = large(options)
    print(f"\n{options.large} samples, {LARGE_RANKS} ranks: {json.dumps(result['large'], indent=2)}")
    store(result, options.json)


if __name__ == "__main__":
    main()
