"""Whole jobs on a GPU, as far as they can be seen without one."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import pytest
from hydra import compose, initialize_config_dir

from benchmarks import jobs, training_job
from benchmarks.jobs import (
    CPU_PROMPT_TOKENS,
    MODES,
    ROLLOUT_ONLY,
    Jobs,
    command,
    on_gpus,
    parse,
    settings,
    without_flash_attention,
)
from benchmarks.training_job import LOG, run_job
from partial_rollout.advise import shapes
from partial_rollout.advise.jobs import response_tokens
from partial_rollout.advise.measured import SKIP
from partial_rollout.advise.result import read_result
from partial_rollout.advise.workload import Workload, workload
from partial_rollout.observability.comparison import STALENESS
from partial_rollout.settings.flag import is_enabled
from tests.unit.settings.support import apply, check_ours

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omegaconf import DictConfig

pytestmark = pytest.mark.slow

CONFIGS = str(Path(jobs.ROOT, "partial_rollout/configs"))
WRITE = """
import json, os
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    for step in range(4):
        kept = {"timing_s/gen": step, "partial_rollout/drain_ms": 1, "training/rollout_probs_diff_mean": 3}
        print(json.dumps({"data": kept | {"training/off_policy/x": 4, "other": 2}}), file=file)
"""


TOKENS = "perf/total_num_tokens"
METRICS = f"""import json, os
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    for step in range(4):
        print(json.dumps({{"data": {{"timing_s/gen": 1, "timing_s/step": 2, "{TOKENS}": 3, "other": 4}}}}), file=file)
"""


def composed(words: list[str]) -> DictConfig:
    """The configuration that a job's command line selects, Hydra's own part left out."""
    with initialize_config_dir(CONFIGS, version_base=None):
        return compose("partial_rollout", overrides=[word for word in words[5:] if not word.startswith("hydra.")])


@pytest.mark.parametrize("mode", MODES)
def test_a_job_s_configuration_is_accepted(mode, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts.parquet").touch()
    load = workload("qwen3-0.6b", "long_tail")
    words = command(mode, tmp_path, load, settings(tmp_path, load, 256), on_gpus(2, 0.5, "qwen3-0.6b"))
    config = composed(words)
    assert (config.data.max_response_length, config.actor_rollout_ref.rollout.n) == (4096, 8)
    assert config.actor_rollout_ref.model.use_fused_kernels
    if is_enabled(config):
        check_ours(config)
        apply(config)


def test_another_interpreter_is_also_that_of_rays_workers(tmp_path):
    load = workload("small", "uniform")
    words = command("flag", tmp_path, load, settings(tmp_path, load, 32), None, python="/other/python")
    assert words[4:6] == ["/other/python", "-m"]
    assert "+ray_kwargs.ray_init.runtime_env.py_executable=/other/python" in words
    assert not any("py_executable" in word for word in command("flag", tmp_path, load, [], None))


def test_a_rollout_only_job_neither_updates_nor_computes_log_probs(tmp_path):
    """verl updates the actor from step `critic_warmup` on."""
    load = workload("8b", "long_tail", steps=40)
    words = command("sync", tmp_path, load, [*settings(tmp_path, load, 256), *ROLLOUT_ONLY], on_gpus(1, 0.7, "8b"))
    config = composed(words)
    assert config.trainer.critic_warmup > config.trainer.total_training_steps
    assert config.algorithm.rollout_correction.bypass_mode


def test_log_probs_are_fused_where_the_head_is_tied_only():
    """verl's fused head gets a sharded weight with `fsdp2` where it is a module of its own."""
    assert [without_flash_attention(shape)[-1][-5:] for shape in ("4b", "8b")] == ["=True", "False"]


