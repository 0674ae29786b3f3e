"""Imports point inward, and foreign names stay in their rooms (CONTRIBUTING, layout)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.guards.source import OWN, PACKAGE, Source, parse, sources

PURE = (
    "partial_rollout.core",
    "partial_rollout.types",
    "partial_rollout.errors",
    "partial_rollout.settings.block",
    "partial_rollout.settings.command_line",
    "partial_rollout.advise.scheduler",
    "partial_rollout.rollout.suffixes",
    "partial_rollout.weights.protocol",
    *(f"partial_rollout.diffusion.{name}" for name in ("books", "hold", "sampling", "sde_window")),
    *(f"partial_rollout.packing.{name}" for name in ("balance", "plan", "planners")),
)
"""Modules, or rooms with all their modules, that decide and do nothing else: they import only each other."""
PURE_MUST_NOT_IMPORT = ("asyncio", "ray", "torch", "vllm", "verl", "transfer_queue", "tensordict", "numpy")
CONTRACTS = ("types", "errors")
"""What everything shares imports nothing else of ours."""
ROOMS_WITH = {
    "verl": {"integrations", "rollout", "weights", "packing", "train", "agent_loop", "diffusion", "run", "launch"},
    "vllm": {"integrations", "rollout", "weights", "diffusion", "advise"},
    "vllm_omni": {"integrations", "diffusion"},
    "diffusers": {"diffusion", "run"},
}
IMAGES = "partial_rollout.diffusion"
IMAGE_CODE = {"diffusion", "main_diffusion"}
"""Image jobs are a room of their own: the text code runs without it."""
HEAVY = ("ray", "torch", "vllm", "verl", "transformers", "numpy", "omegaconf", "asyncio")


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def is_pure(module: str) -> bool:
    return any(is_within(module, name) for name in PURE)


def violations(source: Source) -> list[str]:
    found = []
    for module, line in source.imports():
        where = f"{source.name}:{line} imports {module}"
        if is_pure(source.module) and is_within(module, OWN) and not is_pure(module):
            found.append(f"{where}: pure parts know only each other")
        if is_pure(source.module) and any(is_within(module, name) for name in PURE_MUST_NOT_IMPORT):
            found.append(f"{where}: this module is pure")
        if source.room in CONTRACTS and is_within(module, OWN) and module.split(".")[1] not in CONTRACTS:
            found.append(f"{where}: the shared contracts import nothing of ours")
        if is_within(module, IMAGES) and source.room not in IMAGE_CODE:
            found.append(f"{where}: text code imports nothing from the image jobs")
        found += [
            f"{where}: {name} belongs in {', '.join(sorted(rooms))}"
            for name, rooms in ROOMS_WITH.items()
            if is_within(module, name) and source.room not in rooms
        ]
    return found


def test_imports_point_inward():
    assert [line for source in sources() for line in violations(source)] == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/x.py", "import asyncio"),
        ("core/x.py", "def f():\n    from ray import get"),
        ("core/x.py", "from partial_rollout.runtime import manager"),
        ("core/x.py", "from ..runtime import manager"),
        ("types.py", "from partial_rollout import core"),
        ("runtime/x.py", "import verl.utils"),
        ("train/x.py", "from vllm import LLM"),
        ("observability/x.py", "import vllm"),
        ("rollout/x.py", "import vllm_omni.diffusion"),
        ("rollout/x.py", "from partial_rollout.diffusion.hold import Hold"),
        ("main_ppo.py", "from partial_rollout import diffusion"),
    ],
)
def test_the_guard_sees_it(path: str, text: str):
    assert len(violations(parse(PACKAGE / path, text))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/x.py", "from partial_rollout.types import Claim\nfrom . import queue"),
        ("runtime/x.py", "import ray, asyncio\nfrom partial_rollout.core.queue import queue"),
        ("core/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("rollout/x.py", "import vllm, verl"),
    ],
)
def test_the_guard_lets_pass(path: str, text: str):
    assert violations(parse(PACKAGE / path, text)) == []


def test_pure_parts_stay_light():
    """Importing all pure parts in a fresh interpreter brings in no heavy package."""
    modules = [source.module for source in sources() if is_pure(source.module)]
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += f"print(','.join(m for m in {HEAVY!r} if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == ""


def test_the_plugin_is_cheap_where_it_is_not_asked_for():
    """verl loads it in every process: without VERL_PLATFORM=cpu it must not import torch or verl."""
    code = "import sys, partial_rollout.integrations.verl_plugin, partial_rollout.integrations.verl_compat\n"
    code += f"print(','.join(m for m in {HEAVY[:5]!r} if m in sys.modules))"
    environment = {"PYTHONPATH": str(PACKAGE.parent)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert result.stdout.strip() == ""
