"""vLLM's AsyncLLM as verl's server sees it: `generate` reports to the gate and returns a segment of a response.

A segment ends when the response is complete, or when the server interrupts the engine. In the mode `keep_kv` a request
stays in the engine between two of its segments:

    add -> running -ends-> gone
            |  ^
         cut|  |claimed, then taken by the request that goes on
            v  |
           kept -not claimed when the engine goes on-> aborted

`Interruption` is the other half of the mode: by which salt KV is found, what the engine is started with, and what
the client is told of an interrupted segment.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from partial_rollout.core.interrupt import FRESH, Context, Retained, context_of, mode_of
from partial_rollout.core.resume import ABORTED
from partial_rollout.errors import EngineError
from partial_rollout.rollout.host_memory import copied_tokens, host_memory
from partial_rollout.weights.directory import SHARED_MEMORY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from verl.workers.rollout.replica import TokenOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from partial_rollout.core.engine_meter import EngineMeter
    from partial_rollout.core.gate import Ticket
    from partial_rollout.core.interrupt import InterruptMode
    from partial_rollout.rollout.admission import Admission
    from partial_rollout.settings.block import PartialRolloutConfig

INTERRUPTED = "abort"
"""vLLM's finish reason of an interrupted request, which verl's server turns into "aborted"."""
EVERY_TOKEN = 1
"""Stream interval for modes whose requests stay: vLLM hands over tokens between two intervals only when one leaves."""
NUM_SETTLING_TURNS = 64
"""How many turns of the event loop vLLM's front end gets to take in its last message, 128 requests in each turn."""


@dataclass(slots=True, eq=False)
class Passage:
    """What the server's `generate` and the engine tell each other of one request, past verl's code in between."""

    ticket: Ticket
    cache_salt: str | None
    """Salt with which the prefix cache finds and stores blocks of the request; None leaves caching to vLLM."""
    retained: Retained | None
    """What the segment before this one has left in the engine."""
    went_on: bool = False
    """Whether the request was still in the engine when this segment began."""
    kept_id: str | None = None
    """The engine's id of the request, if the request stays in the engine after this segment."""
    stop_string: str | None = None
    """The stop string at which the engine ended the request."""


CURRENT_PASSAGE: ContextVar[Passage] = ContextVar("partial_rollout_passage")
"""The passage of the request that the current task serves: verl's server has no argument to pass it on."""


