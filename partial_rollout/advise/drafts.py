"""What speculative decoding costs an engine, apart from how many drafts are accepted.

    python -m partial_rollout.advise.drafts --shape 8b --json PRICES        # random weights, one GPU, 6 minutes
    python -m partial_rollout.advise.drafts --shape tiny --json PRICES      # a CPU, in its shortest form
    python -m partial_rollout.advise.drafts --predict PRICES --curve CURVE  # what drafts would gain

Prices of several runs count together: name the other files after the first, into which the prediction goes.

Engines, each in a process of its own, started `--at-once` at a time and measured one after the other:

    plain               asynchronous scheduling and vLLM's newer model runner, as rollouts have it
    older_runner        the older model runner
    older_synchronous   the older model runner, without asynchronous scheduling: what `custom_class` leaves
    draft_3, draft_5    `speculative_config` with a `custom_class` proposer and up to so many drafts
    ngram_gpu_3         vLLM's own method `ngram_gpu`, which keeps asynchronous scheduling, with up to three drafts

The proposer drafts fixed tokens, of which a model with random weights accepts none, so the time of a step is the price
alone. It reads from a shared file how many: all requests the same number, or every second request another one. vLLM has
whole CUDA graphs only for steps in which every request has all drafts (`draft_3` with 3); other steps run in pieces.
`ngram_gpu` drafts what followed the same tokens before: nothing while a model with random weights may take any token,
and three in nearly each step while it may take a few tokens only. How many it accepts then is vLLM's own count.
Prompts of a cell are those of the run before, so their KV is found and nothing is prefilled twice.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from partial_rollout.advise.measure import DECODED, Requests, kv_tokens, start
from partial_rollout.advise.predict import BASE, fit, markdown, predict
from partial_rollout.advise.result import about_run, read_result, store
from partial_rollout.advise.scheduler import Mode, Speed
from partial_rollout.advise.shapes import SHAPES, write_model
from partial_rollout.advise.workload import TRACES, workload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.connection import Connection

    from vllm.config import VllmConfig

    from partial_rollout.advise.workload import Workload

NOTE = "DRAFT_PRICE_NOTE"
"""Variable with the path of the file that the proposer reads and counts in."""
DRAFT_TOKENS = (4, 5, 6, 7, 8)
PROPOSER = "partial_rollout.advise.drafts.FixedDrafts"
READY_S, ROW_S, END_S = 300.0, 180.0, 60.0
"""At most: until an engine has started, until the next row of it, until its process has ended."""
CELLS = ((16, 256), (64, 256), (1, 256), (256, 256), (16, 3584), (64, 1536))
"""(requests, tokens of a prompt), the most telling first."""
TINY_CELLS = ((4, 32), (1, 32))
SLOTS, TINY_SLOTS = 256, 4
CONTEXT, TINY_CONTEXT = 4352, 352
BATCHED_TOKENS = 8192
KV_ROOM = 1.06
"""KV cache of an engine, as a multiple of what its largest cell needs."""
LEAST_KV_BYTES = 1 << 28
GATES = (16, 64, 256)
"""Drafts are made while at most so many requests run."""
TOKENS_A_STEP = (1.0, 1.4, 1.7, 2.3, 3.3)
"""Tokens that a verified step brings: one of the model itself, and the drafts that it accepts."""
WORTH = 0.9
"""Time with drafts, without them = 1, from which on they are worth their code."""


NGRAM = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
"""vLLM's count of drafts that were right."""


class Variant(NamedTuple):
    """Which engine drafts, how many tokens in a verified step, and with the steps of which engine it is compared."""

    engine: str
    drafts: int
    base: str


VARIANTS = {
    "three": Variant("draft_3", 3, "plain"),
    "five": Variant("draft_5", 5, "plain"),
    "three_without_the_loss": Variant("draft_3", 3, "draft_5"),
}
"""All drafts of a step are as long, as if short ones were filled up, so that it has whole CUDA graphs. The last one is
what drafts would gain if an engine that may draft were as fast as one that may not."""
OF_VLLM = {"ngram_gpu": Variant("ngram_gpu_3", 3, "plain")}
"""Drafts of these methods come from the response itself, which `acceptance` counts by itself."""


