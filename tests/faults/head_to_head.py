"""Faults, the same in verl's own trainer modes and in ours: who notices, whether the run ends, what it keeps.

    python -m tests.faults.head_to_head [--modes sync flag] [--faults hung_tool] --json outputs/faults/head_to_head.json

Whole jobs with the quickstart's model, one after the other. A job that completes no step and does not end for
`--bound-s` seconds counts as hung, and is killed. Each row is stored as soon as its jobs have ended.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from partial_rollout.advise.predict import markdown
from partial_rollout.advise.result import circumstances, read_result, store, versions
from partial_rollout.run.cpu_environment import apply_cpu_environment

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

BOUND_S = 300.0
LOOK_S = 0.1
NUM_STEPS, STRUCK_AFTER, SAVE_EVERY = 8, 3, 2
"""A fault comes when its step has ended and the next one generates."""
NUM_ROWS, EVERY = 96, 3
HUNG_STEPS = 14
"""Steps of a job with a hung tool: so many that ours gives the hanging call's prompt up on the way."""
HUNG_ROW = 8 * STRUCK_AFTER + 1
"""A row of the batch that is struck."""
WAITING, WAITING_STEPS, WAITING_TOKENS = 512, 3, 16
"""Prompts of a batch whose 2,048 responses all wait at once, and how long the longest of them is."""
TELLS = re.compile(r"Error|Exception|\b(died|dead|killed|hung|waits for|waited for|has not answered|overdue)\b")
"""What a line of the log has by which its reader notices something."""
MODES = {
    "flag": ["+async_training.partial_rollout=True"],
    "sync": [],
    "colocate_async": ["trainer.v1.trainer_mode=colocate_async"],
}
KILLED_ENGINE, HUNG_TOOL, KILL_AND_RESUME, WAITING_CALLS = FAULTS = (
    "killed_engine",
    "hung_tool",
    "kill_and_resume",
    "waiting_calls",
)
OURS = {
    HUNG_TOOL: ["partial_rollout.timeouts.tool_s=3"],
    WAITING_CALLS: [f"partial_rollout.num_slots={4 * WAITING}", "partial_rollout.prefetch_factor=2"],
}
"""Settings of ours that verl's modes have no counterpart of."""
WANTED = {WAITING_CALLS: WAITING_STEPS, HUNG_TOOL: HUNG_STEPS}
"""Steps of a fault's job where they are not `NUM_STEPS`."""
SHOWN = ("fault", "mode", "noticed_s", "ended", "after_s", "steps", "first_again", "named")


@dataclass
class Watched:
    """A job under way: its log, and the ends of its steps with the times at which they were seen."""

    job: subprocess.Popen[str]
    log: Path
    metrics: Path
    mark: str
    steps: dict[int, float] = field(default_factory=dict)
    told: list[tuple[float, str]] = field(default_factory=list)
    """Lines by which a reader of the log notices something, and when they came."""
    position: int = 0

    def goes_on(self) -> bool:
        """Read what is new; whether the job has not ended."""
        from tests.e2e.conftest import _json_lines

        is_alive = self.job.poll() is None
        with self.log.open(errors="replace") as file:
            file.seek(self.position)
            lines, self.position = file.readlines(), file.tell()
        now_s = time.time()
        self.told += [(now_s, line.strip()) for line in lines if TELLS.search(line)]
        with suppress(json.JSONDecodeError):  # a line that is being written
            for line in _json_lines(self.metrics):
                self.steps.setdefault(line["step"], now_s)
        return is_alive

    def wait(self, bound_s: float, until_step: int) -> bool:
        """Until this step's end, the job's end, or no step for `bound_s`; whether the job goes on."""
        since_s, num_steps = time.monotonic(), len(self.steps)
        while (goes_on := self.goes_on()) and until_step not in self.steps and time.monotonic() - since_s < bound_s:
            time.sleep(LOOK_S)
            if len(self.steps) > num_steps:
                since_s, num_steps = time.monotonic(), len(self.steps)
        return goes_on

    def kill(self, name: str = "") -> None:
        """Kill those of its processes whose command lines have `name`."""
        from tests.e2e.conftest import _has_mark

        for process in psutil.process_iter():
            try:
                if _has_mark(process, self.mark) and name in " ".join(process.cmdline()):
                    process.kill()
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue


def options_of(fault: str, mode: str, task: Path, folder: Path) -> list[str]:
    """Overrides of the job that the fault comes to."""
    from tests.e2e.conftest import LONG, SHORT, with_lengths

    ours = OURS.get(fault, []) if mode == "flag" else []
    shared = [*MODES[mode], *ours, "trainer.test_freq=-1", "actor_rollout_ref.actor.optim.lr=0"]
    if fault == WAITING_CALLS:
        rows = with_lengths(task, folder, [WAITING_TOKENS] * (WAITING * (WAITING_STEPS + 1)))
        return [
            *shared, *rows, f"data.train_batch_size={WAITING}", f"data.max_response_length={WAITING_TOKENS}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={WAITING}", "trainer.save_freq=-1",
            f"trainer.total_training_steps={WAITING_STEPS}",
        ]  # fmt: skip
    lengths = [LONG if row % EVERY == EVERY - 1 else SHORT for row in range(NUM_ROWS)]
    hung = {"hanging_agent": [HUNG_ROW]} if fault == HUNG_TOOL else None
    return [
        *shared, *with_lengths(task, folder, lengths, hung), f"trainer.save_freq={SAVE_EVERY}",
        f"trainer.total_training_steps={WANTED.get(fault, NUM_STEPS)}",
    ]  # fmt: skip


