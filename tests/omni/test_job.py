"""The job of the CPU recipe, shorter: the reward rises, and rollout and training agree while it does."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from partial_rollout.observability.events import (
    BatchTaken,
    CommandEnded,
    EventReader,
    SegmentEnded,
    StepEnded,
    TrajectoryEnded,
)
from tests import preloaded

if TYPE_CHECKING:
    from pathlib import Path

NUM_STEPS = 16
ENDS = 4
"""Training steps at each end whose rewards are compared."""


def test_the_recipe_trains(repository: Path, nursery: Path, tiny_qwen_image: Path, tmp_path: Path):
    recipe = repository / "partial_rollout" / "run" / "run_qwen_image_flow_grpo_cpu.sh"
    folder = tmp_path / "venv" / "omni" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(preloaded.client(nursery))
    settings = {"VENV": str(tmp_path / "venv"), "SKIP_SETUP": "1", "OUTPUT_DIR": str(tmp_path / "run")}
    command = ["bash", str(recipe), f"trainer.total_training_steps={NUM_STEPS}"]
    environment = os.environ | settings | preloaded.environment_of_jobs(nursery) | {"MODEL_PATH": str(tiny_qwen_image)}
    started_in = tmp_path / "started_in"
    started_in.mkdir()
    done = subprocess.run(
        command, env=environment, cwd=started_in, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [row["step"] for row in metrics] == list(range(1, NUM_STEPS + 1))
    rewards = [row["reward/mean"] for row in metrics]
    assert statistics.mean(rewards[-ENDS:]) > statistics.mean(rewards[:ENDS])
    # Nothing has been updated in the first step: the training model computes the rollout's log-probs again.
    assert metrics[0]["actor/rollout_ratio_deviation"] < 1e-4
    # Held in place by the updates, between two of their steps.
    assert sum(row["partial_rollout/resumed"] for row in metrics) > 0
    assert {row["partial_rollout/snapshots"] for row in metrics} == {0}
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("metrics.jsonl", "before.png", "latest.png", "after.png", "transformer", "events", "report.html", "run.log"),
        "command.lock",
    }
    _check_the_event_stream(tmp_path / "run", metrics)
    assert list((tmp_path / "run" / "transformer").glob("*.safetensors"))
    assert [path.name for path in started_in.iterdir()] == []
    assert f"step {NUM_STEPS}/{NUM_STEPS} | reward" in done.stdout


def _check_the_event_stream(run: Path, metrics: list[dict[str, float]]) -> None:
    """Each image has all of its denoise steps, by weight version, and the last event says how the command ended."""
    events = EventReader(run / "events").read()
    assert [(each.step, each.total) for each in events if isinstance(each, StepEnded)] == [
        (number, NUM_STEPS) for number in range(1, NUM_STEPS + 1)
    ]
    segments = [each for each in events if isinstance(each, SegmentEnded)]
    steps, versions = Counter[tuple[str, int]](), defaultdict[tuple[str, int], list[int]](list)
    for segment in segments:
        steps[segment.uid, segment.session] += segment.tokens
        versions[segment.uid, segment.session].append(segment.version)
    ended = {(each.uid, each.session): each for each in events if isinstance(each, TrajectoryEnded)}
    assert {steps[key] for key in ended} == {10}
    assert {key: each.interruptions for key, each in ended.items()} == {key: len(versions[key]) - 1 for key in ended}
    taken = {uid for each in events if isinstance(each, BatchTaken) for uid in each.uids}
    resumed = sum(each.interruptions > 0 for (uid, _), each in ended.items() if uid in taken)
    assert resumed == sum(row["partial_rollout/resumed"] for row in metrics)
    assert events[-1] == CommandEnded(t=events[-1].t, code=0)
