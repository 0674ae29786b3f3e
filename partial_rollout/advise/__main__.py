"""What each mode is predicted to gain on your lengths, before you run it.

    python -m partial_rollout.advise RUN                                  # a run's folder: its events or metrics
    python -m partial_rollout.advise DUMP                                 # a folder of verl's trainer.rollout_data_dir
    python -m partial_rollout.advise DATA.parquet --column lengths        # numbers of tokens, or a list for each prompt
    python -m partial_rollout.advise ... --curve CURVE --batch 64         # on another engine, with other batches
    python -m partial_rollout.advise ... --replicas 8                     # on eight such engines together
    python -m partial_rollout.advise RUN --gpus 8                         # which of 8 GPUs engines should have alone

    python -m partial_rollout.advise CURVE                                # three traces of lengths
    python -m partial_rollout.advise CURVE --jobs benchmarks/results/gpu/jobs_8b_h200.json    # beside measured jobs

`python -m partial_rollout.advise.measure` takes the latency curve of an engine. Without `--curve` it is that of
Qwen3-8B's shape on an H200.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partial_rollout.advise.jobs import jobs_table, predict_jobs, rates
from partial_rollout.advise.measure import CELLS
from partial_rollout.advise.predict import (
    BASE,
    BOUND,
    COLOCATED,
    POLLING,
    Training,
    fit,
    predict_all,
    predict_load,
    settings_of,
    splits,
    splits_table,
    table,
)
from partial_rollout.advise.result import read_result, store
from partial_rollout.advise.sources import FEW, Lengths, read_lengths, read_training
from partial_rollout.advise.workload import TRACES
from partial_rollout.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from partial_rollout.advise.scheduler import Speed
    from partial_rollout.advise.workload import Workload

STORED_CURVE = Path(__file__).resolve().parents[2] / "benchmarks/results/gpu/engine_8b_h200.json"
DEFAULT_BATCH = 32
NOT_OURS = (BASE, COLOCATED, POLLING, BOUND)
FEW_CELLS = 3
"""Cells of a curve below which its fit says little: it has three parts."""
YOUNG, WORTH = 2, 0.95
"""Updates up to which tokens count as young; share of sync's time above which the flag is hardly worth it."""
LEARNED_AGE, HALF_LEARNED_AGE = 1.6, 3.2
"""Mean ages, in updates, of what jobs of a real model trained: with the first the job learned as `sync` did, with the
second one of two seeds did (docs/results/gpu.md, "Old tokens, up to 148 steps")."""
FROM_STEP = 3
SEEN = "A small model took 1.6 and 1.9 times as long (docs/results/gpu.md): so a split may be faster than is said here"
OF_LENGTHS = ("curve", "group", "column", "tokenizer", "gpus", "train_s")
"""Options that say something of response lengths, or of what trains on them; a curve alone has neither."""


def of_traces(curve: dict[str, Any], speed: Speed, options: argparse.Namespace) -> dict[str, Any]:
    """Predict all modes for each trace, and print a table of each."""
    found = {}
    for trace in options.traces or TRACES:
        found[trace] = predict_all(curve, speed, trace, options.batch)
        print(f"{trace}, {_engines(curve, options)}\n\n{table(found[trace])}\n")
    return {"traces": found}


def of_jobs(line: argparse.ArgumentParser, speed: Speed, options: argparse.Namespace) -> dict[str, Any]:
    """Predict jobs that were measured, and print both."""
    results = [read_result(path) for path in options.jobs]
    first = FROM_STEP if options.from_step is None else options.from_step
    if any(result["workload"] != results[0]["workload"] for result in results):
        line.error("the jobs are of different workloads, so their tokens cannot be compared")
    jobs = [job for result in results for job in predict_jobs(result, speed)]
    most = min((len(job["seconds"]) for job in jobs), default=0)
    if not 2 <= first <= most:
        allowed = f"2 to {most}, as two steps are needed of every job" if most > 1 else "no job has two steps"
        line.error(f"--from-step {first} is not allowed: {allowed}")
    print(jobs_table(jobs, first))
    if options.replicas > 1:
        print(f"\npredicted for {options.replicas} engines")
    return {"from_step": first, "jobs": [{**job, "rates": rates(job, first)} for job in jobs]}


