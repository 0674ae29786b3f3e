"""Training jobs that a benchmark starts and ends, and what they measure."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lanes import Lane, run_all
from partial_rollout.advise.measured import SKIP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
METRICS, LOG = "metrics.jsonl", "log.txt"
"""In a job's folder."""
TRAINING_ONLY = (
    "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.resume_mode=disable",
    "+ray_kwargs.ray_init.include_dashboard=False",
)  # fmt: skip
"""Options of jobs that neither validate nor leave anything; a dashboard's twelve processes would be measured too."""
MARK = "BENCHMARK_JOB"
"""Variable by which all processes of a job are found, orphans too. With SPT_NOENV no title is written over it."""
POLL_S = 0.5
STOP_S = 20.0
"""From asking a job to end to killing it."""
RUNNING, ENGINE = "vllm:num_requests_running", "VLLM::EngineCore"
"""A gauge, and the title of an engine's process."""
DRAFTED = [
    f"vllm:{of}_total" for of in ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens", "generation_tokens")
]
"""Counts of an engine that drafts: steps of a request with drafts, drafts that were right, and tokens in all."""
READ_TIMEOUT_S = 2.0
CPU_ENVIRONMENT = ROOT / "partial_rollout/run/lib/cpu_environment.sh"


def training_command(task: Path, folder: Path, overrides: list[str], python: str = sys.executable) -> list[str]:
    """A job of the quickstart's configuration on a task's checkpoint; checkpoints and Hydra's files go to `folder`."""
    return [
        "bash", "-c", f'source {CPU_ENVIRONMENT} && exec "$@"', "job",
        python, "-m", "partial_rollout.main_ppo", "--config-name", "quickstart_cpu",
        f"data.train_files={task / 'train.parquet'}", f"data.val_files={task / 'val.parquet'}",
        f"actor_rollout_ref.model.path={task / 'model'}",
        *TRAINING_ONLY,
        f"trainer.default_local_dir={folder / 'checkpoints'}", f"hydra.run.dir={folder / 'hydra'}",
        *of_workers(python), *overrides,
    ]  # fmt: skip


def of_workers(python: str) -> list[str]:
    """Ray's workers have the interpreter of this process by themselves, and another one if they are told."""
    return [] if python == sys.executable else [f"+ray_kwargs.ray_init.runtime_env.py_executable={python}"]


@contextmanager
def training_job(
    command: list[str], folder: Path, lane: Lane | None = None, mark: str | None = None
) -> Iterator[subprocess.Popen[Any]]:
    """A job that runs in `folder`, where its log and metrics go; it is over on exit, with all that it has started.

    With `mark` its processes can be found (`processes_of`) while it runs.
    """
    lane = lane or Lane()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS).unlink(missing_ok=True)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    mark = mark or uuid.uuid4().hex
    variables = {"VERL_FILE_LOGGER_PATH": str(folder / METRICS), "PYTHONPATH": paths, MARK: mark, "SPT_NOENV": "1"}
    with (folder / LOG).open("w") as log:
        options: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": folder}
        job = subprocess.Popen(lane.pinned(command), env=os.environ | variables | lane.environment, **options)
        try:
            yield job
        finally:
            _end(job, mark)


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
    left = processes_of(mark)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, STOP_S)


def processes_of(mark: str) -> list[psutil.Process]:
    """All processes of a job, also those whose parent has gone."""
    return [process for process in psutil.process_iter() if _has_mark(process, mark)]


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:  # it has just ended, or is somebody else's
        return False


