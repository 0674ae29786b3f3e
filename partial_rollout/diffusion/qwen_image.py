"""Qwen-Image pipelines on vllm-omni for FlowGRPO and MixGRPO: whole requests, and one denoise step at a time.

FlowGRPO and MixGRPO differ only in how a request's SDE window is drawn (`contract.py`), so both use these classes.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline
from vllm_omni.diffusion.models.qwen_image.rope_utils import txt_seq_lens_from_embeds

from partial_rollout.diffusion.policy import padded
from partial_rollout.diffusion.sample import OPTIONS_KEY, Sample, SampleOptions, advance
from partial_rollout.diffusion.sampling import NO_CFG
from partial_rollout.diffusion.snapshot import EMBEDS, SampleState, unpack
from partial_rollout.errors import DataError
from partial_rollout.integrations.omni_compat import image_output, step_request_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
    from vllm_omni.diffusion.worker.input_batch import InputBatch
    from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
    from vllm_omni.diffusion.worker.utils import StepRequestState

DEFAULT_NUM_STEPS = 50


class QwenImageRollout(QwenImagePipeline):
    """Runs a batch of requests from noise to image in one `forward`."""

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        """Take the parameters of QwenImagePipeline; vllm-omni loads the weights afterwards."""
        super().__init__(od_config=od_config, prefix=prefix)
        self.weight_version = 0
        """Version of the transformer's weights; the worker extension sets it after an update."""
        self.num_denoise_steps = 0
        """Denoise steps computed for all requests, also for those that were aborted."""
        if self.device.type == "cpu":
            from partial_rollout.diffusion.omni_cpu_layers import prepare_for_cpu

            prepare_for_cpu(self.transformer)

    def prepare_encode(self, state: StepRequestState, **kwargs: Any) -> StepRequestState:
        """Give a request its embeddings, noise and schedule: new ones, or those of its snapshot."""
        options = SampleOptions.of(state.sampling.extra_args)
        self._interrupt, self._attention_kwargs = False, {}
        if options.snapshot is None:
            self._start(state, options)
        else:
            self._restore(state, unpack(options.snapshot, self.device, options.name))
        state.txt_seq_lens = txt_seq_lens_from_embeds(state.prompt_embeds)
        state.negative_txt_seq_lens = txt_seq_lens_from_embeds(state.negative_prompt_embeds)
        state.prompt_embeds_mask = _full_mask(state.prompt_embeds)
        state.negative_prompt_embeds_mask = _full_mask(state.negative_prompt_embeds)
        height, width = self._size(state)
        patch = self.vae_scale_factor * 2
        state.img_shapes = [[(1, height // patch, width // patch)]]
        state.sampling.cfg_normalize = True
        return state

    def forward(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Run all requests together from noise to image, with one forward of the transformer for each step."""
        states = [self._new_state(request) for request in req.requests]
        latents = torch.cat([_latents(state) for state in states])
        embeds, mask = padded([_tensor(state.prompt_embeds) for state in states])
        negative, negative_mask = (
            padded([_tensor(state.negative_prompt_embeds) for state in states])
            if states[0].do_true_cfg
            else (None, None)
        )
        guidance = None if states[0].guidance is None else torch.cat([_tensor(state.guidance) for state in states])
        while not states[0].denoise_completed:
            velocity = self._predict(
                latents=latents,
                timestep=torch.stack([_tensor(state.current_timestep) for state in states]),
                guidance=guidance,
                prompt_embeds=embeds,
                prompt_embeds_mask=mask,
                img_shapes=[shape for state in states for shape in state.img_shapes or ()],
                txt_seq_lens=txt_seq_lens_from_embeds(embeds),
                do_true_cfg=states[0].do_true_cfg,
                negative_prompt_embeds=negative,
                negative_prompt_embeds_mask=negative_mask,
                negative_txt_seq_lens=txt_seq_lens_from_embeds(negative),
                true_cfg_scale=_cfg_scale(states[0]),
            )
            for row, state in enumerate(states):
                self.step_scheduler(state, velocity[row : row + 1])
            latents = torch.cat([_latents(state) for state in states])
        return [self.post_decode(state) for state in states]

    def step_scheduler(self, state: StepRequestState, noise_pred: torch.Tensor, **kwargs: Any) -> None:
        """Take one denoise step of a request with the model's prediction [1, T, C] for it."""
        state.latents = advance(
            sample_of(state),
            step=state.step_index,
            sigmas=_schedule(state).sigmas,
            timestep=_tensor(state.current_timestep),
            latents=_latents(state),
            velocity=noise_pred,
            weight_version=self.weight_version,
        )
        state.step_index += 1

    def post_decode(self, state: StepRequestState, **kwargs: Any) -> DiffusionOutput:
        """The image, and everything that training needs to compute the log-probs again."""
        sample, (height, width) = sample_of(state), self._size(state)
        image = self._decode_latents(_latents(state), height, width).output
        trajectory = {
            "latents": _joined(sample.latents),
            "log_probs": _joined(sample.log_probs),
            "timesteps": _joined(sample.timesteps),
            "final": _latents(state),
            "sigmas": _schedule(state).sigmas,
            "versions": sample.versions,
            "window": (sample.options.window.start, sample.options.window.stop),
            **{name: state.extra[name] for name in EMBEDS if name in state.extra},
        }
        return image_output(image, trajectory)

    def _predict(self, *, true_cfg_scale: float, **inputs: Any) -> torch.Tensor:
        self.num_denoise_steps += inputs["latents"].shape[0]
        positive, negative, _ = self._build_denoise_kwargs(
            **inputs, extra_transformer_kwargs={"attention_kwargs": self.attention_kwargs, "return_dict": False}
        )
        self.transformer.do_true_cfg = inputs["do_true_cfg"]
        dtype = self._dtype()
        for branch in (positive, negative or {}):
            branch.update({name: branch[name].to(dtype) for name in ("hidden_states", "timestep") if name in branch})
        velocity = self.predict_noise_maybe_with_cfg(
            inputs["do_true_cfg"], true_cfg_scale, positive, negative, cfg_normalize=True
        )
        return _tensor(velocity)

    def _new_state(self, request: Any) -> StepRequestState:
        new_state = step_request_state()
        return self.prepare_encode(
            new_state(request_id=request.request_id, sampling=request.sampling_params, prompt=request.prompt)
        )

    def _start(self, state: StepRequestState, options: SampleOptions) -> None:
        sampling, (height, width) = state.sampling, self._size(state)
        generator = cast("torch.Generator", sampling.generator)
        state.extra[OPTIONS_KEY] = Sample(options, generator)
        raw: Any = state.prompt
        prompt: Mapping[str, Any] = raw if isinstance(raw, dict) else {"prompt": raw}
        state.do_true_cfg = _cfg_scale(state) > NO_CFG and _has_negative(prompt)
        self._keep_embeds(state, "prompt_embeds", self._encode(prompt, "prompt"))
        if state.do_true_cfg:
            self._keep_embeds(state, "negative_prompt_embeds", self._encode(prompt, "negative_prompt"))
        channels = self.transformer.in_channels // 4
        state.latents = self.prepare_latents(
            1, channels, height, width, torch.float32, torch.device(generator.device), generator
        ).to(self.device)
        state.timesteps, state.scheduler = self._make_schedule(state)
        state.step_index = 0
        if self.transformer.guidance_embeds:
            state.guidance = torch.full([1], sampling.guidance_scale or NO_CFG, dtype=torch.float32, device=self.device)

    def _restore(self, state: StepRequestState, saved: SampleState) -> None:
        """Go on where another request was interrupted.

        Raises:
            DataError: image size, number of steps or guidance of the request and of its snapshot differ.
        """
        sampling = state.sampling
        asked = (*self._size(state), sampling.num_inference_steps or DEFAULT_NUM_STEPS, _cfg_scale(state))
        found = (saved.height, saved.width, saved.num_steps, saved.true_cfg_scale)
        if asked != found:
            names = "height, width, num_steps, true_cfg_scale"
            raise DataError(f"the request asks for ({names}) = {asked}, its snapshot has {found}", "bad_snapshot")
        tensors = saved.tensors
        state.extra[OPTIONS_KEY] = saved.sample
        state.sampling.generator = saved.sample.generator
        state.step_index, state.do_true_cfg = saved.step_index, saved.do_true_cfg
        state.latents, state.guidance = tensors["latents"], tensors.get("guidance")
        for name in EMBEDS:
            if name in tensors:
                self._keep_embeds(state, name, tensors[name])
        state.scheduler = scheduler = cast("Any", copy.deepcopy(self.scheduler))
        state.timesteps = scheduler.timesteps = tensors["timesteps"]
        scheduler.sigmas = tensors["sigmas"].cpu()

    @staticmethod
    def _keep_embeds(state: StepRequestState, name: str, embeds: torch.Tensor) -> None:
        """Set the embeddings and keep a copy: vllm-omni pads the state's own in place, to the width of its batch."""
        setattr(state, name, embeds)
        state.extra[name] = embeds.clone()

    def _encode(self, prompt: Mapping[str, Any], name: str) -> torch.Tensor:
        """Embeddings [1, L, D] of token ids that have the template in them, or of raw text (the engine's warm-up).

        Their dtype is the transformer's; the text encoder has that of its checkpoint, which may be another one.
        """
        dtype, ids = self._dtype(), prompt.get(f"{name}_token_ids")
        if ids is None:
            return self.encode_prompt(prompt.get(name) or "", prompt_name=name)[0].to(dtype)
        tokens = torch.tensor([list(ids)], device=self.device)
        hidden = self.text_encoder(input_ids=tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True)
        return hidden.hidden_states[-1][:, self.prompt_template_encode_start_idx :].to(dtype)

    def _dtype(self) -> torch.dtype:
        weight: Any = self.transformer.img_in.weight
        return weight.dtype

    def _make_schedule(self, state: StepRequestState) -> tuple[torch.Tensor, Any]:
        """Timesteps [num_steps] and a scheduler that is this request's alone."""
        num_steps = state.sampling.num_inference_steps or DEFAULT_NUM_STEPS
        if num_steps == 1:
            scheduler: Any = copy.deepcopy(self.scheduler)
            # vllm-omni stretches a schedule to its last level, which divides by zero if there is one level only.
            scheduler.sigmas = torch.tensor([1.0, 0.0])
            timesteps = torch.tensor([float(scheduler.config["num_train_timesteps"])], device=self.device)
            return timesteps, scheduler
        timesteps, _ = self.prepare_timesteps(num_steps, state.sampling.sigmas, _latents(state).shape[1])
        # vllm-omni leaves them on the CPU, and joins no batch of two devices: a sample that goes on has them here.
        return timesteps.to(self.device), copy.deepcopy(self.scheduler)

    def _size(self, state: StepRequestState) -> tuple[int, int]:
        default = self.default_sample_size * self.vae_scale_factor
        return state.sampling.height or default, state.sampling.width or default


class QwenImageStepwiseRollout(QwenImageRollout):
    """Runs one denoise step of all requests in the batch at a time; requests join and leave between steps."""

    def denoise_step(
        self, input_batch: InputBatch, *, states: Sequence[StepRequestState] | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Predict the velocity [B, T, C] of every request at its own timestep."""
        return self._predict(
            latents=input_batch.latents,
            timestep=input_batch.timesteps,
            guidance=input_batch.guidance,
            prompt_embeds=input_batch.prompt_embeds,
            prompt_embeds_mask=input_batch.prompt_embeds_mask,
            img_shapes=input_batch.img_shapes,
            txt_seq_lens=txt_seq_lens_from_embeds(input_batch.prompt_embeds),
            do_true_cfg=input_batch.do_true_cfg,
            negative_prompt_embeds=input_batch.negative_prompt_embeds,
            negative_prompt_embeds_mask=input_batch.negative_prompt_embeds_mask,
            negative_txt_seq_lens=txt_seq_lens_from_embeds(input_batch.negative_prompt_embeds),
            true_cfg_scale=input_batch.true_cfg_scale,
        )

    def state_of(self, state: StepRequestState) -> SampleState:
        """What a snapshot of a request between two steps holds."""
        height, width = self._size(state)
        tensors = {
            "latents": _latents(state),
            "sigmas": _schedule(state).sigmas,
            "timesteps": _tensor(state.timesteps),
            **{name: state.extra[name] for name in EMBEDS if name in state.extra},
        }
        if state.guidance is not None:
            tensors["guidance"] = state.guidance
        return SampleState(
            sample=sample_of(state),
            step_index=state.step_index,
            height=height,
            width=width,
            do_true_cfg=state.do_true_cfg,
            true_cfg_scale=_cfg_scale(state),
            tensors=tensors,
        )


def sample_of(state: StepRequestState) -> Sample:
    """Our part of a request's state: its trajectory so far."""
    return state.extra[OPTIONS_KEY]


def _schedule(state: StepRequestState) -> Any:
    return state.scheduler


def _latents(state: StepRequestState) -> torch.Tensor:
    return _tensor(state.latents)


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"vllm-omni's state of a request has a {type(value).__name__} where a tensor is expected")
    return value


def _cfg_scale(state: StepRequestState) -> float:
    """Guidance scale of a request; vllm-omni's default is 4, with and without a negative prompt."""
    return float(state.sampling.true_cfg_scale or 4.0)


def _has_negative(prompt: Mapping[str, Any]) -> bool:
    return prompt.get("negative_prompt_token_ids") is not None or prompt.get("negative_prompt") is not None


def _full_mask(embeds: torch.Tensor | None) -> torch.Tensor | None:
    return None if embeds is None else torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    return torch.cat(tensors) if tensors else None
