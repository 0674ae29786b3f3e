"""Whether KV that interrupted requests left behind is right when they come back, without Ray and without a trainer.

    python -m benchmarks.gpu.retained --modes offload_kv reuse_kv abort --json OUT
    python -m benchmarks.gpu.retained --modes reuse_kv abort        # on a CPU

Greedy requests are cut in the middle as a server's drain does it, the engine releases its memory where the mode says
so, and they go on from their tokens. Weights stay the same, so log-probs must be those of requests that were never cut.
To show that wrong KV would be seen, the same tokens are also continued after other prompts. Where KV is computed again
(`abort`) on a GPU, other kernels do it, and these weights make other tokens of small differences: that is not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.reload import HAS_GPU, VOCABULARY, Case, Outputs, Said, make_model, said
from benchmarks.result import about_run, store
from partial_rollout.settings.block import PartialRolloutConfig, TailConfig

if TYPE_CHECKING:
    from collections.abc import Callable

MODES = ("abort", "reuse_kv", "offload_kv")
"""Those in which a request leaves the engine."""
NUM_REQUESTS, NUM_PROMPT, NUM_TOKENS, CUT = 8, 200, 400, 200
"""Of tokens: a prompt's, a response's, and after how many it is cut at the earliest."""
MAX_MODEL_LEN = 1024
BLOCK_SIZE = 32
OFFLOAD_GIB = 2
TOLERANCE = 0.1 if HAS_GPU else 1e-3
"""Of log-probs: batches of other sizes are summed in another order, on a GPU in bfloat16."""
EQUAL, OTHER = 0.95, 0.5
"""At least this share of tokens is equal; at most this share after another context."""
SPREAD = 0.3
"""Of weights: with so much, what is said depends on all of the context."""
LIMIT_S = 300.0
"""Of all requests of a mode."""


class Engine:
    """vLLM as a server of the mode starts it and drains it, in this process."""

    def __init__(self, path: Path, mode: str) -> None:
        """Start it."""
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from partial_rollout.core.engine_meter import EngineMeter
        from partial_rollout.rollout.admission import Admission
        from partial_rollout.rollout.gated_engine import GatedEngine
        from partial_rollout.rollout.interruption import Interruption

        gib = OFFLOAD_GIB if mode == "offload_kv" else None
        interruption = Interruption(PartialRolloutConfig(tail=TailConfig(interrupt_mode=mode, offload_gib=gib)))
        self.mode = interruption.mode
        own: dict[str, Any] = {"gpu_memory_utilization": 0.3, "dtype": "bfloat16"} if HAS_GPU else {"dtype": "float32"}
        interruption.engine_arguments(own)
        own["stream_interval"] = 1  # a cut is to come where it is asked for
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # the module asks for the GPU when it is imported
        arguments = AsyncEngineArgs(
            str(path), skip_tokenizer_init=True, enforce_eager=True, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE,
            max_num_seqs=2 * NUM_REQUESTS, enable_sleep_mode=self.mode.releases_memory, **own,
        )  # fmt: skip
        self.vllm: Any = AsyncLLM.from_engine_args(arguments)
        interruption.unlink_host_memory()
        self._gated = GatedEngine(self.vllm, Admission(), self.mode, EngineMeter())

    async def over_a_boundary(self) -> None:
        """Interrupt what runs, release memory if the mode does, and go on."""
        await self._gated.interrupt(clear_cache=True)
        if self.mode.releases_memory:
            await self._gated.sleep(level=1)
            await self._gated.wake_up()
        await self._gated.resume_generation()


class Requests:
    """Greedy requests of one salt, which find each other's KV."""

    def __init__(self, engine: Engine, salt: str, prompts: list[list[int]]) -> None:
        """None has been sent."""
        self._engine, self._salt, self._prompts = engine, salt, prompts
        self.num_cached = 0
        """Tokens of all that were found when they were sent."""

    async def say(self, num_tokens: int, on_tokens: Callable[[int], None] = lambda _: None) -> Outputs:
        """What the engine says to all of them, until it has or they are cut."""
        rows = range(len(self._prompts))
        return await asyncio.gather(*(self._say(row, num_tokens, on_tokens) for row in rows))

    async def _say(self, row: int, num_tokens: int, on_tokens: Callable[[int], None]) -> Said:
        from vllm import SamplingParams

        from partial_rollout.rollout.engine_request import drop_repeated_logprobs

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=0, ignore_eos=True, detokenize=False)
        asked: Any = {"prompt_token_ids": self._prompts[row]}
        if self._engine.mode.retains_kv:
            asked["cache_salt"] = self._salt
        answer: Any = None
        async for answer in self._engine.vllm.generate(asked, params, f"{self._salt}-{row}"):
            on_tokens(len(answer.outputs[0].token_ids))
        self.num_cached += answer.num_cached_tokens
        drop_repeated_logprobs(answer.outputs[0])
        return said(answer.outputs[0])


