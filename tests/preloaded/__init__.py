"""Processes of Ray, vLLM and training jobs as forks of one process that has imported what they need once.

A training job has about ten processes that import the same 7,000 modules: half of what a short job computes. A
*nursery* (`nursery.py`) imports and then forks a process for each *client* (`client.py`), which stands where `python`
would: as the command of a training job; as Ray's `py_executable`, a public option of its runtime environment; and as
the executable of `multiprocessing` in Ray's workers, from which vLLM starts its engine core. The client stands in for
its process: the one ends when the other ends.

The first nursery, one for all tests, has all but Ray and what imports Ray, because Ray's library reads the job and the
raylet that a process belongs to when it is loaded. A job's workers come from a fork of it that has imported the rest.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "tests/preloaded/client.py"
FIRST, JOB = "first", "job"
"""Kinds of nurseries, and the files in its folder with the modules that each imports."""
MODULES = {
    FIRST: (
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.qwen3",
        "vllm.entrypoints.openai.api_server",
        "transformers.models.qwen3.modeling_qwen3",
        "torch.distributed.fsdp",
        "datasets",
        "peft",
        "hydra",
        "torchdata.stateful_dataloader",
    ),
    JOB: (
        "ray._private.workers.default_worker",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "verl.trainer.main_ppo",
        "verl.experimental.reward_loop",
        "partial_rollout.train.task_runner",
        "partial_rollout.train.trainer",
        "partial_rollout.train.workers",
        "partial_rollout.rollout.server",
        "partial_rollout.agent_loop.worker",
    ),
}
ROOM = "." * 1000
"""An argument of the nursery. Ray and vLLM write a process's title over its arguments and, where they are shorter than
the title, over the environment that tests find a job's processes by."""
SOCKET, COMMAND = "socket", "python"
"""Files in a nursery's folder: its address, and what stands for `python`."""
MARK = "PARTIAL_ROLLOUT_TEST_RUN"
"""Variable by which tests find the processes of a job; see `nursery.Mark`."""
MARKS = (MARK, "BENCHMARK_JOB")
"""The second is that of benchmarks/training_job.py."""
LEFT_BY_IMPORTS: dict[str, str] = {}
"""In a nursery and its forks: variables that its imports have set, as they would have in each process by itself."""


def nursery(base: Path, owner: int, modules: dict[str, tuple[str, ...]], **environment: str) -> Path:
    """Folder of the nursery that belongs to the tests of `base`; started if there is none. It ends with `owner`.

    Variables that libraries read when they are imported have their values from `environment` or from this process.
    The nursery answers as soon as it has imported; whoever starts a client before waits for that.
    """
    link = base / "nursery"
    with (base / "nursery.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not link.exists():
            # Short: paths of sockets are limited to 107 bytes.
            folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))
            start(folder, owner, modules, **environment)
            link.symlink_to(folder)
    return link.readlink()


def start(folder: Path, owner: int, modules: dict[str, tuple[str, ...]], **environment: str) -> subprocess.Popen[bytes]:
    """Start a nursery in `folder`, which is removed when the process `owner` has ended, and the nursery with it."""
    write_command(folder / COMMAND, folder / SOCKET)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for kind, names in modules.items():
        (folder / kind).write_text(" ".join(names))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, (folder / "log").open("wb") as log:
        listener.bind(str(folder / SOCKET))
        listener.listen(64)
        files = [listener.fileno(), os.pidfd_open(owner)]
        try:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded.nursery", *map(str, files), str(folder), FIRST, ROOM],
                env=os.environ | {"PYTHONPATH": paths} | environment, cwd=ROOT,
                pass_fds=files, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(files[1])


def client(folder: Path) -> str:
    """The command that stands where `python` would."""
    return str(folder / COMMAND)


AS_PYTHON = """
import multiprocessing, runpy, sys
sys.executable = sys.argv.pop(1)
multiprocessing.set_executable(sys.executable)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""Code of a fork that runs a module, whose own processes are forks too if it starts them by `multiprocessing` or as
`sys.executable`. Not for one that starts Ray: Ray's dashboard agent ends when its parent is no raylet."""


def module(folder: Path, name: str, *words: str) -> list[str]:
    """The command of a module that starts jobs or engines; see `AS_PYTHON`."""
    return [client(folder), "-c", AS_PYTHON, client(folder), name, *words]


WORKERS = "PARTIAL_ROLLOUT_TEST_WORKERS"
"""Variable with the command that stands for Ray's workers; see `with_forks`."""


def environment_of_jobs(folder: Path) -> dict[str, str]:
    """Variables by which the workers of every Ray job below are forks, whatever it gives to `ray.init`."""
    return {"RAY_RUNTIME_ENV_HOOK": f"{__name__}.{with_forks.__name__}", WORKERS: client(folder)}


def with_forks(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Called by `ray.init` with the runtime environment of a job."""
    return (runtime_env or {}) | {"py_executable": os.environ[WORKERS]}


def write_command(path: Path, address: Path) -> None:
    """Make `path` a client of the nursery that listens at `address`."""
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {CLIENT} {address} "$@"\n')
    path.chmod(0o755)