def of_lengths(line: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Predict all modes for the lengths of a user's job, and say how far to believe it."""
    curve_path = options.curve or STORED_CURVE
    if not curve_path.is_file():
        line.error(f"--curve {curve_path} is not there: python -m partial_rollout.advise.measure makes one")
    curve = _curve(line, curve_path, options.replicas)
    try:
        found = read_lengths(options.source, options.column, _counter(options.tokenizer))
        training = _training(options) if options.gpus else None
    except (DataError, OSError) as error:
        line.error(str(error))
    load = found.workload(options.batch or DEFAULT_BATCH, options.group)
    one = fit(curve["curve"])
    speed = one.of_replicas(options.replicas)
    rows = predict_load(curve, speed, load)
    drawn = [tokens for group in found.groups for tokens in group]
    print(f"{found.num_responses} responses: mean {statistics.fmean(drawn):,.0f}, longest {max(drawn):,} tokens")
    shown = f"batches of {load.batch} prompts x {load.group} responses, {_engines(curve, options)}"
    print(f"{shown}\n\n{table(rows)}\n")
    for sentence in advice(rows, found, curve["engine"], load):
        print(sentence)
    if (cells := len(curve["curve"]["cell"])) < FEW_CELLS:
        print(f"the curve has {cells} of the {len(CELLS)} cells that an engine with more slots would have: a hint only")
    if options.curve is None:
        print(
            "the engine is not yours: python -m partial_rollout.advise.measure takes its curve, --curve gives it here"
        )
    result: dict[str, Any] = {"from": str(options.source), "speed": asdict(speed), "modes": rows}
    if training is not None:
        rows = splits(one, load, curve["engine"]["prompt_tokens"], options.gpus, training)
        result |= {"splits": rows, "training": asdict(training)}
        told = _told(training, options)
        print(f"\nwhole steps on {options.gpus} GPUs, an engine on each; {told}\n\n{splits_table(rows, options.gpus)}")
    store(result, options.json)


def _training(options: argparse.Namespace) -> Training:
    if options.train_s is not None:
        return Training(options.train_s)
    try:
        return read_training(options.source)
    except DataError as error:
        raise DataError(
            f"--gpus {options.gpus} needs the seconds of training: give --train-s SECONDS; {error}"
        ) from error


def _told(training: Training, options: argparse.Namespace) -> str:
    """What is taken of the seconds of training, and from where."""
    scaling = f"{training.scaling_s:.1f} s of training take twice as long on half of the GPUs"
    if options.train_s is not None:
        return f"assumed: all {scaling} (--train-s). {SEEN}"
    rest = f"{training.fixed_s:.1f} s do not (the rest)"
    return f"assumed: {scaling} (log-probs and update of {options.source}), {rest}. {SEEN}"


def advice(rows: dict[str, dict[str, float]], found: Lengths, engine: dict[str, Any], load: Workload) -> list[str]:
    """The fastest mode that can be set, the fastest one with young tokens, and how far to believe both."""
    ours = {name: row for name, row in rows.items() if name not in NOT_OURS}
    fastest = min(ours, key=lambda name: ours[name]["time_ratio"])
    young = {name: row for name, row in ours.items() if row["staleness_max"] <= YOUNG}
    said = [f"fastest: {fastest}, {ours[fastest]['time_ratio']:.2f} of the generation time of verl's sync"]
    said.append(f"    {settings_of(fastest, load)}")
    if not young:
        youngest = min(ours, key=lambda name: (ours[name]["staleness_max"], ours[name]["staleness_mean"]))
        ages = "mean {staleness_mean:.1f}, oldest {staleness_max:.0f}".format(**ours[youngest])
        said.append(f"no mode has tokens at most {YOUNG} updates old only; the youngest ones: {youngest}, {ages}")
    elif (best := min(young, key=lambda name: young[name]["time_ratio"])) != fastest:
        said.append(f"fastest with tokens at most {YOUNG} updates old: {best}, {young[best]['time_ratio']:.2f}")
        said.append(f"    {settings_of(best, load)}")
    if (age := ours[fastest]["staleness_mean"]) > LEARNED_AGE:
        said.append(
            f"with {fastest} tokens are {age:.1f} updates old in the mean: a job learned as sync did at "
            f"{LEARNED_AGE}; at {HALF_LEARNED_AGE} one of two seeds did (docs/modes.md)"
        )
    if BOUND in rows:
        slots = load.batch * load.group
        said.append(f"with {slots} slots no mode can be faster than {rows[BOUND]['time_ratio']:.2f} ({BOUND})")
    if ours[fastest]["time_ratio"] > WORTH:
        said.append("hardly anything to gain: leave the flag out")
    if full := [name for name, row in ours.items() if row["kv_share"] > 1]:
        said.append(f"the KV cache would overflow with: {', '.join(full)}")
    few = f", of {found.num_responses} responses only: the tail is a guess" if found.num_responses < FEW else ""
    said.append(f"lengths: {found.what}{few}")
    said.append(
        f"engine: {engine['shape']}, prompts of {engine['prompt_tokens']} tokens. Generation only, in the mean of many "
        "steps; docs/results/predictions.md says how well predictions agreed with jobs that ran"
    )
    return said


def _counter(tokenizer: Path | None) -> Callable[[str], int] | None:
    if tokenizer is None:
        return None
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)
    return lambda text: len(encode(text, add_special_tokens=False)["input_ids"])


