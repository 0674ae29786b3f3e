"""Wall clock of a mini-batch's forward and backward on two ranks, by who decides which samples train together.

    python -m benchmarks.bench_packing_wall --json benchmarks/results/bench_packing_wall.json
    python -m benchmarks.bench_packing_wall --shape 4b --shrink 1 --token-budget 8192 --parts packed --fsdp2 --json OUT

Two processes with one thread each are two data-parallel ranks; they meet in a barrier after every micro-batch, as
FSDP's collectives make them. With `--fsdp2` each has half of the weights and gradients. Two parts:

- `packed`: rows without padding, attention of each sequence on its own (`varlen_sdpa`). Strided order, verl's own
  partition and micro-batches, and our planner; same token budget.
- `padded`: rows padded to their longest sample, attention `sdpa`: what a run without `use_remove_padding` does.
  Strided and verl's partition in micro-batches of `--per-row` samples, and ours.

A small Qwen3 is trained on two CPU ranks (gloo), on lengths of the published distribution divided by `--shrink` (so
that attention's share of the time is about that of a 7B model at full length with `--shrink 8`). Another `--shape` is
trained with gradient checkpointing, on two GPUs of one host (NCCL, bf16) where there are any. The clock waits for them.

Every repeat runs every method on every batch once, in an order that turns. Reported are medians and quartiles; ratios
are to strided on the same batch of the same repeat. Each record is also written at once beside the result
(`.rows.jsonl`, repeat 0 is the warm-up). `--limit-s` includes the start of the ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
from verl.utils.flops_counter import FlopsCounter
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, rearrange_micro_batches

from partial_rollout.advise.result import circumstances, devices, store, versions
from partial_rollout.advise.shapes import SHAPES
from partial_rollout.advise.workload import LARGE, lengths
from partial_rollout.packing import GlobalPlanner, PaddedPlanner, Plan
from partial_rollout.packing import attention as varlen_attention
from partial_rollout.packing.attention import Sample, pack
from partial_rollout.packing.batch import cost_of
from partial_rollout.packing.plan import sample_padding_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    Method = Callable[[list[int], int], Plan]
    Step = Callable[["Trainee", list[Sample]], None]

NUM_RANKS = 2
SMALL = "small"
MAX_POSITIONS = 8192
GPU_TIMEOUT = timedelta(seconds=60)
"""A barrier waits no longer when the other rank has failed. On a CPU, which may be shared and slow, it has no limit."""
LOSS_CHUNK = 8192
"""Tokens whose log-probs are computed at once; with 151,936 logits each, fewer than 2**31 numbers."""
WARM_UP_REPEATS = 1
RESPONSES = replace(LARGE, long_share=0.0771)
"""A tenth of the responses has 4,096 tokens, those that are cut there included."""
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_CAP = 256, 0.4, 1024
PARTS = ("packed", "padded")
USES = ("seconds", "tokens_per_s", "mfu", "peak_gb")
STRIDED, VERL, GLOBAL = "strided", "verl", "global"


@dataclass(frozen=True)
class Training:
    """Where and how a shape is trained."""

    device: str
    backend: str
    dtype: str
    gradient_checkpointing: bool


def training(shape: str, *, checkpointing: bool = True) -> Training:
    """The small shape on the CPU, without checkpointing; others on a GPU a rank where there is any.

    Raises:
        SystemExit: there are GPUs, but too few.
    """
    if shape == SMALL or not torch.cuda.is_available():
        return Training("cpu", "gloo", "float32", gradient_checkpointing=checkpointing and shape != SMALL)
    if torch.cuda.device_count() < NUM_RANKS:
        raise SystemExit(
            f"--shape={shape} takes {NUM_RANKS} GPUs, not {torch.cuda.device_count()}: run it where there are more, or"
            " on the CPU with CUDA_VISIBLE_DEVICES=''"
        )
    return Training("cuda", "nccl", "bfloat16", gradient_checkpointing=checkpointing)


class Trainee:
    """One rank of the process group, and its model, which has random weights and no optimizer."""

    def __init__(self, options: argparse.Namespace, rank: int, port: int) -> None:
        """Join the group at `port` of this host."""
        how, self.rank = training(options.shape, checkpointing=options.checkpointing), rank
        on_gpu = how.device == "cuda"
        self.device = torch.device(how.device, rank) if on_gpu else torch.device(how.device)
        if on_gpu:
            torch.cuda.set_device(self.device)
            # cuDNN's attention builds a plan for each new length, which would be timed with the first step that has it.
            torch.backends.cuda.enable_cudnn_sdp(False)
        dist.init_process_group(
            how.backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS,
            timeout=GPU_TIMEOUT if on_gpu else None, device_id=self.device if on_gpu else None,
        )  # fmt: skip
        torch.manual_seed(0)
        config = SHAPES[options.shape].config(MAX_POSITIONS)
        with self.device:
            self.model: Qwen3ForCausalLM = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, how.dtype))
        self.model.train()
        if how.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in (*self.model.model.layers, self.model) if options.fsdp2 else ():
            fully_shard(module)
        self._flops = FlopsCounter(config)

    def meet(self) -> None:
        """Wait until both ranks have done all their work."""
        self._finish()
        dist.barrier()
        self._finish()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def used(self, tokens: list[int], seconds: float) -> dict[str, float]:
        """Seconds and rate of a batch; on GPUs also the share of their peak, and the most memory since last time."""
        found = {"seconds": seconds, "tokens_per_s": sum(tokens) / seconds}
        if self.device.type == "cpu":
            return found
        achieved, peak = self._flops.estimate_flops(tokens, seconds)
        most = torch.tensor(torch.cuda.max_memory_allocated() / 1e9, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        torch.cuda.reset_peak_memory_stats()
        return found | {"mfu": achieved / peak / NUM_RANKS, "peak_gb": most.item()}

    def agree(self, value: bool) -> bool:
        """What rank 0 says."""
        answer = torch.tensor(int(value), device=self.device)
        dist.broadcast(answer, src=0)
        return bool(answer.item())

    def make_sample(self, length: int) -> Sample:
        """Tokens do not matter for the time."""
        return Sample(torch.randint(self.model.config.vocab_size, (length,)), {"advantages": torch.randn(length)})


def packed_step(trainee: Trainee, samples: list[Sample]) -> None:
    """Forward and backward of one packed row."""
    row = pack(samples)
    tokens, advantages = row.input_ids.to(trainee.device), row.fields["advantages"].to(trainee.device)
    logits = trainee.model(tokens, position_ids=row.position_ids.to(trainee.device), use_cache=False).logits
    policy_gradient(logits, tokens, advantages).backward()


def padded_step(trainee: Trainee, samples: list[Sample]) -> None:
    """Forward and backward of one padded row."""
    tokens = pad_sequence([sample.tokens for sample in samples], batch_first=True).to(trainee.device)
    values = [sample.response["advantages"] for sample in samples]
    advantages = pad_sequence(values, batch_first=True).to(trainee.device)
    ends = torch.tensor([len(sample.tokens) for sample in samples])
    mask = (torch.arange(tokens.shape[1]) < ends[:, None]).long().to(trainee.device)
    logits = trainee.model(tokens, attention_mask=mask, use_cache=False).logits
    policy_gradient(logits, tokens, advantages).backward()


def policy_gradient(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    """Sum of advantage x log-prob: logits (B, T, V), the others (B, T).

    The last prediction of a row weighs nothing here, so that no logits need to be cut off and copied.
    """
    targets, weights = tokens.roll(-1, dims=1), advantages.roll(-1, dims=1)
    weights[:, -1] = 0
    parts = (logits.flatten(0, 1), targets.flatten(), weights.flatten())
    chunks = zip(*(part.split(LOSS_CHUNK) for part in parts), strict=True)
    return -torch.stack([(cross_entropy(x, y, reduction="none") * weight).sum() for x, y, weight in chunks]).sum()


def batches(options: argparse.Namespace) -> list[list[int]]:
    """Lengths of every batch, prompt and response together."""
    num = options.per_rank * NUM_RANKS
    responses = lengths(RESPONSES, options.batches * num).reshape(-1)[: options.batches * num]
    drawn = np.random.default_rng(RESPONSES.seed).lognormal(math.log(PROMPT_MEDIAN), PROMPT_SIGMA, len(responses))
    both = (responses + np.clip(drawn, 1, PROMPT_CAP).astype(int)) // options.shrink
    return np.maximum(2, both).reshape(options.batches, num).tolist()


def strided(per_row: int) -> Method:
    """Samples in turn; each rank cuts its own into micro-batches of `per_row`."""
    return lambda samples, num_ranks: cut([range(rank, len(samples), num_ranks) for rank in range(num_ranks)], per_row)


def cut(ranks: Sequence[Sequence[int]], per_row: int) -> Plan:
    """Each rank's samples in rows of `per_row`."""
    return as_plan([[list(rank[at : at + per_row]) for rank in ranks] for at in range(0, len(ranks[0]), per_row)])


