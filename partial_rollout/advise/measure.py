"""The latency curve of one engine: what decoding, prefilling and interrupting cost it.

    python -m partial_rollout.advise.measure --shape 8b --budget-s 300 --json curve.json    # random weights, on a GPU
    python -m partial_rollout.advise.measure --model /path/to/checkpoint --json curve.json  # your model
    python -m partial_rollout.advise.measure --shape tiny --json curve.json                 # a CPU, in a minute

vLLM runs in this process, without Ray and without a trainer. A cell is `concurrency` requests with prompts of `context`
tokens that are sent together. Its decode step is the time between two hand-overs of a request's tokens, divided by
their number, once all requests have been prefilled. The result is written after every cell.

With `--offload-gib` the engine copies all KV to so much host memory while it decodes, as it does with
`tail.interrupt_mode=offload_kv`; a copy holds `--offload-block` tokens. Many tokens for each request (`--decoded`) keep
the copies of the prompts, which come first, from counting for much.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partial_rollout.advise.predict import markdown
from partial_rollout.advise.result import about_run, store
from partial_rollout.advise.shapes import PROMPT_TOKENS, SHAPES, write_model
from partial_rollout.errors import DataError
from partial_rollout.rollout.host_memory import host_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.engine.async_llm import AsyncLLM

STREAM_INTERVAL = 32
"""Tokens between two hand-overs of a request: what a rollout server uses."""
DECODED = 4 * STREAM_INTERVAL
"""Tokens of each request: four hand-overs, so that some come after the last prefill."""
KV_SHARE = 0.85
"""Share of the KV cache that a cell may fill."""
CELL_TIMEOUT_S = 120.0
FIRST_TOKEN_ID = 4
"""Smaller ids are special tokens."""
NUM_TOKEN_IDS = 90
SLOTS, CONTEXT = 512, 4352
CELLS = ((256, 256), (64, 256), (16, 256), (512, 256), (128, 256), (256, 1536), (64, 1536), (16, 3584), (128, 3584))
"""(concurrency, context) for models of `CONTEXT` tokens, the most telling first."""
LEAST_SLOTS, LEAST_CONTEXT = min(requests for requests, _ in CELLS), CELLS[0][1] + DECODED
"""Slots and tokens of context that an engine must have to run at least one cell."""
INTERRUPTED = (256, 512)
"""The cell that is interrupted, twice; the first time also takes what only a first time does."""
TINY_SLOTS, TINY_PROMPT, TINY_CONTEXT = 16, 32, 352
TINY_CELLS, TINY_INTERRUPTED = ((8, 32), (2, 32)), (8, 32)


class Requests:
    """Requests of one cell, which are sent together.

    Prompts are drawn with a seed, so that no cell finds the KV of another one.
    """

    def __init__(
        self, engine: AsyncLLM, concurrency: int, context: int, seed: int, allowed: list[int] | None = None
    ) -> None:
        """Nothing is sent yet; responses may be restricted to some tokens."""
        rng = random.Random(seed)
        self._engine, self._seed, self._allowed = engine, seed, allowed
        self.prompts = [
            [FIRST_TOKEN_ID + rng.randrange(NUM_TOKEN_IDS) for _ in range(context)] for _ in range(concurrency)
        ]
        self.num_tokens = [0] * concurrency
        self.first_token_s = 0.0
        """When the last of the requests had its first token."""
        self._steps: list[tuple[float, float]] = []
        """For each hand-over but a request's first: time of the one before, and seconds of a decode step since."""
        self.half_done = asyncio.Event()
        """Set when every request has half of its tokens."""

    async def run(self, decoded: int, part: str = "") -> float:
        """Send all, wait until they end or are aborted; seconds until the last one has ended."""
        started_s = time.monotonic()
        rows = range(len(self.prompts))
        await asyncio.wait_for(
            asyncio.gather(*(self._one(row, decoded, f"curve-{self._seed}{part}-{row}") for row in rows)),
            CELL_TIMEOUT_S,
        )
        return time.monotonic() - started_s

    async def _one(self, row: int, decoded: int, request_id: str) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=1.0, logprobs=0, ignore_eos=True, max_tokens=decoded, detokenize=False,
            output_kind=RequestOutputKind.DELTA, allowed_token_ids=self._allowed,
        )  # fmt: skip
        since_s = None
        async for output in self._engine.generate({"prompt_token_ids": self.prompts[row]}, params, request_id):
            new, now_s = len(output.outputs[0].token_ids), time.monotonic()
            if not new:
                continue
            if since_s is None:
                self.first_token_s = now_s
            else:
                self._steps.append((since_s, (now_s - since_s) / new))
            since_s = now_s
            self.num_tokens[row] += new
            if min(self.num_tokens) >= decoded // 2:
                self.half_done.set()

    @property
    def step_s(self) -> float:
        """Seconds of a decode step while all requests decoded."""
        steps = [step_s for since_s, step_s in self._steps if since_s >= self.first_token_s]
        return statistics.median(steps or [step_s for _, step_s in self._steps])

    async def abort(self) -> float:
        """Abort all once half of the tokens are there; when it was asked for."""
        await self.half_done.wait()
        asked_s = time.monotonic()
        await self._engine.abort([f"curve-{self._seed}-{row}" for row in range(len(self.prompts))])
        return asked_s