@dataclass(frozen=True)
class Engine:
    """What an engine has; `plans` are pairs of drafts, for even and for odd requests of a step."""

    drafts: int = 0
    older_runner: bool = False
    asynchronous: bool | None = None
    is_ngram: bool = False
    plans: tuple[tuple[int, int], ...] = ((0, 0),)

    def arguments(self, slots: int) -> dict[str, Any]:
        """vLLM's arguments beside those of a rollout server; graphs are captured for just the sizes that are run."""
        counted = [requests for requests in (1, 16, 64, 256) if requests <= slots]
        sizes = {requests * (1 + drafts) for requests in counted for drafts in range(self.drafts + 1)}
        found: dict[str, Any] = {"cudagraph_capture_sizes": sorted(sizes)}
        if self.drafts:
            how = NGRAM if self.is_ngram else {"method": "custom_class", "model": PROPOSER}
            found["speculative_config"] = {**how, "num_speculative_tokens": self.drafts}
        return found if self.asynchronous is None else found | {"async_scheduling": self.asynchronous}


ENGINES = {
    "plain": Engine(),
    "draft_5": Engine(5, plans=((0, 0), (1, 1), (2, 2), (3, 3), (5, 5), (0, 5))),
    "draft_3": Engine(3, plans=((0, 0), (3, 3), (0, 3))),
    "older_synchronous": Engine(older_runner=True, asynchronous=False),
    "older_runner": Engine(older_runner=True),
    "ngram_gpu_3": Engine(3, is_ngram=True, plans=((0, 0), (3, 3))),
}


class Note:
    """Four numbers that the proposer and the benchmark share: drafts of even and odd requests, steps, tokens.

    A step is counted for each request of it, and tokens are those that it brought.
    """

    def __init__(self, path: Path) -> None:
        """Use the file, which is there."""
        self._numbers = np.memmap(path, dtype=np.int64, mode="r+", shape=(4,))

    @staticmethod
    def new(path: Path) -> Note:
        """All zero."""
        np.zeros(4, dtype=np.int64).tofile(path)
        return Note(path)

    @property
    def drafts(self) -> tuple[int, int]:
        """For even and for odd requests."""
        return int(self._numbers[0]), int(self._numbers[1])

    def plan(self, even: int, odd: int) -> None:
        """From now on draft so many tokens, and count from zero."""
        self._numbers[:] = (even, odd, 0, 0)

    def count(self, steps: int, tokens: int) -> None:
        """Add what a step of the engine brought."""
        self._numbers[2] += steps
        self._numbers[3] += tokens

    @property
    def tokens_a_step(self) -> float:
        """Since the plan began; 1 where nobody counted."""
        steps, tokens = int(self._numbers[2]), int(self._numbers[3])
        return tokens / steps if steps else 1.0


class FixedDrafts:
    """A proposer for vLLM's `custom_class`: as many of `DRAFT_TOKENS` for each request as the note says."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """In the engine's worker process."""
        self._note = Note(Path(os.environ[NOTE]))
        self._longest = vllm_config.model_config.max_model_len - len(DRAFT_TOKENS) - 1

    def load_model(self, *_: Any) -> None:
        """The proposer has no model; vLLM's runner for CPUs makes this call on every proposer."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens: np.ndarray, token_ids: np.ndarray, **_: Any
    ) -> list[list[int]]:
        """Drafts for each row of the batch; none for one that has no token yet or is nearly at the longest."""
        drafts: list[list[int]] = [list(DRAFT_TOKENS[:number]) for number in self._note.drafts]
        steps = sum(1 for row in sampled_token_ids if row)
        self._note.count(steps, sum(map(len, sampled_token_ids)))
        return [
            drafts[row % 2] if sampled and num_tokens[row] < self._longest else []
            for row, sampled in enumerate(sampled_token_ids)
        ]


def accepted_drafts() -> float:
    """Drafts that the engines of this process have accepted so far, by vLLM's metrics."""
    from prometheus_client import REGISTRY

    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == ACCEPTED)


