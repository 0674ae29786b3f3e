"""Starting a CPU training job from a benchmark, ending it, and reading what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.lanes import Lane

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
METRICS, LOG = "metrics.jsonl", "log.txt"
"""In a job's folder."""
TRAINING_ONLY = (
    "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.resume_mode=disable",
)  # fmt: skip
"""Of jobs that neither validate nor leave anything."""
MARK = "BENCHMARK_JOB"
"""Variable by which all processes of a job are found, also those whose parent has gone."""
POLL_S = 0.5
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
        *TRAINING_ONLY,
        f"trainer.default_local_dir={folder / 'checkpoints'}", f"hydra.run.dir={folder / 'hydra'}",
        *overrides,
    ]  # fmt: skip


@contextmanager
def training_job(command: list[str], folder: Path, lane: Lane | None = None) -> Iterator[subprocess.Popen[Any]]:
    """A job that runs in `folder`, where its log and metrics go; it is over on exit, with all that it has started."""
    lane = lane or Lane()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS).unlink(missing_ok=True)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    mark = uuid.uuid4().hex
    variables = {"VERL_FILE_LOGGER_PATH": str(folder / METRICS), "PYTHONPATH": paths, MARK: mark}
    with (folder / LOG).open("w") as log:
        options: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": folder}
        job = subprocess.Popen(lane.pinned(command), env=os.environ | variables | lane.environment, **options)
        try:
            yield job
        finally:
            _end(job, mark)


def require_success(job: subprocess.Popen[Any], name: str, folder: Path) -> None:
    """Raise CalledProcessError, which says where the log is, if the job, which is over, has not ended with 0."""
    if job.returncode:
        raise subprocess.CalledProcessError(job.returncode, f"{name}, see {folder / LOG}")


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Metrics of the training steps that the job of this folder has ended."""
    metrics = folder / METRICS
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = [json.loads(line)["data"] for line in lines]
    return [step for step in steps if "timing_s/gen" in step]


def until_over(job: subprocess.Popen[Any], lane: Lane, limit_s: float, interval_s: float = POLL_S) -> Iterator[float]:
    """Seconds since the call, at intervals, until the job is over, the limit is reached or the lane has ended."""
    started_s = time.monotonic()
    while job.poll() is None and (now_s := time.monotonic() - started_s) < limit_s:
        yield now_s
        if lane.ended.wait(interval_s):
            return


def _end(job: subprocess.Popen[Any], mark: str) -> None:
    """End a job, if it has not, and all that it has started, some of which has left its session or lost its parent."""
    if job.poll() is None:
        job.terminate()
        with suppress(subprocess.TimeoutExpired):
            job.wait(STOP_S)
        job.kill()
        job.wait()
    left = [process for process in psutil.process_iter() if _has_mark(process, mark)]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, STOP_S)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:  # it has just ended, or is somebody else's
        return False