async def measure_cell(
    engine: AsyncLLM, concurrency: int, context: int, seed: int, decoded: int = DECODED
) -> dict[str, float]:
    """Decode step and prefill rate of one batch size and context length, from `decoded` tokens of each request."""
    requests = Requests(engine, concurrency, context, seed)
    started_s = time.monotonic()
    wall_s = await requests.run(decoded)
    return {
        "concurrency": concurrency,
        "context": context + decoded / 2,
        "decode_ms": 1000 * requests.step_s,
        "tokens_per_s": concurrency / requests.step_s,
        "prefill_tokens_per_s": concurrency * context / (requests.first_token_s - started_s),
        "wall_s": wall_s,
    }


async def measure_interruption(engine: AsyncLLM, concurrency: int, context: int, seed: int) -> dict[str, Any]:
    """The cost of aborting all requests of a cell half-way, forgetting their KV and sending them again."""
    requests = Requests(engine, concurrency, context, seed)
    _, asked_s = await asyncio.gather(requests.run(2 * DECODED), requests.abort())
    emptied_s = time.monotonic()
    await engine.reset_prefix_cache()
    cut = list(requests.num_tokens)
    again = Requests(engine, concurrency, context + min(cut), seed + 1)
    resumed_s = time.monotonic()
    rest_s = await again.run(2 * DECODED - min(cut), "-rest")
    prefill_s = again.first_token_s - resumed_s
    return {
        "mode": "abort",
        "concurrency": concurrency,
        "context": context + sum(cut) / concurrency,
        "drain_ms": 1000 * (emptied_s - asked_s),
        "resume_ms": 0.0,  # sending again takes no time of its own: what it takes is prefill
        "prefill_s": prefill_s,
        "rest_s": rest_s,
        "rest_tokens": sum(again.num_tokens),
        "reprefilled_tokens": concurrency * (context + min(cut)),
    }


def start(options: argparse.Namespace, model: Path, **more: Any) -> AsyncLLM:
    """The engine, with what a rollout server of the recipes gives it, and `more` of vLLM's arguments."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    own: dict[str, Any] = {"dtype": "float32", "block_size": 32} if options.shape == "tiny" else {}
    if options.model is None:
        own["load_format"] = "dummy"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    arguments = AsyncEngineArgs(
        str(model), skip_tokenizer_init=True, enforce_eager=options.eager or options.shape == "tiny",
        max_num_seqs=options.slots, max_num_batched_tokens=max(options.batched_tokens, options.slots),
        max_model_len=options.context, stream_interval=STREAM_INTERVAL,
        gpu_memory_utilization=options.memory, tensor_parallel_size=options.tensor_parallel, **own, **more,
    )  # fmt: skip
    return AsyncLLM.from_engine_args(arguments)


def cells_for(context: int) -> list[tuple[int, int]]:
    """`CELLS` for prompt and response of `context` tokens together: those of long contexts are as much longer.

    >>> cells_for(2 * CONTEXT)[-1]
    (128, 7168)
    """
    short = CELLS[0][1]
    return [(requests, length if length == short else length * context // CONTEXT) for requests, length in CELLS]


def fitting(
    cells: Sequence[tuple[int, int]], slots: int, context: int, kv: float, decoded: int = DECODED
) -> list[tuple[int, int]]:
    """The cells that an engine can run: so many requests at once, so long with what they decode, so many tokens of KV.

    >>> fitting([(4, 100), (64, 100), (4, 900)], slots=16, context=512, kv=1e6)
    [(4, 100)]
    """
    return [
        (requests, length)
        for requests, length in cells
        if requests <= slots and length + decoded <= context and requests * (length + decoded) <= kv
    ]


def interrupted_cell(slots: int, context: int, kv: float) -> tuple[int, int]:
    """`INTERRUPTED`, with fewer requests and shorter prompts where an engine has no room for it.

    >>> interrupted_cell(slots=512, context=4352, kv=1e6), interrupted_cell(slots=16, context=384, kv=1e6)
    ((256, 512), (16, 128))
    """
    requests, length = INTERRUPTED
    length = min(length, context - 2 * DECODED)
    return min(requests, slots, int(kv // (length + 2 * DECODED))), length


def kv_tokens(engine: AsyncLLM) -> int:
    """Tokens that the KV cache has room for."""
    cache = engine.vllm_config.cache_config
    return (cache.num_gpu_blocks or 0) * cache.block_size


def own_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """vLLM's arguments that the command line asks for, beside those of every engine that is measured."""
    given: dict[str, Any] = {"kv_cache_memory_bytes": options.kv_bytes} if options.kv_bytes else {}
    if options.offload_gib:
        given["kv_transfer_config"] = host_memory(options.offload_gib << 30, "curve", options.offload_block)
    return given


