"""Names and ways of vllm-omni that differ between its versions 0.24 (for vLLM 0.24, on GPUs) and 0.28 (on a CPU).

Importing this module is cheap: vllm-omni is imported when something of it is asked for.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partial_rollout.errors import VersionError
from partial_rollout.integrations.verl_compat import Requirement, installed_version

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_omni.diffusion.data import DiffusionOutput
    from vllm_omni.diffusion.worker.utils import StepRequestState
    from vllm_omni.outputs import OmniRequestOutput

DISTRIBUTION = "vllm-omni"
WITH_STAGE_FILES = Requirement(DISTRIBUTION, "0.24", "pip install --no-deps vllm-omni==0.24.0")
"""In this version AsyncOmni drops `engine_backend`, unless a file of stages has it; later ones refuse such files."""
STATE_NAMES = ("StepRequestState", "DiffusionRequestState")
"""Newest first."""
TRAJECTORY = "trajectory"


@contextmanager
def async_omni_arguments(model: str, **engine: Any) -> Iterator[dict[str, Any]]:
    """Arguments of AsyncOmni for one diffusion engine with the settings `engine`; they hold within the block."""
    if not WITH_STAGE_FILES.accepts(installed_version(DISTRIBUTION) or ""):
        yield {"model": model, **engine}
        return
    stage = {
        "stage_id": 0,
        "stage_type": "diffusion",
        "runtime": {"process": True, "devices": "0"},
        "engine_args": {"model_stage": "diffusion", **engine},
        "final_output": True,
        "final_output_type": "image",
    }
    with tempfile.TemporaryDirectory(prefix="partial-rollout-") as folder:
        path = Path(folder, "stages.yaml")
        path.write_text(json.dumps({"stage_args": [stage]}), encoding="utf-8")  # JSON is YAML
        yield {"model": model, "stage_configs_path": str(path)}


def image_output(image: Any, trajectory: Mapping[str, Any]) -> DiffusionOutput:
    """What a pipeline returns for one decoded image, with its tensors on the CPU; read by `trajectory_of`."""
    from vllm_omni.diffusion.data import DiffusionOutput

    if any(field.name == "custom_output" for field in dataclasses.fields(DiffusionOutput)):
        # 0.24 moves what lies in `custom_output`, and nothing that lies deeper.
        former: Any = DiffusionOutput
        return former(output=image, custom_output=dict(trajectory), to_cpu=True)
    return DiffusionOutput(output={"payload": {"image": image, TRAJECTORY: dict(trajectory)}}, to_cpu=True)


def trajectory_of(output: OmniRequestOutput) -> Mapping[str, Any] | None:
    """The trajectory of an image, as its pipeline gave it to `image_output`; None if there is none."""
    found = (output.multimodal_output or {}).get(TRAJECTORY)
    return found or getattr(output, "custom_output", None) or None


def step_request_state() -> type[StepRequestState]:
    """The class of a request's state in the worker."""
    from vllm_omni.diffusion.worker import utils

    for name in STATE_NAMES:
        if hasattr(utils, name):
            return getattr(utils, name)
    raise VersionError(f"found vllm-omni {installed_version(DISTRIBUTION)}, which has none of {', '.join(STATE_NAMES)}")