def tokens_a_step(engine: Engine, note: Note, generated: int, accepted: float) -> float:
    """Tokens that a step of a request brought in a cell: the proposer counts, or vLLM does."""
    if engine.is_ngram:
        return generated / (generated - accepted)
    return note.tokens_a_step if engine.drafts else 1.0


def cells(tiny: bool) -> tuple[tuple[int, int], ...]:
    """Cells of the command's shape."""
    return TINY_CELLS if tiny else CELLS


def kv_bytes(shape: str) -> int:
    """Room for the largest cell."""
    sizes, tiny = SHAPES[shape], shape == "tiny"
    most = max(requests * (context + DECODED + len(DRAFT_TOKENS)) for requests, context in cells(tiny))
    token = 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * (4 if tiny else 2)
    return max(LEAST_KV_BYTES, int(KV_ROOM * most * token))


def engine_process(pipe: Connection, name: str, options: argparse.Namespace, model: Path, note: Path) -> None:
    """The process of an engine: it starts, tells that, waits until it may measure, and sends a row for each cell."""
    engine = ENGINES[name]
    os.environ[NOTE] = str(note)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if engine.older_runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if options.shape == "tiny":
        from partial_rollout.run.cpu_environment import apply_cpu_environment

        apply_cpu_environment()
    asyncio.run(_measure(pipe, engine, options, model, Note(note)))


async def _measure(pipe: Connection, engine: Engine, options: argparse.Namespace, model: Path, note: Note) -> None:
    started_s, tiny = time.monotonic(), options.shape == "tiny"
    serving = argparse.Namespace(
        shape=options.shape, model=None, slots=TINY_SLOTS if tiny else SLOTS, batched_tokens=BATCHED_TOKENS,
        context=TINY_CONTEXT if tiny else CONTEXT, memory=options.memory, tensor_parallel=1, eager=False,
    )  # fmt: skip
    more = {"kv_cache_memory_bytes": kv_bytes(options.shape), **engine.arguments(serving.slots)}
    server = start(serving, model, **more)
    try:
        config = server.vllm_config
        pipe.send(
            {
                "startup_s": time.monotonic() - started_s,
                "asynchronous": bool(config.scheduler_config.async_scheduling),
                "newer_runner": bool(getattr(config, "use_v2_model_runner", False)),
                "graphs": str(config.compilation_config.cudagraph_mode),
                "kv_tokens": kv_tokens(server),
            }
        )
        ends_s = time.monotonic() + await asyncio.to_thread(pipe.recv)
        for seed, (requests, context) in enumerate(cells(tiny)):
            for number, (even, odd) in enumerate(engine.plans):
                if time.monotonic() > ends_s:
                    return
                note.plan(even, odd)
                few: list[int] | None = [*DRAFT_TOKENS] if engine.is_ngram and even else None
                sent, accepted = Requests(server, requests, context, seed, few), accepted_drafts()
                await sent.run(DECODED, f"-{number}")
                tokens = tokens_a_step(engine, note, requests * DECODED, accepted_drafts() - accepted)
                pipe.send({
                    "requests": requests, "context": context + DECODED / 2, "drafts": [even, odd],
                    "tokens_a_step": tokens, "step_ms": 1000 * sent.step_s * tokens,
                })  # fmt: skip
    finally:
        pipe.send(None)
        server.shutdown()


@dataclass
class Running:
    """An engine's process, and our end of its pipe."""

    name: str
    process: Any
    pipe: Connection

    def receive(self, timeout_s: float, what: str) -> Any:
        """The next message of the process.

        Raises:
            RuntimeError: it sent nothing in time, or has ended.
        """
        if not self.pipe.poll(timeout_s):
            raise RuntimeError(f"the engine {self.name} sent nothing in {timeout_s:.0f} s, waiting for {what}")
        try:
            return self.pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"the engine {self.name} has ended, waiting for {what}") from error

    def end(self) -> None:
        """Wait until its process has ended, or end it."""
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(END_S)


