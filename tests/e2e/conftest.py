"""Whole training jobs as a user starts them: a subprocess with the quickstart's configuration."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import msgspec
import pandas as pd
import psutil
import pytest

from partial_rollout.observability.events import AnyEvent, BatchTaken, EventReader
from partial_rollout.run.quickstart import make_task
from tests import preloaded
from tests.preloaded import MARK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
JOB_TIMEOUT_S = 600
FLAG = "+async_training.partial_rollout=True"
SHORT, LONG = 6, 300
"""Response lengths of `traced`."""
NURSERY = "nursery"
"""Name in the task's folder."""
GONE_S = 60.0
"""Within which all processes of a job that has ended are gone. What is left behind stays, and a busy machine takes tens
of seconds to end an interpreter."""


@dataclass(frozen=True)
class Job:
    """An ended training job."""

    code: int
    output: str
    steps: list[dict[str, Any]]
    stream: list[AnyEvent]
    """All events in the folder, of earlier jobs there too."""
    survivors: list[str]
    """Command lines of processes that the job left behind."""

    @property
    def events(self) -> list[dict[str, Any]]:
        """The batches taken."""
        return [msgspec.to_builtins(event) for event in self.stream if isinstance(event, BatchTaken)]


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory, nursery: Path) -> Path:
    """The quickstart's data and a barely warmed-up checkpoint; jobs on them are started by the nursery."""
    out = tmp_path_factory.mktemp("task")
    (out / NURSERY).symlink_to(nursery)
    make_task.main(["--out", str(out), "--num-train", "256", "--num-val", "8", "--warm-start-steps", "60"])
    return out


def traced(task: Path, folder: Path, *, num_rows: int, every: int) -> list[str]:
    """Options for the task's first rows in their order, of which every so manieth has long responses."""
    return with_lengths(task, folder, [LONG if row % every == every - 1 else SHORT for row in range(num_rows)])


def with_critic(task: Path) -> list[str]:
    """Options for a critic on a CPU, made from the task's model, whose values GAE uses."""
    model = task / "critic"
    if not model.exists():
        shutil.copytree(task / "model", model)
        shutil.copy(Path(__file__).parent / "critic.py", model)
        config = json.loads((model / "config.json").read_text())
        config["auto_map"] = {"AutoModelForTokenClassification": "critic.CriticWithoutFlashAttention"}
        (model / "config.json").write_text(json.dumps(config))
    plain = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"  # as the quickstart's actor
    return [
        "algorithm.adv_estimator=gae", "critic.strategy=fsdp2", f"critic.model.path={model}",
        f"critic.model.tokenizer_path={model}", "critic.model.trust_remote_code=True",
        "critic.model.use_remove_padding=False", "critic.model.enable_gradient_checkpointing=False",
        "critic.ppo_micro_batch_size_per_gpu=32", "critic.fsdp.dtype=float32", "critic.fsdp.strategy=fsdp2",
        "critic.fsdp.use_torch_compile=False", f"+critic.fsdp.mixed_precision={plain}",
    ]  # fmt: skip


def is_conserved(step: dict[str, Any]) -> bool:
    """Whether every admitted prompt of a step's metrics is somewhere."""
    queue = {name: step[f"partial_rollout/queue/{name}"] for name in ("admitted", "taken", "num_dropped")}
    in_flight = sum(step[f"partial_rollout/queue/{name}"] for name in ("pending", "ongoing", "deferred", "done"))
    return queue["admitted"] == in_flight + queue["taken"] + queue["num_dropped"]


def times_trained(events: Iterable[AnyEvent]) -> Counter[str]:
    """How often each prompt was trained. A batch whose training was cut off is taken again: the last one counts."""
    batches = {event.step: event for event in events if isinstance(event, BatchTaken)}
    return Counter(uid for batch in batches.values() for uid in batch.uids)


def with_lengths(
    task: Path, folder: Path, lengths: Sequence[int], agent: Mapping[str, Iterable[int]] | None = None
) -> list[str]:
    """Options for the task's first rows in their order, with these response lengths; some rows have another agent."""
    frame = pd.read_parquet(task / "train.parquet").head(len(lengths))
    info = zip(frame["extra_info"], lengths, strict=True)
    frame["extra_info"] = [{**each, "index": row, "lengths": [n] * 4} for row, (each, n) in enumerate(info)]
    others = {row: name for name, rows in (agent or {}).items() for row in rows}
    frame["agent_name"] = [others.get(row, "length_trace_agent") for row in range(len(lengths))]
    frame.to_parquet(folder / "traced.parquet")
    agents = ROOT / "tests/e2e/agents.yaml"
    return [
        "data.shuffle=False",
        f"data.train_files={folder / 'traced.parquet'}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
    ]


def run_job(task: Path, folder: Path, *overrides: str) -> Job:
    """Run `partial_rollout.main_ppo` to its end; `folder` keeps its checkpoints from one job to the next."""
    mark = uuid.uuid4().hex
    with _start(task, folder, overrides, mark) as process:
        output, _ = process.communicate(timeout=JOB_TIMEOUT_S)
    return _ended(process, output, folder, mark)


def saved_step(folder: Path) -> int:
    """The step of the last checkpoint in a job's folder, which is whole."""
    checkpoints = folder / "checkpoints"
    step = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert (checkpoints / f"global_step_{step}/partial_rollout/whole.json").exists()
    return step