async def measure(options: argparse.Namespace, model: Path, result: dict[str, Any]) -> None:
    """All cells that fit the engine, then two interruptions, until the time is used up; `result` grows with each."""
    started_s = time.monotonic()
    engine = start(options, model, **own_arguments(options))
    tiny = options.shape == "tiny"
    cells: Sequence[tuple[int, int]] = TINY_CELLS if tiny else cells_for(options.context)
    try:
        result["engine"] |= {"startup_s": time.monotonic() - started_s, "kv_tokens": kv_tokens(engine)}
        room = KV_SHARE * result["engine"]["kv_tokens"]
        if not (possible := fitting(cells, options.slots, options.context, room, options.decoded)):
            raise DataError(
                f"a KV cache of {result['engine']['kv_tokens']} tokens is too small: give more with --memory"
            )
        for seed, cell in enumerate(possible):
            if time.monotonic() - started_s < options.budget_s:
                result["curve"]["cell"].append(await measure_cell(engine, *cell, seed, options.decoded))
                store(result, options.json)
        for number in range(2):
            cell = TINY_INTERRUPTED if tiny else interrupted_cell(options.slots, options.context, room)
            row = await measure_interruption(engine, *cell, 100 + 2 * number)
        result["curve"]["interruption"].append(row)
        store(result, options.json)
    finally:
        engine.shutdown()


def curve_tables(curve: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: decode steps by concurrency and context, and interruptions."""
    return "\n\n".join(
        markdown([list(rows[0]), ["---"] * len(rows[0]), *([_short(value) for value in row.values()] for row in rows)])
        for rows in curve.values()
        if rows
    )


def _short(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,.2f}".removesuffix(".00")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(
        "partial_rollout.advise.measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = line.add_mutually_exclusive_group(required=True)
    which.add_argument("--shape", choices=list(SHAPES), help="sizes of a model with random weights")
    which.add_argument("--model", type=Path, help="folder of a checkpoint")
    line.add_argument("--slots", type=int, help=f"requests in the engine at most ({SLOTS})")
    line.add_argument("--context", type=int, help=f"tokens of the longest prompt with its response ({CONTEXT})")
    line.add_argument("--batched-tokens", type=int, default=8192, help="of an engine step (%(default)s)")
    line.add_argument("--memory", type=float, default=0.88, help="share of the GPU's memory (%(default)s)")
    line.add_argument("--kv-bytes", type=int, help="KV cache on a GPU that others use too (what --memory leaves)")
    line.add_argument("--offload-gib", type=int, help="host memory that all KV is copied to (none)")
    line.add_argument("--offload-block", type=int, help="tokens of a copy (one block of the engine)")
    line.add_argument("--decoded", type=int, default=DECODED, help="tokens of each request (%(default)s)")
    line.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of the engine (%(default)s)")
    line.add_argument("--eager", action="store_true", help="no CUDA graphs: decodes slower")
    line.add_argument("--budget-s", type=float, default=500.0, help="no cell begins after it (%(default)s)")
    line.add_argument("--json", type=Path, required=True, help="where the result goes")
    line.add_argument("--dry-run", action="store_true", help="print the engine and the cells, and start no engine")
    return line


def main(words: list[str] | None = None) -> None:
    """Measure, and print the tables."""
    line = parser()
    options = line.parse_args(words)
    tiny = options.shape == "tiny"
    if tiny:
        from partial_rollout.run.cpu_environment import apply_cpu_environment

        apply_cpu_environment()
    options.slots = options.slots or (TINY_SLOTS if tiny else SLOTS)
    options.context = options.context or (TINY_CONTEXT if tiny else CONTEXT)
    for name, least in (("slots", LEAST_SLOTS), ("context", LEAST_CONTEXT)):
        if not tiny and getattr(options, name) < least:
            line.error(f"--{name} {getattr(options, name)} is not allowed: at least {least}")
    sizes = ("slots", "context", "batched_tokens", "memory", "tensor_parallel", "eager")
    names = (*sizes, "decoded", "offload_gib", "offload_block")
    engine = {name: getattr(options, name) for name in names}
    engine |= {"shape": options.shape or options.model.name, "prompt_tokens": TINY_PROMPT if tiny else PROMPT_TOKENS}
    if options.dry_run:
        large = fitting(cells_for(options.context), options.slots, options.context, math.inf, options.decoded)
        cells = TINY_CELLS if tiny else large
        print(f"{engine}\ncells (requests, tokens of a prompt), as many as the KV cache has room for: {list(cells)}")
        return
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    result = {**about_run(options), "engine": engine, "curve": {"cell": [], "interruption": []}}
    with tempfile.TemporaryDirectory(prefix="pr-curve-") as folder:
        model = options.model or Path(folder)
        if options.shape:
            write_model(model, SHAPES[options.shape], options.context)
        asyncio.run(measure(options, model, result))
    print(curve_tables(result["curve"]))


if __name__ == "__main__":
    main()