def run_job(
    words: list[str],
    folder: Path,
    limit_s: float,
    lane: Lane | None = None,
    skip: int = SKIP,
    *,
    end_after: int | None = None,
) -> dict[str, Any]:
    """Run one job for up to `limit_s`, or `end_after` steps.

    Returns its steps, `skip` of them apart, the ends of all, and how many requests ran. Times are seconds
    from its start; samples are [time, requests in the engines' batches], from the first step on, and have DRAFTED too
    where engines draft.
    """
    started_s = time.monotonic()
    ends_s: list[float] = []
    samples: list[list[float]] = []
    engines = EngineCounts()
    lane, mark = lane or Lane(), uuid.uuid4().hex
    with training_job(words, folder, lane, mark) as job:
        for now_s in until_over(job, lane, limit_s):
            ends_s += [round(now_s, 1)] * (len(read_steps(folder)) - len(ends_s))
            if end_after is not None and len(ends_s) >= end_after:
                break
            if ends_s:
                engines.find(mark)
                sampled = engines.sample()
                samples += [[round(now_s, 1), *sampled]] if sampled else []
    ended_s, steps = time.monotonic() - started_s, read_steps(folder)
    ends_s += [round(ended_s, 1)] * (len(steps) - len(ends_s))
    times = {"job_s": ended_s, "first_step_s": ends_s[0] if ends_s else None, "ends_s": ends_s}
    first = {"first_steps": steps[:skip]} if skip else {}
    return {**times, "code": job.returncode, **first, "steps": steps[skip:], "samples": samples}


def run_jobs(
    jobs: Mapping[T, tuple[list[str], Path]], keep: Callable[[T, dict[str, Any]], None], lanes: Sequence[Lane],
    *, budget_s: float = math.inf, job_s: float | None = None, skip: int = SKIP, end_after: int | None = None,
) -> None:  # fmt: skip
    """Run jobs, each a command and its folder, on the first lane that is free, and `keep` one after the other.

    A job that `job_s` or the budget of all jobs ends is kept as far as it came; none starts after the budget.
    """
    ends_s, keeping = time.monotonic() + budget_s, threading.Lock()

    def run_one(name: T, command: list[str], folder: Path, lane: Lane) -> None:
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            return
        job = run_job(command, folder, min(left_s, job_s or left_s), lane, skip, end_after=end_after)
        with keeping:
            keep(name, {"gpus": lane.gpus} | job)

    run_all([partial(run_one, name, *job) for name, job in jobs.items()], lanes)


class EngineCounts:
    """vLLM's own numbers of a job's engines; needs `rollout.disable_log_stats=False`."""

    def __init__(self) -> None:
        self._pages: set[str] = set()

    def find(self, mark: str) -> None:
        """Look for engine servers among the processes of a job until there is one."""
        if not self._pages:
            engines = [process for process in processes_of(mark) if _is_engine(process)]
            self._pages = {page for engine in engines for page in _pages_of_server(engine)}

    def sample(self) -> list[float]:
        """The present sums over engines; nothing while one does not answer."""
        found = [_read(page) for page in self._pages]
        return [sum(each) for each in zip(*found, strict=True)] if len({len(each) for each in found}) == 1 else []


def _is_engine(process: psutil.Process) -> bool:
    try:
        return ENGINE in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _pages_of_server(engine: psutil.Process) -> set[str]:
    """Metrics pages of the process that has started an engine: the nearest of its ancestors that has any."""
    try:
        ancestors = engine.parents()
    except psutil.Error:
        return set()
    for ancestor in ancestors:
        found = {page for page in _pages(ancestor) if _read(page)}
        if found:
            return found
    return set()


def _pages(process: psutil.Process) -> set[str]:
    try:
        sockets = process.net_connections("tcp")
    except psutil.Error:
        return set()
    addresses = [socket.laddr for socket in sockets if socket.status == psutil.CONN_LISTEN]
    hosts = [("127.0.0.1" if a.ip in ("0.0.0.0", "::") else a.ip.removeprefix("::ffff:"), a.port) for a in addresses]
    return {f"http://{host}:{port}/metrics" for host, port in hosts}


def _read(page: str) -> list[float]:
    """The gauge, and DRAFTED where it has them; nothing if this is no metrics page, as other ports' are."""
    try:
        with urllib.request.urlopen(page, timeout=READ_TIMEOUT_S) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, HTTPException, ValueError):
        return []
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return [found[name] for name in (RUNNING, *(DRAFTED if found.keys() >= set(DRAFTED) else ())) if RUNNING in found]
