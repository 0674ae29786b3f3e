"""The client that an agent loop calls. It resumes interrupted generations by itself: callers see whole responses."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ray import cloudpickle
from ray.exceptions import RayActorError
from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from partial_rollout.core.resume import UNRESUMABLE, ResumableGeneration, Segment
from partial_rollout.errors import ActorLost, ConfigError, EngineDead, RunEnded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import ray.actor

    from partial_rollout.core.interrupt import Retained
    from partial_rollout.rollout.stop_strings import StopFinder

FINGERPRINT = (
    "logprobs",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "stop",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
"""Sampling parameters that must be the same when a restarted run goes on from saved tokens."""
SEEN = ("image_data", "video_data", "audio_data", "mm_processor_kwargs")
"""Inputs that a model sees beside tokens. Tokens do not tell them apart: pictures of one size have equal tokens."""
# One client serves all trajectories of a worker, and verl's `generate` does not tell which server it has chosen: each
# trajectory's task has a context of its own.
_SERVER_ID: ContextVar[str] = ContextVar("partial_rollout_server_id", default="(none acquired)")


class ResumingLLMServerClient(LLMServerClient):
    """LLMServerClient whose `generate` returns complete responses, however often a server's gate closes meanwhile.

    The client holds no handle but the load balancer's, so it can be pickled into agent-loop workers.

    Here a function stands for the engine, and is interrupted after its first token:

    >>> from omegaconf import OmegaConf
    >>> from partial_rollout.core.interrupt import FRESH, Context
    >>> from partial_rollout.core.resume import ABORTED, STOPPED
    >>> async def segment(request_id, generation, *_):
    ...     tokens, reason = ([9], STOPPED) if generation.token_ids else ([5], ABORTED)
    ...     fields = {"retained": None, "context": Context(7, FRESH), "global_steps": 7, "gate_openings": 0}
    ...     return TokenOutput(token_ids=tokens, stop_reason=reason, extra_fields=fields)
    >>> rollout = {"name": "vllm", "max_model_len": None}
    >>> client = ResumingLLMServerClient(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}))
    >>> client._generate_segment = segment
    >>> response = asyncio.run(client.generate("a_0", prompt_ids=[1, 2], sampling_params={"max_tokens": 4}))
    >>> response.token_ids, response.extra_fields["num_interruptions"]
    ([5, 9], 1)
    """

    before_segment: Callable[[], Awaitable[None]] | None = None
    """Awaited before every request to a server; a worker sets it to hold generations back."""
    on_generation: Callable[[ResumableGeneration], None] | None = None
    """Called with every new generation; a worker sets it to give a generation the tokens to go on from."""
    on_segment: Callable[[ResumableGeneration, Segment, str, float], None] | None = None
    """Called with every segment before it is added, the server it comes from, and the seconds that it took."""
    on_server: Callable[[str], None] | None = None
    """Called with the server that the load balancer has chosen, before the request goes there."""
    stop_tokenizer: Any = None
    """The model's tokenizer, which finds stop strings; a worker sets it."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **inputs: Any
    ) -> TokenOutput:
        """Generate one response; arguments as in verl's `LLMServerClient.generate`.

        `extra_fields` of the result: global_steps, min_global_steps, max_global_steps, num_interruptions,
        num_reprefilled_tokens, version_spans (list of [version, num_tokens]), context_spans (list of [oldest KV's
        version, origin, num_tokens], see ContextSpan), num_cached_tokens (first segment's).

        Raises:
            ConfigError: a sampling parameter that cannot be resumed exactly, or stop strings without a tokenizer.
            RunEnded: the run is over.
            EngineDead: the server or its engine died; names it.
            ActorLost: the load balancer died.
            EngineError: the engine ended the request with neither a complete response nor an interruption.
            ResumeStalled: interrupted twice without progress and without a closed gate in between.
        """
        _refuse_unresumable(sampling_params)
        prompt_ids = normalize_token_ids(prompt_ids)
        budget = self._budget(len(prompt_ids), sampling_params)
        seen = {key: inputs[key] for key in SEEN if _is_given(inputs.get(key))}
        # In a thread: all trajectories of a worker share this loop.
        digests = await asyncio.to_thread(_digests, seen) if seen else {}
        generation = _generation(prompt_ids, budget, sampling_params, digests)
        if sampling_params.get("stop"):
            generation.make_finder = await self._finder_factory(prompt_ids, sampling_params)
        if self.on_generation is not None:
            self.on_generation(generation)
        merged, retained = MergedFields(), None
        while not generation.finished:
            if self.before_segment is not None:
                await self.before_segment()
            # After the hold: time held back is not the engine's.
            asked_s = time.monotonic()
            output = await self._generate_segment(request_id, generation, sampling_params, inputs, retained)
            # Taken out: it is for the next request of this response, and nothing of verl's result.
            retained = output.extra_fields.pop("retained")
            merged.add(output)
            segment = _segment(output)
            if self.on_segment is not None:
                self.on_segment(generation, segment, _SERVER_ID.get(), time.monotonic() - asked_s)
            generation.add(segment)
        return merged.complete(generation)

    async def _generate_segment(
        self,
        request_id: str,
        generation: ResumableGeneration,
        sampling_params: dict[str, Any],
        inputs: dict[str, Any],
        retained: Retained | None,
    ) -> TokenOutput:
        request = generation.next_request()
        options: dict[str, Any] = {"is_resumption": True, "retained": retained} if request.is_resumption else {}
        try:
            output = await super().generate(
                request_id,
                prompt_ids=request.prompt_ids,
                sampling_params=_segment_params(sampling_params, generation),
                **inputs,
                **options,
            )
        except RayActorError as error:  # of the server: `_acquire_server` names a dead load balancer
            raise EngineDead(f"server {_SERVER_ID.get()} died while it held request {request_id!r}: {error}") from error
        if output.extra_fields.get("rejected"):
            raise RunEnded(f"request {request_id!r}: turned away by server {_SERVER_ID.get()}")
        return output

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, ray.actor.ActorHandle]:
        try:
            server_id, handle = await super()._acquire_server(request_id, **extra)
        except RayActorError as error:
            raise ActorLost(f"the load balancer died when request {request_id!r} asked it for a server") from error
        _SERVER_ID.set(server_id)
        if self.on_server is not None:
            self.on_server(server_id)
        return server_id, handle

    async def _finder_factory(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Callable[[], StopFinder]:
        if self.stop_tokenizer is None:
            raise ConfigError(
                f"sampling parameter stop={sampling_params['stop']!r} needs the model's tokenizer: set "
                "`stop_tokenizer` of the client, as agent-loop workers do"
            )
        # In a thread, since the import takes seconds; a copy, since an agent loop may change its parameters meanwhile.
        finder_class, params = await asyncio.to_thread(_import_finder), dict(sampling_params)
        return lambda: finder_class(self.stop_tokenizer, prompt_ids, params)

    def _budget(self, prompt_len: int, sampling_params: dict[str, Any]) -> int:
        """Tokens of the whole response: the caller's limit, else verl's server default, within the context."""
        rollout = self.config.actor_rollout_ref.rollout
        budget = sampling_params.get("max_tokens", sampling_params.get("max_new_tokens"))
        if budget is None:
            total = rollout.prompt_length + rollout.response_length
            budget = min(rollout.response_length, total - prompt_len)
        if rollout.max_model_len is not None:
            budget = min(budget, rollout.max_model_len - prompt_len)
        return max(1, budget)


class MergedFields:
    """Merges what verl's TokenOutput carries beside tokens, over all segments."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._last: TokenOutput | None = None
        self._num_cached_tokens: int | None = None
        self._num_preempted: int | None = None
        self._routed_experts: Any = None

    def add(self, output: TokenOutput) -> None:
        """Take in one segment."""
        # Later segments find in the cache what this response itself has left there, which says nothing of its prompt.
        if self._last is None:
            self._num_cached_tokens = output.extra_fields.get("num_cached_tokens")
        self._last = output
        if output.num_preempted is not None:
            self._num_preempted = (self._num_preempted or 0) + output.num_preempted
        if output.routed_experts is not None and output.token_ids:
            self._add_routed_experts(output)

    def _add_routed_experts(self, output: TokenOutput) -> None:
        # A segment reports prompt and response; the routing of the tokens before the segment is known already.
        experts: Any = output.routed_experts
        if self._routed_experts is None:
            self._routed_experts = experts
        else:
            self._routed_experts = np.concatenate([self._routed_experts, experts[-len(output.token_ids) :]])

    def complete(self, generation: ResumableGeneration) -> TokenOutput:
        """Build the result of a finished generation."""
        fields = dict(self._last.extra_fields) if self._last else {}
        # Between server and client only: verl would carry them along in every batch.
        for name in ("gate_openings", "context", "stop_string"):
            fields.pop(name, None)
        fields |= {
            "global_steps": generation.max_version,
            "min_global_steps": generation.min_version,
            "max_global_steps": generation.max_version,
            "num_interruptions": generation.num_interruptions,
            "num_reprefilled_tokens": generation.num_reprefilled_tokens,
            "version_spans": [[span.version, span.num_tokens] for span in generation.spans],
            "context_spans": [[s.kv_version, s.origin, s.num_tokens] for s in generation.context_spans],
            "num_cached_tokens": self._num_cached_tokens,
        }
        experts, num_cut = self._routed_experts, generation.num_cut
        return TokenOutput(
            token_ids=generation.token_ids,
            log_probs=generation.log_probs,
            routed_experts=experts[:-num_cut] if experts is not None and num_cut else experts,
            stop_reason=generation.stop_reason,
            num_preempted=self._num_preempted,
            extra_fields=fields,
        )


class _ByContent(cloudpickle.CloudPickler):
    """Pickles tensors by content: torch pickles a storage with its address, which differs after a restart."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            content = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return tuple, ((str(obj.dtype), tuple(obj.shape), content),)
        return super().reducer_override(obj)


def _is_given(value: Any) -> bool:
    """verl hands over an empty dict where there are no arguments."""
    return value is not None and not (isinstance(value, dict) and not value)


def _digests(seen: dict[str, Any]) -> dict[str, str]:
    """SHA-256 of each value; 100 MB of video take a third of a second."""
    return {key: _digest(value) for key, value in seen.items()}


def _digest(value: Any) -> str:
    data = io.BytesIO()
    _ByContent(data).dump(value)
    return hashlib.sha256(data.getbuffer()).hexdigest()


def _generation(
    prompt_ids: list[int], budget: int, sampling_params: dict[str, Any], digests: dict[str, str]
) -> ResumableGeneration:
    said = {key: sampling_params[key] for key in FINGERPRINT if sampling_params.get(key) is not None}
    return ResumableGeneration(
        prompt_ids,
        budget,
        min_tokens=sampling_params.get("min_tokens", 0),
        stop_token_ids=frozenset(sampling_params.get("stop_token_ids") or ()),
        settings=", ".join(f"{key}={value!r}" for key, value in {**said, "max_tokens": budget, **digests}.items()),
    )


def _import_finder() -> type[StopFinder]:
    """Bring in vLLM, which takes seconds and which a worker needs for stop strings only."""
    from partial_rollout.rollout.stop_strings import StopFinder

    return StopFinder


def _refuse_unresumable(sampling_params: dict[str, Any]) -> None:
    for key in UNRESUMABLE:
        if sampling_params.get(key):
            raise ConfigError(
                f"sampling parameter {key}={sampling_params[key]!r} cannot be resumed exactly after an interruption; "
                "leave it out, or run without partial rollout"
            )


def _segment_params(sampling_params: dict[str, Any], generation: ResumableGeneration) -> dict[str, Any]:
    """Sampling parameters of the next segment; the caller's own dict stays as it is."""
    request = generation.next_request()
    params = {key: value for key, value in sampling_params.items() if key != "max_new_tokens"}
    params["max_tokens"] = request.max_tokens
    if "min_tokens" in params:
        params["min_tokens"] = request.min_tokens
    if params.get("seed") is not None:
        # An unchanged seed would draw the same random numbers as the first tokens did.
        params["seed"] += len(generation.token_ids)
    return params


def _segment(output: TokenOutput) -> Segment:
    return Segment(
        token_ids=output.token_ids,
        log_probs=output.log_probs,
        stop_reason=output.stop_reason,
        version=output.extra_fields["global_steps"],
        openings=output.extra_fields["gate_openings"],
        context=output.extra_fields["context"],
        stop_string=output.extra_fields.get("stop_string"),
    )
