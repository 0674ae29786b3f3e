"""The benchmark of image jobs in its shortest form."""

from __future__ import annotations

import json
import os
import subprocess

from tests import preloaded

TIMEOUT_S = 600


def test_every_way_to_interrupt_is_measured(repository, nursery, tmp_path):
    words = ["--repeats", "1", "--images", "2", "--steps", "4", "--gap-s", "0.01", "--json", str(tmp_path / "out.json")]
    run = subprocess.run(
        [preloaded.client(nursery), "-m", "benchmarks.bench_diffusion", *words], cwd=repository, timeout=TIMEOUT_S,
        env=os.environ | preloaded.environment_of_jobs(nursery) | {"PYTHONPATH": str(repository)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:]
    summary = json.loads((tmp_path / "out.json").read_text())["summary"]
    assert set(summary["at_once"]) == {"whole, one by one", "whole, batched", "step-wise"}
    assert set(summary["interrupted"]) == {"not interrupted", "hold", "snapshot", "regenerate"}
    assert summary["interrupted"]["hold"]["wasted_steps"][0] == 0
