"""One step-wise server for all tests of this folder, and what whole-request execution generates."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from tests import preloaded

if os.environ.get("PARTIAL_ROLLOUT_OMNI") == "1":
    import vllm_omni  # noqa: F401 - `make test-omni`: it must be here
else:
    pytest.importorskip("vllm_omni", reason="vllm-omni is in an environment of its own: make test-omni")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.omni.support import Rig


MODULES = {
    preloaded.FIRST: (
        "vllm_omni",
        "vllm_omni.diffusion.data",
        "diffusers",
        "peft",
        "hydra",
        "partial_rollout.diffusion.qwen_image",
        "partial_rollout.diffusion.worker_extension",
        "partial_rollout.diffusion.engine",
    ),
    preloaded.JOB: ("ray._private.workers.default_worker", "partial_rollout.diffusion.server"),
}


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vllm-omni changes vLLM when it is imported, and comes first."""
    from tests.conftest import start_nursery

    return start_nursery(tmp_path_factory, MODULES)


@pytest.fixture(scope="session")
def tiny_qwen_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint."""
    from partial_rollout.run.tiny_qwen_image.make_checkpoint import make_checkpoint

    path = tmp_path_factory.mktemp("qwen-image")
    make_checkpoint(path)
    return path


@pytest.fixture(scope="session")
def whole(tiny_qwen_image: Path) -> dict[str, Any]:
    """Results of whole-request execution, by request id; its engines are gone before the step-wise one starts."""
    from tests.omni.support import Rig, adapted_part

    rig = Rig(tiny_qwen_image, step_execution=False)
    requests = [
        rig.request("plain"),
        rig.request("guided", guided=True),
        rig.request("other", prompt="a rather long description of a green circle"),
    ]
    results = {request.request_id: rig.generate(request)[0] for request in requests}
    results["together"] = rig.generate(requests[0], requests[2])
    # An engine that has had no update yet.
    rig.run(rig.send(list(adapted_part(tiny_qwen_image).items()), is_part=True))
    [results["part"]] = rig.generate(requests[0])
    rig.close()
    half = Rig(tiny_qwen_image, step_execution=False, dtype="bfloat16")
    [results["bfloat16"]] = half.generate(requests[1])
    half.close()
    return results


@pytest.fixture(scope="session")
def rig(tiny_qwen_image: Path, whole: dict[str, Any]) -> Iterator[Rig]:
    """The step-wise server; tests leave it running, its gate open, with the checkpoint's weights."""
    from tests.omni.support import Rig

    rig = Rig(tiny_qwen_image, step_execution=True)
    yield rig
    rig.close()