def test_a_job_s_steps_are_kept_after_the_first_ones(tmp_path):
    job = run_job([sys.executable, "-c", WRITE], tmp_path / "a", 60.0)
    assert job["code"] == 0
    assert [step["timing_s/gen"] for step in job["steps"]] == list(range(SKIP, 4))
    assert [step["timing_s/gen"] for step in job["first_steps"]] == list(range(SKIP))
    assert {"timing_s/gen", "partial_rollout/drain_ms", "other"} < set(job["steps"][0])
    assert len(job["ends_s"]) == SKIP + len(job["steps"])
    assert json.dumps(job)


def test_jobs_side_by_side_are_stored_each_with_its_gpu(monkeypatch, tmp_path):
    """Here they only write the metrics of steps, and the GPU that they see, into their logs."""
    show = "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    monkeypatch.setattr(jobs, "command", lambda *_, **__: [sys.executable, "-c", f"{METRICS}{show}"])
    monkeypatch.setattr(shapes, "write_weights", lambda *_: None)
    words = ["--shape", "tiny", "--gpus", "3", "5", "--modes", "sync", "colocate_async", "--out", str(tmp_path)]
    Jobs(parse(words)).run(tmp_path / "inputs")
    stored = read_result(tmp_path / "jobs.json")
    found = {job["mode"]: job["gpus"] for job in stored["jobs"]}
    assert sorted(found.values()) == [[3], [5]]
    assert {mode: [int((tmp_path / f"{mode}-0" / LOG).read_text())] for mode in found} == found
    assert [set(step) for job in stored["jobs"] for step in job["steps"]] == [
        {"timing_s/gen", "timing_s/step", TOKENS}
    ] * 4
    assert [set(job["first_steps"][0]) for job in stored["jobs"]] == [{"timing_s/gen", "timing_s/step", TOKENS}] * 2
    assert set(stored["summary"]) == set(found)


def test_a_job_has_as_many_gpus_as_it_is_given(monkeypatch, tmp_path):
    monkeypatch.setattr(jobs, "command", lambda *_, **__: [sys.executable, "-c", METRICS])
    monkeypatch.setattr(shapes, "write_weights", lambda *_: None)
    gpus = ["--gpus", "3", "5", "7", "8", "--gpus-each", "2"]
    words = ["--shape", "tiny", *gpus, "--modes", "sync", "colocate_async", "--out", str(tmp_path)]
    Jobs(parse(words)).run(tmp_path / "inputs")
    assert sorted(job["gpus"] for job in read_result(tmp_path / "jobs.json")["jobs"]) == [[3, 5], [7, 8]]


@pytest.mark.parametrize(
    ("mode", "training", "engines"), [("flag", 2, 2), ("separate", 1, 1), ("separate_async", 1, 1)]
)
def test_two_gpus_are_shared_or_one_is_that_of_an_engine(mode, training, engines, tmp_path):
    load = workload("qwen3-0.6b", "long_tail")
    config = composed(command(mode, tmp_path, load, settings(tmp_path, load, 256), on_gpus(2, 0.5, "qwen3-0.6b")))
    assert (config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.n_gpus_per_node) == (training, engines)


def test_the_command_line_says_other_sizes(tmp_path, capsys):
    sizes = ["--batch", "4", "--group", "2", "--median", "350", "--longest", "2048", "--trace", "heavy_tail"]
    jobs.main(["--shape", "4b", *sizes, "--modes", "sync", "--dry-run", "--out", str(tmp_path)])
    words = capsys.readouterr().out.split()
    # The longest responses of the heavy tail are eight times as long as those of the long one.
    assert {"data.train_batch_size=4", "data.max_response_length=16384", "actor_rollout_ref.rollout.n=2"} < set(words)


def test_gpus_that_are_left_over_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="--gpus-each 2 is not allowed: must divide 3 --gpus"):
        jobs.main(["--gpus", "0", "1", "2", "--gpus-each", "2", "--dry-run", "--out", str(tmp_path)])


