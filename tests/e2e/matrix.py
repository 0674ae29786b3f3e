"""Which algorithms and models run with partial rollout: whole short jobs on a CPU, interrupted and started again.

    python -m tests.e2e.matrix [--cases gae lora] --json benchmarks/results/matrix.json        (make matrix)

A case is a chain of jobs of three steps on one folder of checkpoints, so that all but the first start from one. Every
third prompt has long responses: each job has interrupted ones, and trains them in a later step. A case that does not
run is started once more without the flag: where verl's own trainer ends with an error too, the table has it. Each case
is stored as soon as it ends.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partial_rollout.advise.predict import markdown
from partial_rollout.advise.result import circumstances, read_result, store, versions
from partial_rollout.run.cpu_environment import apply_cpu_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.e2e.cases import Case

STEPS = 3
"""Steps of each job."""
NUM_ROWS, EVERY = 64, 3
SHOWN = ("case", "runs", "steps", "interrupted", "resumed", "restarts", "error", "verl")


def run_case(case: Case, task: Path, folder: Path) -> dict[str, Any]:
    """Run its jobs until one fails; how it went."""
    folder.mkdir(parents=True)
    with _modules_of(case, task, folder / "modules"):
        return _run_jobs(case, task, folder)


def _run_jobs(case: Case, task: Path, folder: Path) -> dict[str, Any]:
    from tests.e2e.cases import counts, last_error, what_is_wrong
    from tests.e2e.conftest import FLAG, LONG, SHORT, run_job, with_lengths

    rows = with_lengths(task, folder, [LONG if row % EVERY == EVERY - 1 else SHORT for row in range(NUM_ROWS)])
    shared = [*rows, f"trainer.save_freq={STEPS}", *(case.write(task, folder, NUM_ROWS) if case.write else ())]
    steps: list[dict[str, Any]] = []
    chain = case.jobs(str(task / "model"))
    for number, overrides in enumerate(chain, 1):
        started_s = time.monotonic()
        last = f"trainer.total_training_steps={number * STEPS}"
        job = run_job(task, folder, FLAG, *shared, *overrides, last)
        print(f"{case.what}, job {number}: code {job.code} after {time.monotonic() - started_s:.0f} s", flush=True)
        steps += job.steps
        wrong = what_is_wrong(job, range((number - 1) * STEPS + 1, number * STEPS + 1))
        if wrong:
            break
    row = {"case": case.what, "runs": not wrong, **counts(steps), "restarts": number - 1, "error": wrong, "verl": ""}
    if wrong:
        (folder / "verl").mkdir()
        verls = run_job(task, folder / "verl", *shared, *_without_ours(overrides), "trainer.total_training_steps=1")
        row["verl"] = last_error(verls) if verls.code else "runs without the flag"
    return row


@contextmanager
def _modules_of(case: Case, task: Path, folder: Path) -> Iterator[None]:
    """The case's own modules, and a process that has imported them, while its jobs run."""
    if case.modules is None:
        yield
        return
    from tests.e2e.conftest import NURSERY

    before, nursery = os.environ.get("PYTHONPATH"), (task / NURSERY).readlink()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [case.modules(folder), before]))
    _preload(task)
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ.update({"PYTHONPATH": before} if before else {})
        (task / NURSERY).unlink()
        (task / NURSERY).symlink_to(nursery)


def _without_ours(overrides: Sequence[str]) -> list[str]:
    return [override for override in overrides if not override.startswith("partial_rollout.")]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    shown = [[str(row[name]) for name in SHOWN] for row in rows]
    return markdown([list(SHOWN), ["---"] * len(SHOWN), *shown])


def main(words: Sequence[str] | None = None) -> None:
    """Run the cases, print the table, and store it."""
    apply_cpu_environment()  # before the import of what reads these variables
    from tests.e2e.cases import CASES

    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    line.add_argument("--task", type=Path, help="folder made by run.quickstart.make_task; made when not given")
    line.add_argument("--work", type=Path, help="folder for data, checkpoints and logs; else one that is removed")
    line.add_argument("--json", type=Path, default=Path("outputs/matrix.json"))
    options = line.parse_args(words)
    about = {**circumstances(options), "versions": versions()}
    for name in ("task", "work"):
        del about["options"][name]
    kept = read_result(options.json)["rows"] if options.json.exists() else {}
    with tempfile.TemporaryDirectory(prefix="pr-matrix-") as temporary:
        work = (options.work or Path(temporary)).resolve()
        task = _task(work, options.task)
        for name in options.cases:
            kept[name] = run_case(CASES[name], task, work / name)
            rows = {each: kept[each] for each in CASES if each in kept}
            store({**about, "rows": rows}, options.json)
            print(table(list(rows.values())), flush=True)


def _task(work: Path, made: Path | None) -> Path:
    """The tiny model and its data."""
    from partial_rollout.run.quickstart import make_task

    task = work / "task"
    if made is not None:
        shutil.copytree(made, task, dirs_exist_ok=True, symlinks=True)
    else:
        make_task.main(["--out", str(task), "--num-train", "256", "--num-val", "8", "--warm-start-steps", "60"])
    _preload(task)
    return task


def _preload(task: Path) -> None:
    """Start the process whose forks the jobs on this task are (tests/preloaded)."""
    from tests import preloaded
    from tests.e2e.conftest import NURSERY

    nursery = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))
    preloaded.start(nursery, os.getpid(), preloaded.MODULES, VLLM_LOGGING_LEVEL="WARN")
    (task / NURSERY).unlink(missing_ok=True)
    (task / NURSERY).symlink_to(nursery)


if __name__ == "__main__":
    main()