class GatedEngine:
    """The engine behind a gate; calls that are not defined here go straight to the engine.

    `add_request` is called directly instead of `AsyncLLM.generate`, because its return is the only sign that the
    engine has accepted a request; the first output may come much later.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        admission: Admission,
        mode: InterruptMode,
        meter: EngineMeter,
        on_death: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wrap a started engine; `meter` is told of every request and its tokens.

        `on_death` is called by each request of an engine that has died. True: the request hands over the tokens that
        have come, as if it were interrupted. False: it raises EngineDeadError.
        """
        self._on_death = on_death
        self._meter = meter
        self._engine = engine
        self._admission = admission
        self._mode = mode
        self._running: dict[str, EngineRequest] = {}
        self.kept = KeptRequests()
        self.num_generated_tokens = 0

    @property
    def num_running(self) -> int:
        """Requests whose segment has begun and not ended."""
        return len(self._running)

    def __getattr__(self, name: str) -> Any:
        """Delegate to the engine."""
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yield one output: the whole segment, complete or interrupted."""
        passage = CURRENT_PASSAGE.get()
        request = self.kept.take(passage.retained.kept_id if passage.retained else None)
        passage.went_on = request is not None
        if request is None:
            request = await self._add(prompt, sampling_params, request_id, passage.cache_salt, options)
        self._running[request.queue.request_id] = request
        # Only now: a drain that waits for this request interrupts what it finds in `_running`.
        self._admission.arrived(passage.ticket)
        self._meter.begin(request_id)
        has_left = False
        try:
            output = await request.segment(lambda num_tokens: self._count(request_id, num_tokens))
            has_left = True
        except EngineDeadError:
            has_left = True  # there is nobody to abort it
            if not self._on_death():
                raise
            output = request.received()
        finally:
            self._meter.end(request_id)
            del self._running[request.queue.request_id]
            # The caller was cancelled, or the engine failed: without an abort it would generate on for nobody.
            if not has_left:
                await self._engine.abort(request.queue.request_id, internal=True)
        # No await lies between the end of the segment and this line: a resume in between would find the request neither
        # running nor kept, and the engine would generate for nobody.
        if request.is_cut:
            self.kept.keep(request)
            passage.kept_id = request.queue.request_id
        reason = output.outputs[0].stop_reason if output.outputs else None
        passage.stop_string = reason if isinstance(reason, str) else None  # a number is a stop token
        yield output

    async def _add(
        self, prompt: Any, sampling_params: Any, request_id: str, cache_salt: str | None, options: dict[str, Any]
    ) -> EngineRequest:
        if cache_salt is not None:
            prompt = {**prompt, "cache_salt": cache_salt}
        queue = await self._engine.add_request(request_id, prompt, sampling_params, **options)
        return EngineRequest(queue, may_stay=not prompt.get("multi_modal_data"))

    def _count(self, request_id: str, num_tokens: int) -> None:
        self.num_generated_tokens += num_tokens
        self._meter.tokens(request_id, num_tokens, time.monotonic())

    def fail_running(self) -> None:
        """Raise EngineDeadError in all requests that run: the engine has died, and vLLM may not have told them."""
        for request in self._running.values():
            request.queue.put(EngineDeadError())

    async def interrupt(self, *, clear_cache: bool) -> None:
        """Pause the engine and end all segments; the interrupt mode says whether requests stay in it or leave it."""
        clear_cache = clear_cache and self._mode.clears_cache
        if not self._mode.stays:
            await self._engine.pause_generation(mode="abort", clear_cache=clear_cache)
            return
        await self._engine.pause_generation(mode="keep", clear_cache=clear_cache)
        # Before the cut: what the engine has sampled by now belongs to the segments that end here.
        await self._take_in_everything()
        leaving = [request.queue.request_id for request in self._running.values() if not request.cut()]
        if leaving:
            await self._engine.abort(leaving, internal=True)

    async def _take_in_everything(self) -> None:
        """Let the front end take in all that a paused engine has sent.

        vLLM sends the last tokens before it answers the pause, but a task of its own takes them in, some requests a
        turn. A token that is taken in late would count as a token of the next weights.

        Raises:
            EngineDeadError: the engine is gone, and its messages will not be taken in.
        """
        messages: asyncio.Queue[Any] = self._engine.engine_core.outputs_queue
        while not messages.empty():
            if self._engine.errored:
                raise EngineDeadError
            await asyncio.sleep(0)
        for _ in range(NUM_SETTLING_TURNS):
            await asyncio.sleep(0)

    async def resume_generation(self) -> None:
        """Let the engine go on with the kept requests that a caller has claimed; abort the others."""
        # Callers of unclaimed requests were cancelled while the engine was paused; nobody would take the tokens in.
        unclaimed = self.kept.drop_unclaimed()
        if unclaimed:
            await self._engine.abort(unclaimed, internal=True)
        await self._engine.resume_generation()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Reset the cache as vLLM does, unless KV is retained: its salt hides it from all other requests."""
        if self._mode.retains_kv and not self._mode.releases_memory:
            return True
        return await self._engine.reset_prefix_cache(
            reset_running_requests=reset_running_requests,
            # The connector holds the KV in host memory, which is to outlive the engine's own memory.
            reset_connector=reset_connector and not self._mode.releases_memory,
        )

    async def sleep(self, level: int = 1) -> None:
        """Sleep as vLLM does, but keep the KV that was moved to host memory; the engine is paused already.

        Raises:
            EngineError: a request still holds cached blocks, so later requests would find blocks whose memory is gone.
        """
        if self._mode.releases_memory:
            if not await self._engine.reset_prefix_cache(reset_connector=False):
                raise EngineError("the engine cannot release its memory: the prefix cache is in use after the drain")
            await self._engine.collective_rpc("sleep", kwargs={"level": level})
        else:
            await self._engine.sleep(level=level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake up as vLLM does; after our own `sleep` the engine does not know that it slept, and stays paused."""
        if self._mode.releases_memory:
            await self._engine.collective_rpc("wake_up", kwargs={"tags": tags})
        else:
            await self._engine.wake_up(tags=tags)


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request in the engine, whose output is handed over in segments."""

    queue: RequestOutputCollector
    may_stay: bool
    """Whether the request can go on in the engine after an interruption; a request with images is sent again."""
    has_tokens: bool = False
    """Whether the request has handed over any tokens."""
    is_cut: bool = False
    """Whether the current segment was ended while the request stayed in the engine."""
    _merged: RequestOutput | None = None
    """What has come of the current segment."""

    async def segment(self, count: Callable[[int], None]) -> RequestOutput:
        """The next segment, to the request's end or to where it is cut.

        `count` is told the number of tokens as they come.
        """
        merged = self._merged = None
        while merged is None or not merged.finished:
            # The queue's type allows the output of a pooling model, which no request of ours asks for.
            output = cast("RequestOutput", self.queue.get_nowait() or await self.queue.get())
            for completion in output.outputs:
                drop_repeated_logprobs(completion)
                self.has_tokens = self.has_tokens or len(completion.token_ids) > 0
                count(len(completion.token_ids))
            if merged is None:
                merged = self._merged = output
            else:
                merged.add(output, aggregate=True)
        return merged

    def received(self) -> RequestOutput:
        """What has come of the segment that was under way when the engine died, as an interrupted segment."""
        end = _cut_mark(self.queue.request_id)
        if self._merged is None:
            return end
        self._merged.add(end, aggregate=True)
        return self._merged

    def cut(self) -> bool:
        """End the segment here, after all that the engine has sent; False if the request is not worth keeping.

        A request that has ended by itself stays as it is.
        """
        waiting = cast("RequestOutput | Exception | None", self.queue.output)
        if isinstance(waiting, Exception) or (waiting is not None and waiting.finished):
            return True
        # A request without tokens has only its prompt's KV, which the new weights had better compute.
        has_tokens = self.has_tokens or (waiting is not None and any(c.token_ids for c in waiting.outputs))
        if not (self.may_stay and has_tokens):
            return False
        self.is_cut = True
        self.queue.put(_cut_mark(self.queue.request_id))
        return True


class KeptRequests:
    """Interrupted requests that wait in a paused engine, by the engine's own id."""

    def __init__(self) -> None:
        """Start with none."""
        self._kept: dict[str, EngineRequest] = {}
        self._claimed: set[str] = set()

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._kept)

    def keep(self, request: EngineRequest) -> None:
        """Note that a request was cut and stays in the engine."""
        # The mark is of this segment only; the request's next one may end by itself.
        request.is_cut = False
        self._kept[request.queue.request_id] = request

    @contextlib.contextmanager
    def claimed(self, kept_id: str | None) -> Iterator[None]:
        """While the block runs, a caller is here to go on with the request; None is no request."""
        if kept_id is None:
            yield
            return
        self._claimed.add(kept_id)
        try:
            yield
        finally:
            self._claimed.discard(kept_id)

    def take(self, kept_id: str | None) -> EngineRequest | None:
        """Remove and return a kept request, which runs from here on; None if it is not kept."""
        return self._kept.pop(kept_id, None) if kept_id is not None else None

    def drop_unclaimed(self) -> list[str]:
        """Forget the kept requests that no caller has claimed; return the engine's ids of these."""
        unclaimed = [kept_id for kept_id in self._kept if kept_id not in self._claimed]
        for kept_id in unclaimed:
            del self._kept[kept_id]
        return unclaimed


