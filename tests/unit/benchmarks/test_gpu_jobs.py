"""Whole jobs on a GPU, as far as they can be seen without one."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from hydra import compose, initialize_config_dir

from benchmarks.gpu.inputs import workload
from benchmarks.gpu.jobs import COMPARED, SKIP, command, run_job, settings, slots_in_use
from benchmarks.gpu.session import CONFIGS
from partial_rollout.mode import apply_mode, check_config, is_enabled

WRITE = """
import json, os
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    for step in range(4):
        print(json.dumps({"data": {"timing_s/gen": step, "partial_rollout/drain_ms": 1, "other": 2}}), file=file)
"""


@pytest.mark.parametrize("mode", COMPARED)
def test_a_job_s_configuration_is_accepted(mode, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts.parquet").touch()
    load = workload("qwen3-0.6b", "long_tail")
    words = command(mode, tmp_path, load, settings(tmp_path, load, 256), memory=0.5)
    with initialize_config_dir(CONFIGS, version_base=None):
        config = compose("partial_rollout", overrides=[word for word in words[5:] if not word.startswith("hydra.")])
    assert (config.data.max_response_length, config.actor_rollout_ref.rollout.n) == (4096, 8)
    if is_enabled(config):
        check_config(config)
        apply_mode(config)


def test_a_job_s_steps_are_kept_after_the_first_ones(tmp_path):
    job = run_job([sys.executable, "-c", WRITE], tmp_path / "a", 60.0)
    assert job["code"] == 0
    assert [step["timing_s/gen"] for step in job["steps"]] == list(range(SKIP, 4))
    assert set(job["steps"][0]) == {"timing_s/gen", "partial_rollout/drain_ms", "other"}
    assert len(job["ends_s"]) == SKIP + len(job["steps"])
    assert json.dumps(job)


def test_slots_in_use_are_those_of_the_measured_steps_while_any_runs():
    samples = [[1.0, 1], [6.0, 8], [7.0, 0], [8.0, 4]]
    assert slots_in_use({"ends_s": [2.0, 5.0, 9.0], "samples": samples}, 8) == 0.75
    assert slots_in_use({"ends_s": [2.0], "samples": samples}, 8) is None


def test_a_job_is_ended_at_its_limit_with_what_it_started(tmp_path):
    folder, grandchild = tmp_path / "a", "import pathlib, time; pathlib.Path('there').touch(); time.sleep(600)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    limit_s = 0.2
    while not (folder / "there").exists():  # a busy machine may not have started the grandchild within the limit
        job = run_job([sys.executable, "-c", child], folder, limit_s)
        assert (job["code"], job["steps"]) == (-signal.SIGTERM, [])
        limit_s *= 4
    assert not [name for name in os.listdir("/proc") if name.isdigit() and _has(name, str(tmp_path))]


def _has(pid: str, folder: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/cwd").startswith(folder)
    except OSError:
        return False
