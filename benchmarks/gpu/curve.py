"""What decoding, prefilling and interrupting cost one engine: the inputs of the cost model, by measurement.

A cell is `concurrency` requests with prompts of `context` tokens. They wait at the closed gate and enter together, so
the engine's own meter sees that batch size only; what it has learned at the end is what the cost model would use.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

from partial_rollout.rollout.client import ResumingLLMServerClient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.gpu.policies import Budget
    from benchmarks.gpu.session import Session

DECODED = 128
"""Tokens of each request: four hand-overs, so that the running mean is of the cell's batch alone."""
KV_SHARE = 0.85
"""Of the KV cache that a cell may fill."""
POLL_S = 0.02
CELL_TIMEOUT_S = 120.0
FIRST_TOKEN_ID = 4
"""Below it are special tokens."""
NUM_TOKEN_IDS = 90
INTERRUPTED = ("abort", "reuse_kv", "keep_kv")
CELLS = ((256, 256), (64, 256), (16, 256), (512, 256), (128, 256), (256, 1536), (64, 1536), (16, 3584), (128, 3584))
"""(concurrency, context), the most telling first."""
INTERRUPTED_CONTEXT = 512
TINY_CELLS = ((8, 32), (2, 32))


class Callers:
    """Requests of one cell, by our client from this process."""

    def __init__(self, session: Session, seed: int) -> None:
        """Prompts are drawn with `seed`, so no cell meets another one's blocks."""
        self._session, self._rng = session, random.Random(seed)
        self._client = session.servers.get_client(client_cls=ResumingLLMServerClient)
        self._tasks: list[asyncio.Task[Any]] = []

    def submit(self, concurrency: int, context: int, num_tokens: int) -> None:
        """Send requests that park at the closed gate."""
        sampling = {"temperature": 1.0, "logprobs": True, "ignore_eos": True, "max_tokens": num_tokens}
        for number in range(concurrency):
            prompt = [FIRST_TOKEN_ID + self._rng.randrange(NUM_TOKEN_IDS) for _ in range(context)]
            call = self._client.generate(f"curve-{number}", prompt_ids=prompt, sampling_params=dict(sampling))
            self._tasks.append(asyncio.create_task(call))

    async def until(self, reached: Callable[[Any], bool]) -> None:
        """Ask the server until the condition holds; CELL_TIMEOUT_S bounds it."""
        await asyncio.wait_for(self._reach(reached), CELL_TIMEOUT_S)

    async def all_done(self) -> None:
        """Wait for all responses."""
        await asyncio.wait_for(asyncio.gather(*self._tasks), CELL_TIMEOUT_S)

    async def _reach(self, reached: Callable[[Any], bool]) -> None:
        while not reached((await self._session.replica.statistics())[0]):
            self._raise_failure()
            await asyncio.sleep(POLL_S)

    def _raise_failure(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()


async def _cell(session: Session, concurrency: int, context: int, seed: int) -> dict[str, float]:
    """Decode step and prefill rate of one batch size and context length."""
    replica, callers = session.replica, Callers(session, seed)
    await replica.abort_all_requests()
    callers.submit(concurrency, context, DECODED)
    await callers.until(lambda now: now.parked >= concurrency)
    started_s = time.monotonic()
    await replica.resume_generation()
    await callers.all_done()
    wall_s = time.monotonic() - started_s
    speed = (await replica.statistics())[0].speed
    return {
        "concurrency": concurrency,
        "context": context + DECODED / 2,  # nominally: the meter weighs the last hand-overs most
        "decode_ms": 1000 * speed.step_s(concurrency),
        "tokens_per_s": speed.tokens_per_s(concurrency),
        "prefill_tokens_per_s": speed.prefill_tokens_per_s or 0.0,
        "wall_s": wall_s,
    }


async def _interruption(session: Session, concurrency: int, context: int, seed: int) -> dict[str, float]:
    """Drain, forget, resume with `concurrency` requests in the engine, and what it costs them to go on."""
    replica, callers = session.replica, Callers(session, seed)
    before = (await replica.statistics())[0]
    await replica.abort_all_requests()
    callers.submit(concurrency, context, 2 * DECODED)
    await callers.until(lambda now: now.parked >= concurrency)
    await replica.resume_generation()
    wanted = before.num_generated_tokens + concurrency * DECODED
    await callers.until(lambda now: now.num_generated_tokens >= wanted)
    drained_s = time.monotonic()
    await replica.abort_all_requests()
    emptied_s = time.monotonic()
    await replica.clear_kv_cache()
    await callers.until(lambda now: now.parked >= concurrency)
    parked = (await replica.statistics())[0]
    resumed_s = time.monotonic()
    await replica.resume_generation()
    opened_s = time.monotonic()
    await callers.all_done()
    rest_s, now = time.monotonic() - opened_s, (await replica.statistics())[0]
    generated = parked.num_generated_tokens - before.num_generated_tokens
    return {
        "concurrency": concurrency,
        "context": context + generated / concurrency,
        "drain_ms": 1000 * (emptied_s - drained_s),
        "resume_ms": 1000 * (opened_s - resumed_s),
        "rest_s": rest_s,
        "rest_tokens": concurrency * 2 * DECODED - generated,
        "reprefilled_tokens": now.num_reprefilled_tokens - before.num_reprefilled_tokens,
    }


def run_curve(
    session: Session,
    cells: Sequence[tuple[int, int]],
    *,
    interruption: tuple[int, int],
    budget: Budget,
    add: Callable[[str, dict[str, Any]], None],
) -> None:
    """All cells that fit the KV cache, then an interruption in each mode, until the budget is used up.

    `add` is given every row with its kind, `cell` or `interruption`.
    """
    room = session.kv_tokens() or 0
    for seed, (concurrency, context) in enumerate(cells):
        fits = concurrency * (context + DECODED) <= KV_SHARE * room and concurrency <= session.options.slots
        if fits and context + DECODED <= session.options.context and budget.left_s > 0:
            session.prepare("abort")
            add("cell", asyncio.run(_cell(session, concurrency, context, seed)))
    for seed, mode in enumerate((INTERRUPTED[0], *INTERRUPTED)):
        if budget.left_s > 0:
            session.prepare(mode)
            row = {"mode": mode} | asyncio.run(_interruption(session, *interruption, len(cells) + seed))
            if seed > 0:  # the first one also takes what only a first one does
                add("interruption", row)
    session.prepare("abort")