class Prices:
    """The engines of one shape, and the file with what they took."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Note under which circumstances."""
        self._options, self._ends_s = options, time.monotonic() + options.budget_s
        engine = {"shape": options.shape, "slots": TINY_SLOTS if options.shape == "tiny" else SLOTS}
        self.result = {**about_run(options), "engine": engine, "engines": {}, "rows": [], "failed": {}}

    def run(self, folder: Path) -> None:
        """All engines, `--at-once` at a time; a row is stored as soon as it is there.

        Raises:
            SystemExit: some engine has failed; the others were measured.
        """
        options = self._options
        write_model(folder / "model", SHAPES[options.shape], CONTEXT)
        names, number = list(options.engines), options.at_once
        for wave in (names[first : first + number] for first in range(0, len(names), number)):
            if time.monotonic() < self._ends_s:
                self._wave(wave, folder)
        if self.result["failed"]:
            raise SystemExit("\n".join(self.result["failed"].values()))

    def _wave(self, names: list[str], folder: Path) -> None:
        running = [self._start(name, folder) for name in names]
        try:
            for engine in running:
                self._each(engine)
        finally:
            for engine in running:
                engine.end()

    def _start(self, name: str, folder: Path) -> Running:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        note = folder / f"{name}.note"
        Note.new(note)
        arguments = (theirs, name, self._options, folder / "model", note)
        process = context.Process(target=engine_process, args=arguments, name=f"engine {name}")
        process.start()
        theirs.close()
        return Running(name, process, ours)

    def _each(self, engine: Running) -> None:
        """Measure one engine of a wave, whose others wait."""
        try:
            self.result["engines"][engine.name] = engine.receive(READY_S, "its start")
            engine.pipe.send(max(0.0, self._ends_s - time.monotonic()))
            while (row := engine.receive(ROW_S, "its next row")) is not None:
                self.result["rows"].append({"engine": engine.name, **row})
                store(self.result, self._options.json)
        except RuntimeError as error:
            self.result["failed"][engine.name] = str(error)
            store(self.result, self._options.json)
            engine.process.terminate()


