"""An engine without a model, for the server around it: it generates only when told to."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
from verl.workers.rollout.replica import RolloutMode
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from partial_rollout.rollout.server import PartialRolloutServer
from partial_rollout.settings.block import PartialRolloutConfig


def completion(token_ids: list[int], *, logprobs: list[Any] | None, finish_reason: str | None) -> CompletionOutput:
    return CompletionOutput(
        index=0,
        text="",
        token_ids=token_ids,
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason=finish_reason,
    )


def output(
    token_ids: list[int],
    finish_reason: str | None = None,
    logprobs: list[Any] | None = None,
    num_cached_tokens: int = 0,
) -> RequestOutput:
    """One streamed delta."""
    return RequestOutput(
        request_id="",
        prompt=None,
        prompt_token_ids=[],
        prompt_logprobs=None,
        outputs=[completion(token_ids, logprobs=logprobs, finish_reason=finish_reason)],
        finished=finish_reason is not None,
        num_cached_tokens=num_cached_tokens,
    )


class FakeEngine:
    """Holds requests until `finish`, `pause_generation` or `die`; `accept` can hold back admissions."""

    def __init__(self) -> None:
        self.queues: dict[str, RequestOutputCollector] = {}
        self.prompts: dict[str, Any] = {}
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())
        self.errored = False
        self.log_stats = True
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.accept = asyncio.Event()
        self.accept.set()
        self.abort_on_pause = True
        self.rpc_failure: Exception | None = None
        self.answers_rpc = True
        self.answers_wake_up = self.answers_reset = self.answers_pause = True
        self.forgets = True
        self.is_dead = False

    def shutdown(self, timeout: float) -> None:
        self.calls.append("shutdown")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())

    async def add_request(self, request_id: str, prompt: Any, params: Any, **options: Any) -> RequestOutputCollector:
        await self.accept.wait()
        self._note(f"add {request_id}")
        self.prompts[request_id] = prompt
        self.queues[request_id] = RequestOutputCollector(params.output_kind, request_id)
        return self.queues[request_id]

    async def abort(self, request_id: str | list[str], internal: bool = False) -> None:
        for each in [request_id] if isinstance(request_id, str) else request_id:
            self._note(f"abort {each}")
            queue = self.queues.pop(each, None)
            if queue is not None:
                queue.put(output([], "abort"))

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._note(f"pause {mode} {clear_cache}")
        if not self.answers_pause:
            await asyncio.Event().wait()
        if mode == "abort" and self.abort_on_pause:
            self._end_all(lambda: output([], "abort"))

    async def resume_generation(self) -> None:
        self._note("resume")

    def stream(self, request_id: str, token_ids: list[int]) -> None:
        self.queues[request_id].put(output(token_ids))

    def finish(self, request_id: str, token_ids: list[int]) -> None:
        self.queues.pop(request_id).put(output(token_ids, "stop"))

    def die(self) -> None:
        self._end_all(EngineDeadError)

    def _end_all(self, make_item: Any) -> None:
        for queue in self.queues.values():
            queue.put(make_item())
        self.queues.clear()

    async def collective_rpc(self, method: str, **options: Any) -> None:
        msgspec.msgpack.encode(options)  # as vLLM does on the way to its workers: TypeError for what is no plain value
        self._note(f"rpc {method}")
        if self.rpc_failure is not None:
            raise self.rpc_failure
        if not self.answers_rpc:
            await asyncio.Event().wait()

    async def wake_up(self, tags: list[str]) -> None:
        self._note(f"wake up {tags}")
        if not self.answers_wake_up:
            await asyncio.Event().wait()

    async def check_health(self) -> None:
        if self.is_dead:
            raise EngineDeadError

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False, reset_connector: bool) -> bool:
        self._note("reset prefix cache" if reset_connector else "reset prefix cache, not the connector's")
        if not self.answers_reset:
            await asyncio.Event().wait()
        return self.forgets

    async def wait_for_requests_to_drain(self) -> None:
        """The fake has no data-parallel engines to wait for."""

    async def reset_mm_cache(self) -> None:
        self._note("reset mm cache")

    async def reset_encoder_cache(self) -> None:
        self._note("reset encoder cache")


class RolloutConfigStub(SimpleNamespace):
    """verl's RolloutConfig, reduced to what `generate` reads."""

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)


class FakeServer(PartialRolloutServer):
    """The real server around a fake engine."""

    def __init__(self, settings: PartialRolloutConfig | None = None) -> None:
        self.config = RolloutConfigStub(
            max_model_len=1000,
            full_determinism=False,
            enable_rollout_routing_replay=False,
            mtp=None,
            response_length=100,
            prompt_length=100,
        )
        self.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
        self.replica_rank = self.node_rank = 0
        self.nnodes = 1
        self.rollout_mode = RolloutMode.HYBRID
        self.global_steps = None
        self._disaggregation_role = "null"
        self._submission_paused, self._rejecting, self._admitting = False, False, 0
        self._server_address, self._server_port = "fake", 1
        self._init_gate(settings or PartialRolloutConfig())

    async def launch_server(self) -> None:
        await self.run_server(SimpleNamespace(api_key=None, middleware=[]))

    async def run_server(self, args: Any) -> None:
        self._launch_args = args
        self.fake = FakeEngine()
        self._attach_engine(self.fake)
        self._server_task = asyncio.create_task(asyncio.Event().wait())

    def engine_threads(self) -> set[int]:
        """Threads on which the engine was called."""
        return self.fake.threads
