"""Environment and markers for all tests. Folders decide markers: tests/ray, tests/engine and others."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from partial_rollout.run.cpu_environment import apply_cpu_environment
from tests import preloaded

QUIET_RAY = {
    "RAY_prestart_worker_first_driver": "0",  # workers for nobody: those of tests are started by `py_executable`
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # no test reads what a node's agent reports
}
"""Variables of Ray's own processes, which otherwise compute as much as a short job while tests only wait."""

os.environ.update(QUIET_RAY)
apply_cpu_environment()  # before any test imports what reads these variables

# A busy machine makes no test fail.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

ROOT = Path(__file__).resolve().parents[1]
FOLDER_MARKERS = ("ray", "engine", "e2e", "omni", "faults", "nodes", "gpu")
"""Folders that mark their tests, in the order of their turns, after all others: the cheapest failure comes first."""
BY_NAME_ONLY = "nodes"
"""A folder that only runs where the command names it: it needs root, and minutes of a machine without other jobs."""
SHORT_FORM = "test_node_dies.py"
"""The file of that folder which runs in every whole run; as the first, since it takes longest."""
CLUSTER_FOLDERS = ("ray", "engine")
ONE_JOB_EACH = ("tests/e2e/test_training.py", "tests/engine/test_benchmarks.py")
"""Files whose tests start all their processes themselves, and share none."""
LONGEST_FIRST = ("test_fifteen_steps", "test_reorder", "test_staleness", "test_killed_engine", "test_adaptive")
"""Training jobs that begin first, so that no process waits at the end for one that the other began late."""
RAY_LOGICAL_CPUS = 16


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT / "tests").parts[0]


def scheduling_scope(nodeid: str) -> str:
    """Tests of one scope go to one process: all on the shared Ray cluster; a training job; a file."""
    path, _, name = nodeid.partition("::")
    if path in ONE_JOB_EACH:
        return name
    return "cluster" if Path(path).parts[1] in CLUSTER_FOLDERS else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's own groups (`--dist loadgroup`) have no effect with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scheduling_scope(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_named = any(f"tests/{BY_NAME_ONLY}" in word for word in config.args)
    if not is_named and BY_NAME_ONLY not in str(config.getoption("markexpr")):
        left_out = [item for item in items if _folder(item) == BY_NAME_ONLY and item.path.name != SHORT_FORM]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if _folder(item) in FOLDER_MARKERS:
            item.add_marker(_folder(item))
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, int]:
    if item.path.name == SHORT_FORM:
        return -2, 0
    folder = FOLDER_MARKERS.index(_folder(item)) if _folder(item) in FOLDER_MARKERS else -1
    long = [place for place, name in enumerate(LONGEST_FIRST) if name in item.nodeid]
    return folder, long[0] if long else len(LONGEST_FIRST)


LEFT_OUT = pytest.StashKey[set[str]]()
"""Tests that the marker expression of this run leaves out, over all of its processes."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = set()


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not walk over it at every test."""
    gc.collect()
    gc.freeze()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        item.config.stash[LEFT_OUT].add(item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist tells the one that reports."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = sorted(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT].update(getattr(node, "workeroutput", {}).get("left_out", ()))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What did not run: skipped tests with their reasons stand above (`-ra`); those left out are counted by folder."""
    folders = Counter(Path(name.partition("::")[0]).parts[:2][-1] for name in config.stash[LEFT_OUT])
    skipped = len(terminalreporter.stats.get("skipped", ()))
    parts = [f"{count} of tests/{folder}" for folder, count in sorted(folders.items())]
    left_out = f"; left out by this command: {', '.join(parts)}" if parts else ""
    gpu = "what needs a GPU: python -m pytest tests/gpu, and the commands of docs/results/gpu.md"
    terminalreporter.line(f"not run: {skipped} skipped{left_out}; {gpu}")


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the process whose forks stand for `python`, one for all processes of pytest-xdist."""
    # verl sets this variable to this value for its workers.
    return start_nursery(tmp_path_factory, preloaded.MODULES, VLLM_LOGGING_LEVEL="WARN")


def start_nursery(
    tmp_path_factory: pytest.TempPathFactory, modules: dict[str, tuple[str, ...]], **environment: str
) -> Path:
    """Start it, unless it runs."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        return preloaded.nursery(folder.parent, os.getppid(), modules, **environment)
    return preloaded.nursery(folder, os.getpid(), modules, **environment)


@pytest.fixture(scope="session")
def ray_cluster(nursery: Path):
    """A Ray cluster of this process with logical CPUs and one logical GPU, gone with the session."""
    import ray

    folder = tempfile.mkdtemp(prefix="pr-ray-", dir="/tmp")  # short: Ray's socket paths are limited to 107 bytes
    ray.init(
        num_cpus=RAY_LOGICAL_CPUS, num_gpus=1, include_dashboard=False, _temp_dir=folder, log_to_driver=False,
        runtime_env={"py_executable": preloaded.client(nursery)},
    )  # fmt: skip
    yield ray
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def own_logger_as_imported() -> None:
    """What a test sets up in this package's logger ends with the test: `caplog` sees the messages of the next one.

    verl's trainer leaves a root logger that drops what is below ERROR in the process that imports it.
    """
    logging.getLogger().setLevel(logging.WARNING)
    own = logging.getLogger("partial_rollout")
    own.handlers, own.propagate = [], True
    own.setLevel(logging.NOTSET)
