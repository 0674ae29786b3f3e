"""What a diffusion adapter is: four methods that vllm-omni calls, the state they share, and who implements them.

A step-wise adapter takes a request apart so that requests join and leave the batch between denoise steps:

    prepare_encode(state) -> state         once: prompt, noise and schedule, or a snapshot; nothing of the batch
    denoise_step(batch, states) -> noise   every step: one forward of the transformer for all requests in the batch
    step_scheduler(state, noise)           every step and request: `advance`, then `step_index` grows by one
    post_decode(state) -> output           once: image and trajectory

Between two steps `state` is all there is of a request, which is why it can be held, packed and moved there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from partial_rollout.diffusion.sde_window import window_of_request, window_of_step
from partial_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from partial_rollout.diffusion.sde_window import SdeWindow

log = logging.getLogger(__name__)

STEPWISE_SUFFIX = "_stepwise"


class StepState(Protocol):
    """The part of vllm-omni's StepRequestState that adapters read and write."""

    request_id: str
    sampling: Any
    prompt: Any
    prompt_embeds: torch.Tensor | None
    prompt_embeds_mask: torch.Tensor | None
    negative_prompt_embeds: torch.Tensor | None
    negative_prompt_embeds_mask: torch.Tensor | None
    latents: torch.Tensor | None
    timesteps: Any
    step_index: int
    scheduler: Any
    do_true_cfg: bool
    guidance: torch.Tensor | None
    img_shapes: list[Any] | None
    txt_seq_lens: list[int] | None
    negative_txt_seq_lens: list[int] | None
    extra: dict[str, Any]
    """Ours is under `sample.OPTIONS_KEY`: a `sample.Sample`."""


@runtime_checkable
class StepwiseAdapter(Protocol):
    """The four methods, as vllm-omni's SupportsStepExecution asks for them."""

    def prepare_encode(self, state: Any, **kwargs: Any) -> Any: ...
    def denoise_step(self, input_batch: Any, *, states: Sequence[Any] | None = None, **kwargs: Any) -> Any: ...
    def step_scheduler(self, state: Any, noise_pred: torch.Tensor, **kwargs: Any) -> None: ...
    def post_decode(self, state: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """One registered adapter."""

    algorithm: str
    pipeline: str
    """Import path of the pipeline class, for vllm-omni's `custom_pipeline_args`."""
    window: Callable[..., SdeWindow]
    """Draws the window of one request: (plan, *, run_seed, global_step, request_seed)."""
    stepwise: bool
    """Whether the engine must run it with `step_execution`."""
    shares_window: bool = False
    """Whether what one training step trains must have one window."""


_ADAPTERS: dict[tuple[str, str], Adapter] = {}


def register(architecture: str, name: str, adapter: Adapter) -> None:
    """Make an adapter known under (architecture, name); a step-wise one's name ends in `_stepwise`.

    Raises:
        ConfigError: the name is taken by another adapter, or its ending and `adapter.stepwise` disagree.
    """
    if adapter.stepwise != name.endswith(STEPWISE_SUFFIX):
        raise ConfigError(f"adapter {name!r}: exactly the step-wise ones end in {STEPWISE_SUFFIX!r}")
    known = _ADAPTERS.setdefault((architecture, name), adapter)
    if known != adapter:
        raise ConfigError(f"adapter {name!r} of {architecture} is taken by {known.pipeline}")


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