def run_row(fault: str, mode: str, task: Path, folder: Path, bound_s: float) -> dict[str, Any]:
    """One fault in one mode."""
    from tests.e2e.cases import last_error
    from tests.e2e.conftest import _ended

    folder.mkdir(parents=True)
    options = options_of(fault, mode, task, folder)
    wanted = WANTED.get(fault, NUM_STEPS)
    watched, at_s, hung = _run(fault, task, folder, options, wanted=wanted, bound_s=bound_s)
    ended_s, last_s = time.time(), max(watched.steps.values(), default=at_s)
    text = watched.log.read_text(errors="replace")
    code = _ended(watched.job, text, folder, watched.mark).code
    until_s = last_s if wanted in watched.steps else ended_s  # what a run says at its end tells of no fault
    told = [(t, line) for t, line in watched.told if at_s < t <= until_s]
    row: dict[str, Any] = {"fault": fault, "mode": mode, "hung": hung, "code": None if hung else code}
    row |= {"noticed_s": round(told[0][0] - at_s, 1) if told else None, "first_line": told[0][1][:300] if told else ""}
    row |= {"after_s": round((last_s if hung or not code else ended_s) - at_s, 1)}
    row |= {"ended": "hung" if hung else "all steps" if wanted in watched.steps else "with an error"}
    row |= {"steps": max(watched.steps, default=0), "wanted": wanted, "first_again": None}
    job = _ended(watched.job, text, folder, watched.mark)
    row["named"] = last_error(job) if code and not hung and fault != KILL_AND_RESUME else ""
    if fault == KILL_AND_RESUME:
        again, _, hung = _run("", task, folder, options, wanted=wanted, bound_s=bound_s)
        steps = sorted(again.steps)
        row |= {"first_again": steps[0] if steps else None, "hung": hung, "code": again.job.returncode}
        row |= {"steps": max(steps, default=0), "after_s": round(again.steps.get(wanted, at_s) - at_s, 1)}
        row["ended"] = "hung" if hung else "all steps" if wanted in again.steps else "with an error"
    return row


def _run(
    fault: str, task: Path, folder: Path, options: Sequence[str], *, wanted: int, bound_s: float
) -> tuple[Watched, float, bool]:
    """A job to its end, or until it hangs; when the fault was, and whether the job hung."""
    from tests.e2e.conftest import _metrics, _start

    mark = uuid.uuid4().hex
    log = folder / f"output-{mark}.txt"
    with log.open("w") as output, _start(task, folder, tuple(options), mark, output=output) as job:
        watched, hung = Watched(job, log, _metrics(folder, mark), mark), False
        try:
            if fault in (KILLED_ENGINE, KILL_AND_RESUME, HUNG_TOOL):
                watched.wait(bound_s, STRUCK_AFTER)
            at_s = time.time()
            if fault == KILLED_ENGINE:
                watched.kill("EngineCore")
            elif fault == KILL_AND_RESUME:
                job.kill()
                watched.kill()
            hung = watched.wait(bound_s, wanted) and wanted not in watched.steps
            if not hung:
                watched.wait(bound_s, -1)  # its last checkpoint, and its end
        finally:
            job.kill()
            watched.kill()
    return watched, at_s, hung


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    return markdown([list(SHOWN), ["---"] * len(SHOWN), *([str(row[name]) for name in SHOWN] for row in rows)])


def main(words: Sequence[str] | None = None) -> None:
    """Run the jobs, print the table, and store it."""
    apply_cpu_environment()  # before the import of what reads these variables
    from tests.e2e.matrix import _preload

    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    line.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    line.add_argument("--bound-s", type=float, default=BOUND_S)
    line.add_argument("--json", type=Path, default=Path("outputs/faults/head_to_head.json"))
    options = line.parse_args(words)
    about = {**circumstances(options), "versions": versions()}
    rows = read_result(options.json)["rows"] if options.json.exists() else {}
    with tempfile.TemporaryDirectory(prefix="pr-faults-") as temporary:
        task = Path(temporary) / "task"
        _make_task(task)
        _preload(task)
        for fault in options.faults:
            for mode in options.modes:
                folder = Path(temporary) / f"{fault}-{mode}"
                row = run_row(fault, mode, task, folder, options.bound_s)
                # In the row: another run may have stored the others, with another bound.
                rows[f"{fault}.{mode}"] = row | {"bound_s": options.bound_s}
                store({**about, "rows": rows}, options.json)
                print(table([rows[f"{fault}.{mode}"]]), flush=True)


def _make_task(task: Path) -> None:
    from partial_rollout.run.quickstart import make_task

    rows = WAITING * (WAITING_STEPS + 1)
    make_task.main(["--out", str(task), "--num-train", str(rows), "--num-val", "8", "--warm-start-steps", "60"])


if __name__ == "__main__":
    main()
