"""All engine measurements of one model shape and trace, on one engine: policies, then the latency curve.

    python -m benchmarks.gpu.all --shape 8b --budget-s 560 --out $OUT/8b
    python -m benchmarks.gpu.all --shape tiny --budget-s 60 --out /tmp/tiny       # the same on a CPU

Random weights, no files but a configuration and a tokenizer, no network. Response lengths are recorded
(`--trace`, `--seed`), so every mode does the same work. Written to `--out` after every step: `result.json`, `table.md`;
`python -m benchmarks.gpu.plots` draws it. Modes, in the order of `--modes`, are blocks of steps from an empty queue, of
which the first ones are not summed up (`policies.py`); in the next round (`--rounds`) all have other prompts.
With `--jobs`, whole training jobs of the same shape and load follow, stored in a folder `jobs`:

    python -m benchmarks.gpu.all --shape 4b --batch 16 --budget-s 800 --out $OUT --jobs --memory 0.4 --budget-s 1500
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.gpu.inputs import SHAPES, TRACES, workload
from benchmarks.gpu.summary import by_trace, curve_tables, measured_steps, table
from benchmarks.result import about_run, store
from partial_rollout.runtime.termination import heed_termination

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from benchmarks.bench_rollout import Workload
    from benchmarks.gpu.policies import Block
    from benchmarks.gpu.session import EngineOptions

MODES = ("sync:2", "partial_reuse_kv", "partial_abort", "partial_reuse_kv_adaptive", "partial_keep_kv", "uninterrupted")
PARTS = ("policies", "curve")
TINY = {"slots": 16, "prompt_tokens": 32, "batched_tokens": 256}
"""Engine options of the shape for a CPU."""


def is_same(stored: dict[str, Any], block: dict[str, Any]) -> bool:
    """Whether it is a block that has grown, and no new one."""
    return all(stored[name] == block[name] for name in ("mode", "trace", "round"))


class Result:
    """What is written, again after every step."""

    def __init__(self, options: argparse.Namespace, loads: dict[str, Workload], engine: EngineOptions) -> None:
        """Note under which circumstances."""
        self._out: Path = options.out
        self.data: dict[str, Any] = {
            **about_run(options),
            "workloads": {trace: asdict(load) for trace, load in loads.items()},
            "engine": asdict(engine),
            "update": "none: version and caches change at a step's end as after an update, the weights stay",
            "blocks": [],
            "curve": {"cell": [], "interruption": []},
        }

    def started(self, startup_s: float, kv_tokens: int | None) -> None:
        """The engine is up."""
        self.data["engine"] |= {"startup_s": startup_s, "kv_tokens": kv_tokens}
        self.write()

    def add_block(self, block: Block) -> None:
        """A new block, or one that has grown."""
        blocks, now = self.data["blocks"], asdict(block)
        if blocks and is_same(blocks[-1], now):
            blocks[-1] = now
        else:
            blocks.append(now)
        self.write()
        last = block.steps[-1] if block.steps else {}
        print(
            f"{block.mode} {block.trace} {block.round}: step {last.get('step')} {last.get('wall_s')} s, {block.ended}",
            flush=True,
        )

    def add_curve(self, kind: str, row: dict[str, Any]) -> None:
        """A row of the curve."""
        self.data["curve"][kind].append(row)
        self.write()
        print(kind, row, flush=True)

    def missing(self) -> str | None:
        """Why there is no measured step and no row of a curve, if there is none."""
        blocks = self.data["blocks"]
        if measured_steps(blocks) or any(self.data["curve"].values()):
            return None
        started = f"the engine took {self.data['engine']['startup_s']:.0f} s to start"
        budget = f"--budget-s is {self.data['options']['budget_s']:.0f}"
        ends = [f"{block['mode']}: {block['ended']}" for block in blocks]
        return "; ".join(["nothing was measured", started, budget, *ends])

    def write(self) -> None:
        """Everything there is."""
        summary = by_trace(self.data["blocks"])
        store({**self.data, "summary": summary}, self._out / "result.json")
        engine = {name: self.data["engine"].get(name) for name in ("shape", "startup_s", "kv_tokens")}
        tables = [f"{trace}\n\n{table(rows)}" for trace, rows in summary.items()]
        parts = [f"{self.data['devices']} {engine}", *tables, curve_tables(self.data["curve"])]
        (self._out / "table.md").write_text("\n\n".join(parts) + "\n")


def run(options: argparse.Namespace) -> Result:
    """The parts that were asked for, within the budget, and what they measured."""
    # After the arguments are checked: importing them takes seconds, and on a CPU needs its variables.
    if options.shape == "tiny":
        from partial_rollout.run.cpu_environment import apply_cpu_environment

        apply_cpu_environment()
    from benchmarks.gpu.curve import CELLS, DECODED, INTERRUPTED_CONTEXT, TINY_CELLS, run_curve
    from benchmarks.gpu.policies import POLICIES, Budget, Wanted, run_policies
    from benchmarks.gpu.session import EngineOptions, Session

    wanted = [Wanted.of(word, options.steps, options.trace) for word in options.modes]
    require_known("modes", {each.mode for each in wanted}, POLICIES)
    require_known("modes", {each.trace for each in wanted}, TRACES)
    budget = Budget(options.budget_s - (time.time() - psutil.Process().create_time()))
    sizes = given_options(options, ("batch", "group", "seed"))
    loads = {each.trace: workload(options.shape, each.trace, **sizes) for each in wanted}
    load = workload(options.shape, options.trace, **sizes)
    longest = max(each.limit for each in [load, *loads.values()])
    usual = TINY if options.shape == "tiny" else {}
    own = {**usual, **given_options(options, [item.name for item in fields(EngineOptions)])}
    engine = EngineOptions(**own, response_tokens=max(longest, 2 * DECODED))
    result = Result(options, loads, engine)
    result.write()
    with tempfile.TemporaryDirectory(prefix="pr-gpu-") as folder, Session(engine, load, Path(folder)) as session:
        heed_termination()
        result.started(session.startup_s, session.kv_tokens())
        reserved_s = options.curve_s if "curve" in options.parts else 0.0
        if "policies" in options.parts:
            limits = {"rounds": options.rounds, "budget": budget.less(reserved_s)}
            run_policies(session, wanted, loads, add=result.add_block, **limits)
        if "curve" in options.parts:
            cells, size = (
                (TINY_CELLS, TINY_CELLS[0])
                if engine.is_tiny
                else (CELLS, (load.batch * load.group, INTERRUPTED_CONTEXT))
            )
            run_curve(session, cells, interruption=size, budget=budget, add=result.add_curve)
    print((options.out / "table.md").read_text())
    return result


def require_known(option: str, given: set[str], known: Collection[str]) -> None:
    """End with what was given and what is allowed, unless all of it is."""
    unknown = given - set(known)
    if unknown:
        raise SystemExit(f"--{option} {' '.join(sorted(unknown))} is not allowed: must be of {', '.join(known)}")


def given_options(options: argparse.Namespace, names: Any) -> dict[str, Any]:
    """Those of the named options that were set."""
    values = vars(options)
    return {name: values[name] for name in names if values.get(name) is not None}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--shape", choices=list(SHAPES), default="8b")
    line.add_argument("--trace", choices=TRACES, default="long_tail")
    line.add_argument("--out", type=Path, required=True, help="folder for result.json and table.md")
    line.add_argument(
        "--budget-s", type=float, default=540.0, help="from the process's start to the last step (%(default)s)"
    )
    line.add_argument("--curve-s", type=float, default=60.0, help="kept back for the curve (%(default)s)")
    line.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    line.add_argument(
        "--modes", nargs="+", default=list(MODES), help="of policies.POLICIES; MODE:STEPS@TRACE for others"
    )
    line.add_argument("--rounds", type=int, default=3)
    line.add_argument("--steps", type=int, default=3, help="measured steps of a block (%(default)s)")
    for name, what in SIZES.items():
        line.add_argument(f"--{name.replace('_', '-')}", type=int, help=what)
    line.add_argument("--memory", type=float, help="share of the GPU's memory for the engine")
    line.add_argument("--eager", action="store_true", default=None, help="no CUDA graphs: decodes slower")
    whole = "last: whole jobs afterwards, with these options of benchmarks.gpu.jobs"
    line.add_argument("--jobs", nargs=argparse.REMAINDER, metavar="OPTION", help=whole)
    return line


SIZES = {
    "batch": "prompts of a step",
    "group": "responses to each",
    "seed": "of lengths and prompts",
    "slots": "sequences that the engine runs at the same time",
    "prompt_tokens": "of every prompt",
    "batched_tokens": "of an engine step",
    "num_workers": "agent-loop workers",
    "tensor_parallel": "GPUs of the engine",
}


def whole_jobs(options: argparse.Namespace) -> Callable[[], None]:
    """Jobs of the same load with what `--jobs` was given besides, which is checked at once."""
    from benchmarks.gpu import jobs

    same = given_options(options, ("shape", "trace", "batch", "group", "seed"))
    words = [*(f"--{name}={value}" for name, value in same.items()), f"--out={options.out / 'jobs'}", *options.jobs]
    return partial(jobs.run, jobs.checked(words))


def main() -> None:
    """Measure, and print the table; that nothing was measured is told at once, and an error once the jobs have run."""
    options = parser().parse_args()
    run_jobs = None if options.jobs is None else whole_jobs(options)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    missing = run(options).missing()
    if missing is not None:
        print(missing, file=sys.stderr, flush=True)
    if run_jobs is not None:
        run_jobs()
    if missing is not None:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
