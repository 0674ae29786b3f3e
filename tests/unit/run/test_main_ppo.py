"""The entry point, as far as it gets without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

HEAVY = ("ray", "torch", "vllm", "verl", "transformers", "numpy")
FLAG = "+async_training.partial_rollout=True"
MAIN = (
    "import sys, runpy\n"
    "try:\n"
    "    runpy.run_module('partial_rollout.main_ppo', run_name='__main__')\n"
    "finally:\n"
    f"    print([name for name in {HEAVY!r} if name in sys.modules])\n"
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([FLAG, "partial_rollout.num_slots=-3"], "num_slots"),
        (["partial_rollout.num_slots=-3"], "num_slots"),
        ([FLAG, "trainer.v1.trainer_mode=sync"], "trainer.v1.trainer_mode=sync (set on the command line) is not"),
        (["trainer.use_v1=False"], "trainer.use_v1=False"),
    ],
)
def test_a_mistake_is_told_before_anything_heavy_is_imported(words: list[str], message: str, tmp_path: Path):
    for name in ("train.parquet", "model"):
        (tmp_path / name).touch()
    paths = [f"{key}={tmp_path / 'train.parquet'}" for key in ("data.train_files", "data.val_files")]
    paths += [f"actor_rollout_ref.model.path={tmp_path / 'model'}", f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "--config-name", "quickstart_cpu", *paths, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