def verl_path(token_budget: int) -> Method:
    """What verl's trainer and engine do with `use_dynamic_bsz`: partition, then micro-batches on each rank."""

    def plan(samples: list[int], num_ranks: int) -> Plan:
        ranks, number = partition(samples, num_ranks), 1
        while True:
            rows = [rank_micro_batches([samples[i] for i in rank], token_budget, number) for rank in ranks]
            if len(set(map(len, rows))) == 1:
                break
            number = max(map(len, rows))
        named = [[[rank[i] for i in row] for row in cuts] for rank, cuts in zip(ranks, rows, strict=True)]
        return as_plan([list(micro_batch) for micro_batch in zip(*named, strict=True)])

    return plan


def rank_micro_batches(samples: list[int], token_budget: int, at_least: int) -> list[list[int]]:
    """verl's micro-batches of one rank, without the all-reduce that agrees on their number."""
    mask = torch.arange(max(samples)) < torch.tensor(samples)[:, None]
    batch = TensorDict({"input_ids": mask, "attention_mask": mask}, batch_size=len(samples))
    # verl says list[None] in its annotations.
    return cast("list[list[int]]", rearrange_micro_batches(batch, token_budget, min_num_micro_batch=at_least)[1])


def partition(samples: list[int], num_ranks: int) -> list[list[int]]:
    """verl's partition of its own workloads into parts of equal size, by Karmarkar-Karp."""
    workloads = calculate_workload(torch.tensor(samples)).tolist()
    parts: Any = get_seqlen_balanced_partitions(workloads, num_ranks, equal_size=True)
    return parts


