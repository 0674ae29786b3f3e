"""The benchmark of image jobs in its shortest form."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import torch

from partial_rollout.run.tiny_qwen_image import make_checkpoint
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


def test_a_layer_of_the_large_transformer_is_as_large_as_qwen_images(monkeypatch):
    """A layer has 339,831,296 parameters, and what is around the layers 29,313,072."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    large = make_checkpoint._large_transformer(1)
    assert large.num_parameters() == 339_831_296 + 29_313_072
    assert (large.dtype, torch.get_default_dtype()) == (torch.bfloat16, torch.float32)


def test_a_folder_with_another_model_is_not_taken_for_the_one_that_is_asked_for(monkeypatch, tiny_qwen_image):
    words = ["make_checkpoint", "--out", str(tiny_qwen_image)]
    monkeypatch.setattr("sys.argv", words)
    make_checkpoint.main()
    for layers in ("2", "20"):
        monkeypatch.setattr("sys.argv", [*words, "--layers", layers])
        with pytest.raises(SystemExit, match="has a tiny model of 2 layers"):
            make_checkpoint.main()
