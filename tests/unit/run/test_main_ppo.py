"""The entry point, as far as it gets without Ray."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from partial_rollout.runtime.folder_lock import folder_of_one_command

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
    check_refused(words, message, tmp_path)


@pytest.mark.parametrize("words", [[FLAG], ["trainer.save_freq=-1"]], ids=["flag", "only events"])
def test_a_second_command_in_the_same_folder_is_told_before_anything_heavy_is_imported(
    words: list[str], tmp_path: Path
):
    words = [*words, f"trainer.default_local_dir={tmp_path / 'checkpoints'}"]
    with folder_of_one_command(tmp_path / "checkpoints", "trainer.default_local_dir"):
        check_refused(words, f"another command (host {platform.node()}, pid {os.getpid()}) runs in trainer.", tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["command.lock"]


def test_a_start_asks_the_hub_about_a_model_that_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        words = [FLAG, "actor_rollout_ref.model.path=some/model", "trainer.v1.trainer_mode=sync"]
        try:
            check_refused(words, "trainer.v1.trainer_mode=sync (set on the command line) is not", tmp_path)
        finally:
            hub.shutdown()
    assert "/api/models/some/model" in {path.partition("?")[0] for path in asked}


def check_refused(words: list[str], message: str, folder: Path) -> None:
    for name in ("train.parquet", "model"):
        (folder / name).touch()
    paths = [f"{key}={folder / 'train.parquet'}" for key in ("data.train_files", "data.val_files")]
    paths += [f"actor_rollout_ref.model.path={folder / 'model'}", f"hydra.run.dir={folder}"]
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
