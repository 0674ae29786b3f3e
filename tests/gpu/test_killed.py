"""A recipe on a GPU goes on though its processes die, also where engines sleep while the model trains.

What a CPU cannot show: a killed engine's memory comes back late, and the new one must find room beside what the
training ranks hold by then. `SMOLLM2_TASK` names a task that is there already; else it is made, for which
`requirements/smollm2.txt` must be installed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partial_rollout.observability.events import StepEnded
from partial_rollout.runtime import processes
from tests.e2e.conftest import ROOT, is_conserved, times_trained
from tests.faults.conftest import GENERATING, SHUT, TRAINING, Blow, blow_at, check_all_told, report, strike_command
from tests.faults.measured import charges

__all__ = ["report"]
LIMIT_S = float(os.environ.get("LIMIT_S", "1500"))
"""Limit of each job."""
FIRST = 3
"""The step in which the first process dies; a further one dies in each step that follows."""
SETTINGS = {"BATCH_SIZE": "16", "MINI_BATCH_SIZE": "16", "TEST_FREQ": "-1", "SAVE_FREQ": "2"}


def blows(*struck: tuple[processes.Kind, str] | tuple[processes.Kind, str, signal.Signals]) -> list[Blow]:
    """One a step."""
    return [
        replace(blow_at(kind, step, phase), number=number[0] if number else signal.SIGKILL)
        for step, (kind, phase, *number) in enumerate(struck, start=FIRST)
    ]


KEPT = blows(
    (processes.ENGINE, GENERATING),
    (processes.AGENT_LOOP_WORKER, GENERATING),
    (processes.PROMPT_MANAGER, TRAINING),
    (processes.ENGINE, SHUT),
    (processes.REWARD_WORKER, GENERATING),
    (processes.ENGINE_SERVER, GENERATING),
    (processes.TRAINING_RANK, TRAINING),
    (processes.ENGINE, GENERATING, signal.SIGSTOP),
)
RELEASED = blows(
    (processes.ENGINE, GENERATING),
    (processes.ENGINE, SHUT),
    (processes.ENGINE_SERVER, SHUT),
    (processes.TRAINING_RANK, GENERATING),
    (processes.ENGINE, GENERATING),
)
BRIEF = blows((processes.ENGINE, GENERATING), (processes.TRAINING_RANK, TRAINING))


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and starting model of the recipe."""
    if given := os.environ.get("SMOLLM2_TASK"):
        return Path(given).resolve()
    out = tmp_path_factory.mktemp("smollm2") / "smollm2_task"
    make = [sys.executable, "-m", "partial_rollout.run.smollm2_reasoning_gym.make_task", "--out", str(out)]
    subprocess.run([*make, "--device", "cuda"], cwd=ROOT, check=True, timeout=LIMIT_S)
    return out


@pytest.mark.parametrize(
    ("struck_by", "keeps_memory"),
    [(KEPT, True), (RELEASED, False), (BRIEF, True)],
    ids=["kept", "released", "brief"],
)
def test_a_recipe_ends_with_all_its_steps_though_its_processes_die(
    task: Path, tmp_path: Path, report: dict[str, Any], struck_by: list[Blow], keeps_memory: bool
) -> None:
    (tmp_path / "smollm2_task").symlink_to(task)
    num_steps = FIRST + len(struck_by)
    settings = SETTINGS | {"OUTPUT_DIR": str(tmp_path), "PYTHON": sys.executable, "TOTAL_STEPS": str(num_steps)}
    places = [f"partial_rollout.events={tmp_path / 'events'}", f"trainer.default_local_dir={tmp_path / 'checkpoints'}"]
    recipe = ["bash", str(ROOT / "partial_rollout/run/run_smollm2_reasoning_gym.sh"), *places]
    command = [*recipe, f"actor_rollout_ref.rollout.free_cache_engine={not keeps_memory}"]
    struck = strike_command(command, tmp_path, blows=struck_by, limit_s=LIMIT_S, **settings)
    job = struck.job
    ended = [event for event in job.stream if isinstance(event, StepEnded)]
    report |= {"code": job.code, "seconds": round(struck.ended_s - job.stream[0].t)}
    report |= {"faults": [(fault.role, fault.text[:200], fault.action) for fault in struck.faults]}
    assert job.code == 0, (tmp_path / "smollm2_reasoning_gym_partial/run.log").read_text()[-4000:]
    assert {event.step for event in ended} == set(range(1, num_steps + 1))
    check_all_told(struck)
    assert all(is_conserved(event.metrics) for event in ended)
    assert charges(job.stream) == []
    assert set(times_trained(job.stream).values()) == {1}
    assert job.survivors == []