def prices_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: milliseconds of a step of each engine and plan, by cell."""
    found = {(row["requests"], row["context"]): None for row in rows}
    lines: dict[tuple[str, int, int], dict[tuple[int, float], str]] = {}
    for row in rows:
        line = lines.setdefault((row["engine"], *row["drafts"]), {})
        line[row["requests"], row["context"]] = f"{row['step_ms']:.2f}"
    head = ["engine", "drafts", *(f"{requests} x {context:.0f}" for requests, context in found)]
    body = [
        [name, str(even) if even == odd else f"{even} and {odd}", *(cell.get(each, "") for each in found)]
        for (name, even, odd), cell in lines.items()
    ]
    return markdown([head, ["---"] * len(head), *body])


@dataclass(frozen=True)
class Drafting(Speed):
    """A speed with drafts: while at most `gate` requests run, a step takes longer and brings `tokens` tokens.

    >>> speed = Speed(0.004, 0.0, 0.0, prefill_tokens_per_s=1000.0, interruption_s=0.0)
    >>> drafting = drafted(speed, tokens=2.0, gate=1, extra=((1, 0.001), (2, 0.002)), idle=((1, 0.0), (2, 0.001)))
    >>> drafting.decode_s(steps=10, requests=1, kv=0)
    0.025
    >>> drafting.decode_s(steps=10, requests=2, kv=0)
    0.05
    """

    tokens: float = 1.0
    gate: int = 0
    extra: tuple[tuple[int, float], ...] = ((1, 0.0),)
    """(requests, seconds more than a plain step), with drafts."""
    idle: tuple[tuple[int, float], ...] = ((1, 0.0),)
    """(requests, seconds more than a plain step), in steps without drafts of an engine that may draft."""

    def decode_s(self, steps: int, requests: int, kv: int) -> float:
        """Seconds until `steps` more tokens of the same requests are there."""
        more = self.extra if requests <= self.gate else self.idle
        verified = steps / (self.tokens if requests <= self.gate else 1.0)
        plain = super().decode_s(steps, requests, kv) / steps
        at, seconds = [number for number, _ in more], [each for _, each in more]
        return verified * (plain + float(np.interp(requests, at, seconds)))


def drafted(
    speed: Speed, *, tokens: float, gate: int, extra: Sequence[tuple[int, float]], idle: Sequence[tuple[int, float]]
) -> Drafting:
    """An engine of this speed that drafts."""
    return Drafting(**vars(speed), tokens=tokens, gate=gate, extra=tuple(extra), idle=tuple(idle))


def surcharge(rows: list[dict[str, Any]], engine: str, drafts: int, base: str) -> list[tuple[int, float]]:
    """(requests, seconds more than a step of `base` without drafts), of the cells with the shortest contexts.

    At least 0. Where steps without drafts have no whole CUDA graphs, one with drafts may be shorter than one without,
    by more than the whole predicted time of a step; a step of negative time would let a prediction never end.
    """
    shortest: dict[int, float] = {}
    for row in rows:
        shortest[row["requests"]] = min(row["context"], shortest.get(row["requests"], row["context"]))

    def of(name: str, number: int) -> dict[int, float]:
        same = [row for row in rows if row["engine"] == name and row["drafts"] == [number, number]]
        return {row["requests"]: row["step_ms"] for row in same if row["context"] == shortest[row["requests"]]}

    without, with_drafts = of(base, 0), of(engine, drafts)
    return [(number, max(0.0, with_drafts[number] - without[number]) / 1000) for number in sorted(with_drafts)]


def compared(slots: int) -> list[Mode]:
    """The modes for which drafts are predicted."""
    return [Mode(BASE, slots, 1), *(Mode(f"KV retained, prefetch {number}", slots, number) for number in (2, 3))]


def time_ratios(
    prices: dict[str, Any],
    curve: dict[str, Any],
    load: Workload,
    variant: Variant,
    tokens: Mapping[int, Sequence[float]],
) -> dict[str, dict[str, list[float]]]:
    """By mode and gate: time with drafts, the mode without drafts = 1.

    `tokens` has for each gate the numbers of tokens of a verified step that a time is predicted for.
    """
    speed, prompt_tokens = fit(curve["curve"]), curve["engine"]["prompt_tokens"]
    engine, drafts, base = variant
    extra, idle = (surcharge(prices["rows"], engine, number, base) for number in (drafts, 0))
    found: dict[str, dict[str, list[float]]] = {}
    for mode in compared(load.batch * load.group):
        plain = predict(mode, speed, load, prompt_tokens)["tokens_per_s"]
        found[mode.name] = {}
        for gate, numbers in tokens.items():
            fast = [drafted(speed, tokens=each, gate=gate, extra=extra, idle=idle) for each in numbers]
            rates = [predict(mode, each, load, prompt_tokens)["tokens_per_s"] for each in fast]
            found[mode.name][str(gate)] = [plain / rate for rate in rates]
    return found


def gains(prices: dict[str, Any], curve: dict[str, Any], load: Workload, variant: Variant) -> dict[str, Any]:
    """The time ratios of `TOKENS_A_STEP`, and from how many tokens a verified step on a tenth of the time is saved.

    None where no prediction saves as much.
    """
    ratios = time_ratios(prices, curve, load, variant, dict.fromkeys(GATES, TOKENS_A_STEP))
    enough = {mode: {gate: needed(each) for gate, each in gates.items()} for mode, gates in ratios.items()}
    return {**variant._asdict(), "time_ratio": ratios, "needed_for_a_tenth": enough}


def needed(ratios: Sequence[float]) -> float | None:
    """The tokens of a verified step from which on time falls to `WORTH`; rates between predictions are interpolated.

    >>> needed([1.0, 1.0, 1.0, 1.0, 0.9])
    3.3
    >>> needed([1.0, 1.0, 1.0, 1.0, 0.95]) is None
    True
    """
    enough = ratios[-1] <= WORTH
    return float(np.interp(1 / WORTH, [1 / ratio for ratio in ratios], TOKENS_A_STEP)) if enough else None


def read_prices(paths: Sequence[Path]) -> dict[str, Any]:
    """The first of some stored results, with the rows of all; a row of a later one replaces an equal one."""
    found = [read_result(path) for path in paths]
    rows = {
        (row["engine"], row["requests"], row["context"], *row["drafts"]): row for each in found for row in each["rows"]
    }
    return {**found[0], "rows": list(rows.values())}


def predict_gains(paths: Sequence[Path], curve_path: Path, trace: str) -> None:
    """Add to the first of the stored prices what drafts would gain by all of them, and print it."""
    prices, curve = read_prices(paths), read_result(curve_path)
    load = workload(curve["engine"]["shape"], trace)
    there = {(row["engine"], row["drafts"][0]) for row in prices["rows"]}
    known = {**VARIANTS, **OF_VLLM}.items()
    priced = {name: each for name, each in known if {(each.engine, each.drafts), (each.base, 0)} <= there}
    variants = {name: gains(prices, curve, load, variant) for name, variant in priced.items()}
    found = {"curve": curve_path.name, "prices": [path.name for path in paths], "tokens_a_step": TOKENS_A_STEP}
    first = read_result(paths[0])
    first.setdefault("gains", {})[trace] = {**found, **variants}
    store(first, paths[0])
    for name, variant in variants.items():
        head = [f"{name}: mode", "gate", *map(str, TOKENS_A_STEP), "needed for 0.9"]
        body = [
            [mode, gate, *(f"{ratio:.2f}" for ratio in ratios), str(variant["needed_for_a_tenth"][mode][gate])]
            for mode, gates in variant["time_ratio"].items()
            for gate, ratios in gates.items()
        ]
        print(markdown([head, ["---"] * len(head), *body]) + "\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(
        "partial_rollout.advise.drafts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    line.add_argument("--shape", choices=list(SHAPES), default="8b", help="of the model (%(default)s)")
    line.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES), help="(all)")
    line.add_argument("--at-once", type=int, default=2, help="engines in the GPU's memory at a time (%(default)s)")
    line.add_argument("--memory", type=float, default=0.35, help="share of the GPU that is free for each (%(default)s)")
    line.add_argument("--budget-s", type=float, default=560.0, help="nothing begins after it (%(default)s)")
    line.add_argument("--json", type=Path, help="where the result goes")
    line.add_argument("--dry-run", action="store_true", help="print the engines and cells, and run nothing")
    line.add_argument(
        "--predict", nargs="+", type=Path, metavar="PRICES", help="add to stored prices what drafts would gain"
    )
    line.add_argument("--curve", type=Path, help="latency curve of the same shape, for --predict")
    line.add_argument("--trace", default="long_tail", choices=TRACES, help="of lengths, for --predict (%(default)s)")
    return line


def main(words: Sequence[str] | None = None) -> None:
    """Measure the prices, or predict from them."""
    line = parser()
    options = line.parse_args(words)
    if options.predict:
        if options.curve is None:
            line.error("--predict needs --curve: a result of partial_rollout.advise.measure for the same shape")
        predict_gains(options.predict, options.curve, options.trace)
        return
    if options.at_once < 1:
        line.error(f"--at-once {options.at_once} is not allowed: must be at least 1")
    if options.dry_run:
        for name in options.engines:
            print(f"{name}: {ENGINES[name]}; cells {cells(options.shape == 'tiny')}")
        return
    with tempfile.TemporaryDirectory(prefix="pr-drafts-") as folder:
        prices = Prices(options)
        try:
            prices.run(Path(folder))
        finally:
            print(prices_table(prices.result["rows"]))


if __name__ == "__main__":
    main()