def as_plan(micro_batches: list[list[list[int]]]) -> Plan:
    """A plan nobody checked."""
    return Plan(tuple(tuple(map(tuple, rows)) for rows in micro_batches), (len(micro_batches),))


def methods_of(part: str, options: argparse.Namespace) -> dict[str, Method]:
    """The planners that a part compares: strided, the base of the ratios, verl's way and ours."""
    first: dict[str, Method] = {STRIDED: strided(options.per_row)}
    if part == "packed":
        cost = cost_of(SHAPES[options.shape].config(MAX_POSITIONS))
        ours = GlobalPlanner(token_budget=options.token_budget, cost=cost)
        return first | {VERL: verl_path(options.token_budget), GLOBAL: ours.plan}
    # A row may have as many padded tokens as the widest row of the others.
    ours = PaddedPlanner(token_budget=options.per_row * max(map(max, batches(options))))
    counted: Method = lambda samples, num_ranks: cut(partition(samples, num_ranks), options.per_row)  # noqa: E731
    return first | {VERL: counted, f"{GLOBAL} (by length)": ours.plan}


def run_rank(rank: int, options: argparse.Namespace, port: int, deadline: float, rows: str) -> None:
    """One rank: every method on every batch, again and again; rank 0 appends each record to `rows` at once."""
    torch.set_num_threads(1)
    trainee = Trainee(options, rank, port)
    with Path(rows if rank == 0 else os.devnull).open("a", encoding="utf-8") as out:
        for part in options.parts:
            for record in measure(trainee, options, part, deadline):
                out.write(json.dumps({"part": part} | record) + "\n")
                out.flush()
    dist.destroy_process_group()