def run_job_and_look(task: Path, folder: Path, *overrides: str, after: str, look: Callable[[], T]) -> tuple[Job, T]:
    """Run a job as `run_job` does, but call `look` in a thread when the job's log first says `after`.

    `look` must end with the job.
    """
    mark, lines, looking = uuid.uuid4().hex, [], None
    with ThreadPoolExecutor(1) as pool, _start(task, folder, overrides, mark) as job:
        for line in _bounded_lines(job):
            lines.append(line)
            if after in line and looking is None:
                looking = pool.submit(look)
        job.wait(timeout=JOB_TIMEOUT_S)
    ended = _ended(job, "".join(lines), folder, mark)
    if looking is None:
        raise LookupError(f"the job's log never said {after!r}: {ended.output[-4000:]}")
    return ended, looking.result()


def run_job_and_signal(
    task: Path, folder: Path, *overrides: str, after: str, process: str, number: signal.Signals
) -> Job:
    """Run a job as `run_job` does, but send its process titled `process` a signal when its log first says `after`."""
    mark, lines, sent = uuid.uuid4().hex, [], False
    with _start(task, folder, overrides, mark) as job:
        for line in _bounded_lines(job):
            lines.append(line)
            if after in line and not sent:
                sent = _signal(process, mark, number)
        job.wait(timeout=JOB_TIMEOUT_S)
    return _ended(job, "".join(lines), folder, mark)


def _start(
    task: Path, folder: Path, overrides: tuple[str, ...], mark: str, output: int | TextIO = subprocess.PIPE
) -> subprocess.Popen[str]:
    return start_command(_command(task, folder, overrides), folder, mark, output)


def start_command(
    command: Sequence[str], folder: Path, mark: str, output: int | TextIO = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    """Start a command whose processes are found by `mark`; its folder is `folder`."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment |= {MARK: mark, "VERL_FILE_LOGGER_PATH": str(_metrics(folder, mark)), "PYTHONPATH": paths}
    environment |= {"SPT_NOENV": "1"}  # else the titles of Ray and vLLM are written over the mark
    environment |= {"RAY_worker_register_timeout_seconds": str(JOB_TIMEOUT_S)}  # the first waits for the imports
    return subprocess.Popen(
        command,
        env=os.environ | environment,
        cwd=folder,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_heed_ctrl_c,  # noqa: PLW1509 - a signal's disposition cannot be set otherwise
    )


def _heed_ctrl_c() -> None:
    """A worker process of pytest-xdist ignores Ctrl-C, which its children would inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _bounded_lines(job: subprocess.Popen[str]) -> Iterator[str]:
    """Lines of a job's output; a job that is still running at the deadline is killed, which ends them."""
    deadline = threading.Timer(JOB_TIMEOUT_S, job.kill)
    deadline.start()
    try:
        yield from job.stdout or ()
    finally:
        deadline.cancel()


def _signal(title: str, mark: str, number: signal.Signals) -> bool:
    for process in psutil.process_iter(["cmdline"]):  # others of the job may end meanwhile
        if _has_mark(process, mark) and title in " ".join(process.info["cmdline"] or ()):
            process.send_signal(number)
            return True
    raise LookupError(f"the job has no process titled {title}")


def _ended(job: subprocess.Popen[str], output: str, folder: Path, mark: str) -> Job:
    (folder / f"log-{mark}.txt").write_text(output)
    steps = [line["data"] for line in _json_lines(_metrics(folder, mark)) if "training/global_step" in line["data"]]
    events = EventReader(folder / "events").read()
    return Job(job.returncode, output, steps, events, _survivors(mark))


def _metrics(folder: Path, mark: str) -> Path:
    return folder / f"metrics-{mark}.jsonl"


def _command(task: Path, folder: Path, overrides: tuple[str, ...]) -> list[str]:
    client = preloaded.client((task / NURSERY).readlink())
    return [
        client, "-m", "partial_rollout.main_ppo", "--config-name", "quickstart_cpu",
        f"data.train_files={task / 'train.parquet'}", f"data.val_files={task / 'val.parquet'}",
        f"actor_rollout_ref.model.path={task / 'model'}", "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.logger=[console,file]",
        f"trainer.default_local_dir={folder / 'checkpoints'}", f"hydra.run.dir={folder / 'hydra'}",
        f"+ray_kwargs.ray_init.runtime_env.py_executable={client}",
        "+ray_kwargs.ray_init.include_dashboard=False",  # twelve processes, which no test here looks at
        f"partial_rollout.events={folder / 'events'}", *overrides,
    ]  # fmt: skip


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _survivors(mark: str) -> list[str]:
    """Processes that inherited the job's mark and stay."""
    alive = [process for process in psutil.process_iter(["cmdline"]) if _has_mark(process, mark)]
    _, alive = psutil.wait_procs(alive, timeout=GONE_S)
    return [" ".join(process.info["cmdline"] or ["?"]) for process in alive]


def _has_mark(process: psutil.Process, mark: str) -> bool:
    """Whether it is a process of the job; a client of the nursery only stands for one."""
    try:
        return process.environ().get(MARK) == mark and str(preloaded.CLIENT) not in process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False