async def cut_and_continued(engine: Engine, prompts: list[list[int]]) -> tuple[Outputs, Outputs, int, int]:
    """What was said before and after the cut, how many tokens were sent again, and how many of them were found."""
    half_done = asyncio.Event()

    async def boundary() -> None:
        await half_done.wait()
        await engine.over_a_boundary()

    before = Requests(engine, "cut", prompts)
    saying = before.say(NUM_TOKENS, lambda num: half_done.set() if num >= CUT else None)
    parts, _ = await asyncio.gather(saying, boundary())
    contexts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, parts, strict=True)]
    after = Requests(engine, "cut", contexts)
    rest = await after.say(NUM_TOKENS - max(len(tokens) for tokens, _ in parts))
    return parts, rest, sum(map(len, contexts)), after.num_cached


def difference(found: Said, wanted: Said) -> float:
    """Largest difference of log-probs, up to the first token that differs and with it."""
    pairs = zip(*found, *wanted, strict=False)
    largest = 0.0
    for token, log_prob, other, other_log_prob in pairs:
        largest = max(largest, abs(log_prob - other_log_prob))
        if token != other:
            break
    return largest


def num_equal(found: Outputs, wanted: Outputs) -> int:
    """Tokens that are the same at the same place."""
    return sum(a == b for x, y in zip(found, wanted, strict=True) for a, b in zip(x[0], y[0], strict=False))


async def compare(engine: Engine) -> dict[str, Any]:
    """The numbers of one mode."""
    prompts = [[3 + (7 * i + 31 * row) % (VOCABULARY - 3) for i in range(NUM_PROMPT)] for row in range(NUM_REQUESTS)]
    whole = await Requests(engine, "whole", prompts).say(NUM_TOKENS)
    parts, rest, num_sent, num_found = await cut_and_continued(engine, prompts)
    cuts = [len(tokens) for tokens, _ in parts]
    others = [prompts[row - 1] + tokens for row, (tokens, _) in enumerate(parts)]
    strange = await Requests(engine, "strange", others).say(len(rest[0][0]))
    remaining = [(tokens[cut:], log_probs[cut:]) for (tokens, log_probs), cut in zip(whole, cuts, strict=True)]
    return {
        "cut_after": cuts,
        "sent_again": num_sent,
        "found": num_found,
        "equal_tokens": num_equal(rest, remaining),
        "equal_tokens_after_others": num_equal(strange, remaining),
        "of_tokens": sum(len(tokens) for tokens, _ in rest),
        "max_difference": max(map(difference, rest, remaining)),
    }


def is_right(found: dict[str, Any], *, retains_kv: bool) -> bool | None:
    """Whether nothing was wrong, it would have been seen, and KV was retained where it should be; None: not judged."""
    least_found = found["sent_again"] - NUM_REQUESTS * BLOCK_SIZE if retains_kv else 0
    most_found = found["sent_again"] if retains_kv else NUM_REQUESTS * NUM_PROMPT
    if not least_found <= found["found"] <= most_found:
        return False
    if HAS_GPU and not retains_kv:
        return None
    is_equal = found["max_difference"] <= TOLERANCE and found["equal_tokens"] >= EQUAL * found["of_tokens"]
    return is_equal and found["equal_tokens_after_others"] <= OTHER * found["of_tokens"]


async def run(path: Path, mode: str) -> dict[str, Any]:
    """One mode on an engine of its own."""
    engine = Engine(path, mode)
    try:
        found = await asyncio.wait_for(compare(engine), LIMIT_S)
    finally:
        engine.vllm.shutdown()
    return {"mode": mode, **found, "is_right": is_right(found, retains_kv=engine.mode.retains_kv)}


def main() -> int:
    """Print a line for each mode; 1 if one is not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES if HAS_GPU else MODES[:2]), choices=MODES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = about_run(options) | {"modes": []}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), 1, Case(None, tied=False), SPREAD)
        for mode in options.modes:
            found = asyncio.run(run(Path(folder), mode))
            print(json.dumps(found), flush=True)
            result["modes"].append(found)
            store(result, options.json)
    return 1 if any(found["is_right"] is False for found in result["modes"]) else 0


if __name__ == "__main__":
    sys.exit(main())
