"""Starting a CPU training job from a benchmark, ending it, and reading what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
STOP_S = 20.0
"""From asking a job to end to killing it."""
CPU_ENVIRONMENT = ROOT / "partial_rollout/run/lib/cpu_environment.sh"


def training_command(task: Path, folder: Path, overrides: list[str]) -> list[str]:
    """A job of the quickstart's configuration on a task's checkpoint; checkpoints and Hydra's files go to `folder`."""
    return [
        "bash", "-c", f'source {CPU_ENVIRONMENT} && exec "$@"', "job",
        sys.executable, "-m", "partial_rollout.main_ppo", "--config-name", "quickstart_cpu",
        f"data.train_files={task / 'train.parquet'}", f"data.val_files={task / 'val.parquet'}",
        f"actor_rollout_ref.model.path={task / 'model'}",
        "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / 'checkpoints'}", f"hydra.run.dir={folder / 'hydra'}",
        *overrides,
    ]  # fmt: skip


def job_environment(metrics: Path) -> dict[str, str]:
    """Variables of a job that writes its metrics to this file."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"VERL_FILE_LOGGER_PATH": str(metrics), "PYTHONPATH": paths}


def read_steps(metrics: Path) -> list[dict[str, Any]]:
    """Metrics of the training steps that have ended."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = [json.loads(line)["data"] for line in lines]
    return [step for step in steps if "timing_s/gen" in step]


def end_job(job: subprocess.Popen[Any]) -> None:
    """End a job, if it has not, and all that it has started, some of which has left its session."""
    if job.poll() is not None:
        return
    left = psutil.Process(job.pid).children(recursive=True)
    job.terminate()
    with suppress(subprocess.TimeoutExpired):
        job.wait(STOP_S)
    job.kill()
    job.wait()
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, STOP_S)
