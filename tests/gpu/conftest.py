"""Tests with a vLLM engine on a GPU, in the environment of requirements/gpu.txt with pytest and pytest-asyncio."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """Asked for without CUDA being initialised here: an engine's process could not be forked then."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        pytest.skip("there is no GPU")