def test_jobs_that_were_stored_are_not_run_again_and_not_mixed_with_others(monkeypatch, tmp_path):
    given = []

    def run(_words, folder, _limit_s, _lane, *_, **__):
        given.append(folder.name)
        return job_of([{"timing_s/gen": 1.0, "timing_s/step": 1.0, TOKENS: 9}] * 2)

    monkeypatch.setattr(training_job, "run_job", run)
    monkeypatch.setattr(shapes, "write_weights", lambda *_: None)
    words = ["--shape", "tiny", "--out", str(tmp_path), "--resume"]
    Jobs(parse([*words, "--modes", "sync"])).run(tmp_path / "inputs")
    Jobs(parse([*words, "--modes", "sync", "flag"])).run(tmp_path / "more_inputs")
    assert given == ["sync-0", "flag-0"]
    assert set(read_result(tmp_path / "jobs.json")["summary"]) == {"sync", "flag"}
    with pytest.raises(SystemExit, match="have another workload than this command"):
        Jobs(parse([*words, "--trace", "uniform"]))


def job_of(steps: list) -> dict:
    """The result of a job as `run_job` returns it."""
    return {
        "job_s": 9.0,
        "first_step_s": 1.0,
        "code": 0,
        "ends_s": [],
        "samples": [],
        "first_steps": [],
        "steps": steps,
    }


def test_a_job_that_ends_with_the_benchmark_is_stored(monkeypatch, tmp_path):
    """Here because the other one fails; SIGTERM ends all of them in the same way."""

    def run(_words, folder, _limit_s, lane, *_, **__):
        if "colocate_async" in str(folder):
            raise RuntimeError("no such GPU")
        assert lane.ended.wait(60.0)
        return job_of([])

    monkeypatch.setattr(training_job, "run_job", run)
    monkeypatch.setattr(shapes, "write_weights", lambda *_: None)
    words = ["--shape", "tiny", "--gpus", "3", "5", "--modes", "sync", "colocate_async", "--out", str(tmp_path)]
    with pytest.raises(RuntimeError, match="no such GPU"):
        Jobs(parse(words)).run(tmp_path / "inputs")
    assert [job["mode"] for job in read_result(tmp_path / "jobs.json")["jobs"]] == ["sync"]


def test_a_job_has_no_more_than_its_own_seconds_or_what_is_left(monkeypatch, tmp_path):
    """The limits change no option: all jobs have what was asked for."""
    given, steps = [], [{"timing_s/gen": 1.0, "timing_s/step": 1.0, TOKENS: 9}] * 2

    def run(words, _folder, limit_s, _lane, *_, **__):
        given.append((words, limit_s))
        return job_of(steps)

    monkeypatch.setattr(training_job, "run_job", run)
    monkeypatch.setattr(shapes, "write_weights", lambda *_: None)
    words = ["--shape", "tiny", "--modes", "sync", "--rollout-only", "--out", str(tmp_path)]
    for more in (["--job-s", "7", "--budget-s", "500"], ["--job-s", "700", "--budget-s", "300"], ["--budget-s", "300"]):
        Jobs(parse([*words, *more])).run(tmp_path / "inputs")
    assert given[0][1] == 7
    assert all(0 < limit_s <= 300 for _, limit_s in given[1:])
    assert all(set(ROLLOUT_ONLY) < set(words) for words, _ in given)
    stored = read_result(tmp_path / "jobs.json")
    assert stored["options"]["rollout_only"]
    assert stored["engine"] == {"shape": "tiny", "prompt_tokens": CPU_PROMPT_TOKENS}
    words.remove("--rollout-only")
    Jobs(parse(words)).run(tmp_path / "inputs")
    assert not set(ROLLOUT_ONLY) & set(given[-1][0])


def test_a_limit_of_no_seconds_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="--job-s 0.0 is not allowed: must be above 0"):
        jobs.main(["--out", str(tmp_path), "--job-s", "0"])