def _cut_mark(request_id: str) -> RequestOutput:
    """An output without tokens that ends a segment; the queue adds it to those before it."""
    completion = CompletionOutput(
        index=0, text="", token_ids=[], cumulative_logprob=None, logprobs=[], finish_reason=INTERRUPTED
    )
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=[],
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
    )


def drop_repeated_logprobs(completion: CompletionOutput) -> None:
    """Cut log-probs that belong to no token of this delta.

    vLLM cuts a delta's log-probs with `logprobs[-len(token_ids):]`, which is the whole history when an abort brings no
    new token. The surplus stands at the end.
    """
    if completion.logprobs is not None and len(completion.logprobs) > len(completion.token_ids):
        completion.logprobs = completion.logprobs[: len(completion.token_ids)]


class Interruption:
    """The interrupt mode of one server."""

    def __init__(self, settings: PartialRolloutConfig) -> None:
        """Take the mode from the settings."""
        self.mode = mode_of(settings.tail)
        self._offload_bytes = (settings.tail.offload_gib or 0) << 30
        self._stream_interval = settings.stream_interval
        self._engine = uuid.uuid4().hex

    def cache_salt(self, retained: Retained | None, openings: int, version: int) -> str | None:
        """Salt of a request's blocks, which are found by requests with the same one only.

        A fresh request shares its prompt's blocks with the others that entered after the same opening of the gate with
        the same weight version. A resumed request keeps the salt of its first segment, which no fresh request has any
        more. So no request finds a block that is older than its own first one.
        """
        if not self.mode.retains_kv:
            return None
        return retained.cache_salt if retained is not None else f"{self._engine}-{openings}-{version}"

    def engine_arguments(self, given: dict[str, Any], model: Mapping[str, Any]) -> None:
        """Add the arguments that the mode needs to an engine's arguments, in place; `model` is its `config.json`."""
        given.setdefault("stream_interval", EVERY_TOKEN if self.mode.stays else self._stream_interval)
        if self.mode.releases_memory:
            copied = copied_tokens(model, given)
            given["kv_transfer_config"] = host_memory(self._offload_bytes, self._engine, copied)

    def unlink_host_memory(self) -> None:
        """Unlink the file that maps a running engine's host memory (vLLM 0.28).

        The memory is freed when the engine's processes end, however they end; a relaunched engine makes a new file.
        """
        for path in SHARED_MEMORY.glob(f"vllm_offload_{self._engine}*.mmap"):
            path.unlink(missing_ok=True)

    def nothing(self, version: int) -> dict[str, Any]:
        """Fields of an output for which no engine was asked."""
        return {"context": Context(version, FRESH), "retained": None, "stop_string": None}

    def fields(self, passage: Passage, output: TokenOutput, *, version: int, context_len: int) -> dict[str, Any]:
        """Fields of a segment: how its context was computed, and what the segment leaves behind if it was interrupted.

        `context_len` is 0 for a first segment.
        """
        context = context_of(
            self.mode,
            version,
            retained=passage.retained,
            went_on=passage.went_on,
            context_len=context_len,
            num_cached_tokens=output.extra_fields.get("num_cached_tokens") or 0,
        )
        retained = self._retained(passage, output, version) if output.stop_reason == ABORTED else None
        return {"context": context, "retained": retained, "stop_string": passage.stop_string}

    def _retained(self, passage: Passage, output: TokenOutput, version: int) -> Retained | None:
        before = passage.retained
        if before is None and not output.token_ids:
            return None  # only a prompt, which new weights should compute again
        if passage.cache_salt is None:
            return None  # nor does such a request stay in the engine
        return Retained(passage.cache_salt, before.kv_version if before else version, passage.kept_id)
