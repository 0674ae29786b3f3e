"""What the log of rollouts costs a step, and how fast a run that is started again reads it.

    python -m benchmarks.bench_rollout_log --json benchmarks/results/bench_rollout_log.json

Two steps alternate: one in which the log is on, and one in which it is off. In each, one worker ends all 256
trajectories of the shortest stored step of a real model, one after the other; with several workers each has a part of
that. `loop_ms` is what the worker's event loop waits, `cpu_ms` what the process takes, the log's thread and the disk's
part in the kernel included. The difference is the cost. Afterwards the log is read and planned as at a new start.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from partial_rollout.advise.result import circumstances, read_result, store
from partial_rollout.agent_loop.rollout_log import LogFolder, WorkerLog
from partial_rollout.agent_loop.trajectory import Trajectory
from partial_rollout.agent_loop.worker import summaries
from partial_rollout.core.rollout_log import Admitted, Group, Taken, encode
from partial_rollout.runtime.log_writer import LogWriter
from partial_rollout.train.rollout_log import read_history
from partial_rollout.types import Claim, TrajectorySummary

SHORT_STEPS = Path(__file__).parent / "results/gpu/smollm2_h200.json"
STEP_TRAJECTORIES, GROUP = 256, 8
"""Trajectories of a step of the job in `SHORT_STEPS`, and of one prompt."""
PROMPT_TOKENS = 200
VOCABULARY = 150_000
MEBIBYTE = 2**20
CLOSE_S = 600.0


def make_output(num_tokens: int, rng: random.Random) -> AgentLoopOutput:
    """As verl's agent loops return it, with its score."""
    output = AgentLoopOutput(
        prompt_ids=[rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)],
        response_ids=[rng.randrange(VOCABULARY) for _ in range(num_tokens)],
        response_mask=[1] * num_tokens,
        response_logprobs=[-rng.random() for _ in range(num_tokens)],
        metrics=AgentLoopMetrics(),
        num_turns=2,
        extra_fields={"min_global_steps": 3, "max_global_steps": 4, "reward_extra_info": {"acc": 1.0}},
    )
    output.reward_score = 1.0
    return output


class Step:
    """The trajectories of a step, which end one after the other."""

    def __init__(self, outputs: list[AgentLoopOutput]) -> None:
        """Each of the outputs is the result of one trajectory."""
        self._outputs = outputs

    def run(self, number: int, log: WorkerLog) -> list[list[TrajectorySummary]]:
        """Summaries of all trajectories; `log` may be off."""
        found: list[list[TrajectorySummary]] = []
        for index, output in enumerate(self._outputs):
            claim = Claim(f"{number}-{index // GROUP}", index, "worker-0", GROUP, number, 1)
            trajectory = Trajectory(claim, index % GROUP)
            found.append(log.write(trajectory, [output], summaries(trajectory, [output])))
        return found


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Alternating steps with and without the log, then a new start."""
    rng = random.Random(0)
    step = Step([make_output(options.tokens, rng) for _ in range(STEP_TRAJECTORIES)])
    place = LogFolder(str(folder / "after_step_0"), 1, 0)
    trainer, off, on = LogWriter("trainer"), WorkerLog("off", CLOSE_S), WorkerLog("worker_0", CLOSE_S)
    trainer.open(place.file("trainer"))
    trainer.append(place.opened("trainer", world={}, holds_through=0))
    on.begin(place, [])
    loop_ms: dict[str, list[float]] = {"on": [], "off": []}
    cpu_ms: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(1, options.steps + 1):
        for name, log in (("off", off), ("on", on)):
            cpu, started = time.process_time(), time.perf_counter()
            found = step.run(number, log)
            loop_ms[name].append(1000 * (time.perf_counter() - started))
            time.sleep(options.pause_s)  # the thread writes
            cpu_ms[name].append(1000 * (time.process_time() - cpu))
        trainer.append(encode(taken(number, found)))
        uids = sorted({each.key.split("_")[0] for (each,) in found})
        trainer.append(encode(Admitted(first=(number - 1) * len(uids), uids=uids, prompts=uids)))
    trainer.close(CLOSE_S)
    on.close(CLOSE_S)
    num_bytes = place.file("worker_0").stat().st_size
    started = time.perf_counter()
    history, _, _ = read_history(Path(place.path), 0, {})
    plan = history.plan(0, first=0, unfinished=[], done=[])
    read_s = time.perf_counter() - started
    step_s = min(row["step, s"] for row in read_result(SHORT_STEPS)["summary"])
    cost = {name: median(times["on"]) - median(times["off"]) for name, times in (("loop", loop_ms), ("cpu", cpu_ms))}
    return {
        "loop_ms": {name: round(median(each), 2) for name, each in loop_ms.items()},
        "cpu_ms": {name: round(median(each), 2) for name, each in cpu_ms.items()},
        "step_s": step_s,
        "loop_percent_of_step": round(cost["loop"] / 10 / step_s, 3),
        "cpu_percent_of_step": round(cost["cpu"] / 10 / step_s, 3),
        "loop_us_a_trajectory": round(1000 * cost["loop"] / STEP_TRAJECTORIES, 1),
        "bytes_a_token": round(num_bytes / options.steps / STEP_TRAJECTORIES / options.tokens, 2),
        "mb_a_step": round(num_bytes / options.steps / MEBIBYTE, 2),
        "steps_replayed": plan.through,
        "read_mb_per_s": round(num_bytes / MEBIBYTE / read_s),
    }


def taken(number: int, found: list[list[TrajectorySummary]]) -> Taken:
    """The batch of a step."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for (summary,) in found:
        groups.setdefault(summary.key.split("_")[0], []).append((summary.key, summary.log_checksum))
    return Taken(step=number, groups=[Group(uid, keys) for uid, keys in groups.items()])


def median(values: list[float]) -> float:
    """The median of at least one value."""
    return statistics.median(values)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each kind (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1500, help="of a response (default: %(default)s)")
    parser.add_argument("--pause-s", type=float, default=0.3, help="between two steps (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="of the log, on the disk in question (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(options, Path(folder))
    given = argparse.Namespace(steps=options.steps, tokens=options.tokens, pause_s=options.pause_s)
    result = {**circumstances(given), **found}
    print(json.dumps(result, indent=2))
    store(result, options.json)


if __name__ == "__main__":
    main()