def test_a_dry_run_shows_the_command_of_every_mode(tmp_path, capsys):
    words = ["--shape", "8b", "--gpus", "0", "--modes", "sync", "partial_reuse_kv", "--set", "a.b=1", "--dry-run"]
    jobs.main([*words, "--out", str(tmp_path / "out")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["sync", "partial_reuse_kv"]
    assert all(line.endswith(" a.b=1") and "partial_rollout.main_ppo" in line for line in lines)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", MODES)
def test_no_option_of_a_mode_is_left_to_be_filled_in(mode):
    assert not [option for option in jobs.mode_options(mode, 48) if "{" in option]


def test_adaptive_slots_start_from_the_job_s_own():
    options = jobs.mode_options("partial_adaptive", 48)
    assert "partial_rollout.num_slots=48" in options
    assert "actor_rollout_ref.rollout.max_num_seqs=96" in options


def test_stored_rollouts_trained_nothing_and_others_did(repository):
    names = sorted(path.stem for path in (repository / "benchmarks/results/gpu").glob("jobs_*.json"))
    with_training = {
        "jobs_0.6b_separate_h100",
        "jobs_0.6b_separate_repeats_h200",
        "jobs_0.6b_two_gpus_h100",
        "jobs_4b_activations_h200",
        "jobs_4b_bypass_h200",
        "jobs_4b_h200",
        "jobs_4b_released_h200",
        "jobs_4b_training_h200",
    }
    assert len(names) == 25
    for name, trained in ((name, name in with_training) for name in names):
        result = read_result(repository / f"benchmarks/results/gpu/{name}.json")
        steps = [step for job in result["jobs"] for step in job["steps"]]
        assert {"timing_s/update_actor" in step for step in steps} == {trained}
        assert result["options"].get("rollout_only", False) is not trained


WINDOW = re.compile(r"(\d+)_to_(\d+)")
"""Names of windows that are steps of jobs, both ends among them."""


def windows_of_jobs(result) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Windows of a stored result, and the steps of the job that each is of."""
    jobs = {job["mode"]: job.get("first_steps", []) + job["steps"] for job in result["jobs"]}
    for name, window in result.get("windows", {}).items():
        if between := WINDOW.fullmatch(name):
            first, last = map(int, between.groups())
            yield from ((window[mode], jobs[mode][first - 1 : last]) for mode in window.keys() & jobs.keys())


def test_stored_windows_are_those_of_their_steps(repository):
    checked = ages = 0
    for path in sorted((repository / "benchmarks/results/gpu").glob("jobs_*.json")):
        result = read_result(path)
        load = Workload(**result["workload"])
        prompt_tokens = result["engine"].get("prompt_tokens", shapes.PROMPT_TOKENS)
        for window, steps in windows_of_jobs(result):
            generation_s = sum(step["timing_s/gen"] for step in steps)
            tokens = sum(response_tokens(step, load, prompt_tokens) for step in steps)
            assert window.get("num_steps", len(steps)) == len(steps)
            assert window["gen_s"] == pytest.approx(generation_s / len(steps), rel=1e-3)
            assert window["step_s"] == pytest.approx(mean(step["timing_s/step"] for step in steps), rel=1e-3)
            assert window["tokens_per_s"] == pytest.approx(tokens / generation_s, rel=1e-3)
            if age := next((age for age in STALENESS if age in steps[0] and "staleness" in window), None):
                assert window["staleness"] == pytest.approx(mean(step[age] for step in steps), abs=1e-3)
                ages += 1
            checked += 1
    assert (checked, ages) == (100, 73)


def test_jobs_that_get_nowhere_are_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(jobs, "command", lambda *_, **__: [sys.executable, "-c", "raise SystemExit(7)"])
    monkeypatch.setattr(shapes, "write_weights", lambda *_: None)
    words = ["--shape", "tiny", "--modes", "sync", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="no job got to a measured step"):
        Jobs(parse(words)).run(tmp_path / "inputs")
    assert [job["code"] for job in read_result(tmp_path / "jobs.json")["jobs"]] == [7]


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


def test_a_job_is_ended_after_so_many_steps(tmp_path):
    """A job that is not ended would wait for ever."""
    job = run_job(
        [sys.executable, "-c", f"{METRICS}import threading; threading.Event().wait()"], tmp_path, 60.0, end_after=3
    )
    assert len(job["ends_s"]) == 4
    assert job["job_s"] < 60