def measure(trainee: Trainee, options: argparse.Namespace, part: str, deadline: float) -> Iterator[dict[str, Any]]:
    """What all methods took on a batch, repeat after repeat; no repeat begins after `deadline`."""
    methods, step = methods_of(part, options), packed_step if part == "packed" else padded_step
    trainee.model.set_attn_implementation(varlen_attention.NAME if part == "packed" else "sdpa")
    names = list(methods)
    for number in range(options.repeats + WARM_UP_REPEATS):
        if not trainee.agree(time.monotonic() < deadline):
            return
        num_batches = options.warm_up_batches if number < WARM_UP_REPEATS else None
        for batch, tokens in enumerate(batches(options)[:num_batches]):
            samples, took = [trainee.make_sample(length) for length in tokens], {}
            turn = (number + batch) % len(names)
            for name in names[turn:] + names[:turn]:
                plan = methods[name](tokens, NUM_RANKS)
                seconds = timed(trainee, step, [[samples[i] for i in row] for row in plan.for_rank(trainee.rank)])
                shape = {"micro_batches": plan.num_micro_batches, "padding": sample_padding_share(plan, tokens)}
                took[name] = trainee.used(tokens, seconds) | shape
            yield {"batch": batch, "repeat": number, "methods": took}


def timed(trainee: Trainee, step: Step, rows: list[list[Sample]]) -> float:
    """Seconds from the first barrier to the last."""
    trainee.model.zero_grad()
    trainee.meet()
    started = time.perf_counter()
    for row in rows:
        step(trainee, row)
        trainee.meet()
    return time.perf_counter() - started


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds and ratios of each method, over all records of a part after its warm-up."""
    taken = [record["methods"] for record in records if record["repeat"] >= WARM_UP_REPEATS]
    return {
        name: {
            "ratio_to_strided": spread([each[name]["seconds"] / each[STRIDED]["seconds"] for each in taken]),
            **{use: spread([each[name][use] for each in taken]) for use in taken[0][name] if use in USES},
            "micro_batches": round(statistics.mean(each[name]["micro_batches"] for each in taken), 2),
            "padding_share_if_padded": round(statistics.mean(each[name]["padding"] for each in taken), 3),
        }
        for name in (taken[0] if taken else ())
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4)}


def parse() -> argparse.Namespace:
    """Command line."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--shape", choices=list(SHAPES), default=SMALL, help="of the model (default: %(default)s)")
    line.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run (default: both)")
    line.add_argument("--per-rank", type=int, default=16, help="samples a rank in a mini-batch (default: %(default)s)")
    line.add_argument("--per-row", type=int, default=4, help="samples of a row, where counted (default: %(default)s)")
    line.add_argument("--token-budget", type=int, default=1024, help="tokens of a packed row (default: %(default)s)")
    line.add_argument("--shrink", type=int, default=8, help="divisor of the lengths (default: %(default)s)")
    line.add_argument("--batches", type=int, default=6, help="mini-batches (default: %(default)s)")
    line.add_argument("--repeats", type=int, default=5, help="times each method runs on each (default: %(default)s)")
    line.add_argument("--warm-up-batches", type=int, help="mini-batches of the warm-up before them (default: all)")
    line.add_argument("--fsdp2", action="store_true", help="shard weights and gradients over both ranks, as a job does")
    line.add_argument("--no-checkpointing", dest="checkpointing", action="store_false", help="keep all activations")
    line.add_argument("--limit-s", type=float, default=math.inf, help="no repeat begins after it (default: none)")
    line.add_argument("--json", type=Path, metavar="OUT", help="also write the result here, and each record beside it")
    line.add_argument("--dry-run", action="store_true", help="print device, methods and batches, and train nothing")
    return line.parse_args()


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
    parts = {part: [record for record in records if record["part"] == part] for part in options.parts}
    last = options.batches - 1
    whole = {
        part: sum(record["batch"] == last and record["repeat"] >= WARM_UP_REPEATS for record in found)
        for part, found in parts.items()
    }
    ended = error or ("limit" if min(whole.values()) < options.repeats else "done")
    return {"ended": ended, "whole_repeats": whole} | {part: summary(found) for part, found in parts.items()}


def main() -> None:
    """Run both ranks, print what they measured, and store it even where they failed."""
    options = parse()
    deadline, how = time.monotonic() + options.limit_s, training(options.shape, checkpointing=options.checkpointing)
    if options.dry_run:
        for part in options.parts:
            print(f"{part}: {asdict(how)}, {list(methods_of(part, options))}, lengths {batches(options)}")
        return
    options.limit_s = None if math.isinf(options.limit_s) else options.limit_s
    run = circumstances(options) | {"versions": versions(), "training": asdict(how)}
    run |= {"devices": devices() if how.device == "cuda" else [], "model": asdict(SHAPES[options.shape])}
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
