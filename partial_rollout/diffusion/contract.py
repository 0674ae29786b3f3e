"""The adapter of an algorithm: the pipeline class that an engine runs for it, and how its SDE windows are drawn.

Each algorithm has a plain adapter, which runs a request from noise to image in one call, and may have a step-wise one.
A step-wise pipeline implements the four methods of vllm-omni's `SupportsStepExecution`, so that requests join and leave
the engine's batch between two denoise steps:

    prepare_encode(state) -> state         once: prompt, noise and schedule, or what a snapshot holds of them
    denoise_step(batch, states) -> noise   every step: one forward of the transformer for all requests in the batch
    step_scheduler(state, noise)           every step and request: `advance`, then `step_index` grows by one
    post_decode(state) -> output           once: image and trajectory

`state` is vllm-omni's `StepRequestState`; its `extra[OPTIONS_KEY]` holds our `sample.Sample`. Between two steps a
request consists of its `state` alone: there it can be held, packed into a snapshot and moved to another engine.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partial_rollout.diffusion.sde_window import window_of_request, window_of_step
from partial_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from partial_rollout.diffusion.sde_window import SdeWindow

log = logging.getLogger(__name__)

STEPWISE_SUFFIX = "_stepwise"


@dataclass(frozen=True, slots=True)
class Adapter:
    """What `register` keeps of one adapter."""

    algorithm: str
    pipeline: str
    """Import path of the pipeline class, for vllm-omni's `custom_pipeline_args`."""
    window: Callable[..., SdeWindow]
    """Draws the window of one request: (plan, *, run_seed, global_step, request_seed)."""
    stepwise: bool
    """Whether the engine must run this pipeline with `step_execution`."""
    shares_window: bool = False
    """Whether all samples of a training step must have the same window."""


def channel_name(rank: int) -> str:
    """Name of the weight channel to worker `rank` of a server; the trainer and the worker meet under this name."""
    return f"diffusion worker {rank}"


_ADAPTERS: dict[tuple[str, str], Adapter] = {}


def register(architecture: str, name: str, adapter: Adapter) -> None:
    """Make an adapter known under (architecture, name); the name of a step-wise adapter ends in `_stepwise`.

    Raises:
        ConfigError: the name is taken by another adapter, or its ending and `adapter.stepwise` disagree.
    """
    if adapter.stepwise != name.endswith(STEPWISE_SUFFIX):
        raise ConfigError(
            f"adapter {name!r} has stepwise={adapter.stepwise}: the names of step-wise adapters, and no others, end in "
            f"{STEPWISE_SUFFIX!r}"
        )
    known = _ADAPTERS.setdefault((architecture, name), adapter)
    if known != adapter:
        raise ConfigError(
            f"adapter {name!r} of {architecture} is taken by {known.pipeline}: {adapter.pipeline} needs another name"
        )


def resolve(architecture: str, algorithm: str, *, step_execution: bool) -> Adapter:
    """The adapter of an algorithm; with `step_execution` the step-wise one, or the plain one where there is none.

    Raises:
        ConfigError: the algorithm is not registered for this architecture.
    """
    plain = _ADAPTERS.get((architecture, algorithm))
    if plain is None:
        known = sorted(
            {name for arch, name in _ADAPTERS if arch == architecture and not _ADAPTERS[arch, name].stepwise}
        )
        raise ConfigError(
            f"algorithm.name={algorithm!r} is not registered for {architecture}: must be one of {', '.join(known)}"
            if known
            else f"no algorithm is registered for the architecture {architecture} (set model.path to another model)"
        )
    if not step_execution:
        return plain
    stepwise = _ADAPTERS.get((architecture, algorithm + STEPWISE_SUFFIX))
    if stepwise is None:
        log.warning(
            "rollout.step_execution=true, but no %s%s is registered for %s: requests run whole, batch by batch, and "
            "rollout.prefetch_factor counts as 1",
            algorithm,
            STEPWISE_SUFFIX,
            architecture,
        )
        return plain
    return stepwise


QWEN_IMAGE = "QwenImagePipeline"
_MODULE = "partial_rollout.diffusion.qwen_image"
for _algorithm, _window, _shared in (("flow_grpo", window_of_request, False), ("mix_grpo", window_of_step, True)):
    for _ending, _class in (("", "QwenImageRollout"), (STEPWISE_SUFFIX, "QwenImageStepwiseRollout")):
        register(
            QWEN_IMAGE,
            _algorithm + _ending,
            Adapter(_algorithm, f"{_MODULE}.{_class}", _window, stepwise=bool(_ending), shares_window=_shared),
        )
