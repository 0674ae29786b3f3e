"""Python and the recipes' shell scripts set the same variables, once."""

from __future__ import annotations

import os

from partial_rollout.run import cpu_environment


def test_what_the_script_exports_is_found_and_nothing_of_the_shells_own():
    found = cpu_environment.cpu_environment()
    assert found["VERL_PLATFORM"] == "cpu"
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "1"
    exported = [line for line in cpu_environment.SCRIPT.read_text().splitlines() if line.startswith("export ")]
    names = {word.partition("=")[0] for line in exported for word in line.partition("#")[0].split()[1:]}
    assert set(found) == names


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "7"})
    cpu_environment.apply_cpu_environment()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