def _engines(curve: dict[str, Any], options: argparse.Namespace) -> str:
    return f"{options.replicas} engine{'s' if options.replicas > 1 else ''} of {curve['engine']['shape']}"


def _curve(line: argparse.ArgumentParser, path: Path, replicas: int) -> dict[str, Any]:
    """The latency curve of one engine, with the KV cache of `replicas`."""
    curve = read_result(path)
    if not curve.get("curve", {}).get("cell"):
        line.error(f"{path} has no latency curve: make one with python -m partial_rollout.advise.measure")
    curve["engine"]["kv_tokens"] *= replicas
    return curve


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(
        "partial_rollout.advise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    line.add_argument("source", type=Path, metavar="LENGTHS", help="where response lengths are, or a latency curve")
    line.add_argument("--curve", type=Path, help="result of partial_rollout.advise.measure (Qwen3-8B on an H200)")
    line.add_argument("--group", type=int, help="responses to a prompt (as many as the source has)")
    line.add_argument("--column", help="of a parquet file: numbers of tokens, or lists of them")
    line.add_argument("--tokenizer", type=Path, metavar="MODEL", help="counts the tokens of a dump that has texts only")
    line.add_argument("--traces", nargs="+", choices=TRACES, help="of a curve alone (all)")
    line.add_argument("--batch", type=int, help="prompts of a step (32, or the curve's)")
    line.add_argument("--replicas", type=int, default=1, help="engines that share a batch (%(default)s)")
    line.add_argument(
        "--gpus", type=int, help="predict each split of so many GPUs (placement=separate), which RUN shared"
    )
    line.add_argument(
        "--train-s",
        type=float,
        help="seconds of log-probs and update on all of them, where the source does not tell them",
    )
    line.add_argument("--jobs", type=Path, nargs="+", help="results of benchmarks.jobs, of one workload")
    line.add_argument("--from-step", type=int, help=f"first step of rates and ratios of jobs ({FROM_STEP})")
    line.add_argument("--json", type=Path, help="also write what is predicted here")
    return line


def _refuse(line: argparse.ArgumentParser, options: argparse.Namespace, names: Sequence[str], needs: str) -> None:
    """Refuse options that would have no effect; `needs` says with what they have one."""
    for name in names:
        if getattr(options, name) is not None:
            line.error(f"--{name.replace('_', '-')} needs {needs}")


def main(words: list[str] | None = None) -> None:
    """Predict, print tables, and store them if asked to."""
    line = parser()
    options = line.parse_args(words)
    if options.batch is not None and options.batch < 1:
        line.error(f"--batch {options.batch} is not allowed: at least 1")
    if options.group is not None and options.group < 2:
        line.error(f"--group {options.group} is not allowed: at least 2")
    if options.replicas < 1:
        line.error(f"--replicas {options.replicas} is not allowed: at least 1")
    if options.gpus is not None and options.gpus < 2:
        line.error(f"--gpus {options.gpus} is not allowed: at least 2")
    if options.train_s is not None and (options.gpus is None or options.train_s <= 0):
        line.error(f"--train-s {options.train_s} is not allowed: above 0 seconds, with --gpus N")
    if options.source.suffix != ".json":
        _refuse(line, options, ("traces", "jobs", "from_step"), "a curve as the first word, in place of lengths")
        of_lengths(line, options)
        return
    _refuse(
        line, options, OF_LENGTHS, f"response lengths: give them first, and the curve with --curve {options.source}"
    )
    if options.jobs:
        _refuse(line, options, ("traces", "batch"), "no --jobs, whose results say what they ran")
    else:
        _refuse(line, options, ("from_step",), "--jobs")
    curve = _curve(line, options.source, options.replicas)
    speed = fit(curve["curve"]).of_replicas(options.replicas)
    found = of_jobs(line, speed, options) if options.jobs else of_traces(curve, speed, options)
    store({"from": options.source.name, "speed": asdict(speed), **found}, options.json)


if __name__ == "__main__":
    main()
