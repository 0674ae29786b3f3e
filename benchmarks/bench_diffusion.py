"""What do step-wise execution and interruptions between denoise steps cost and save?

Three servers on the tiny Qwen-Image, in processes of their own, take turns in every repeat: whole requests one by one,
whole requests batched, and step-wise. First all images are asked for at once, then at random times (the same for all).
Then the step-wise server's images are interrupted once, half-way: held in place, by snapshot, or started anew. Wasted
steps are measured: those that the engine computed in all, less those of the finished images.

    make setup-omni
    .venv-cpu/omni/bin/python -m benchmarks.bench_diffusion --repeats 7 --json benchmarks/results/bench_diffusion.json
    python -m benchmarks.bench_diffusion --layers 20 --size 256 --gap-s 0.5 --json FILE    # the servers share a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from partial_rollout.advise.result import about_run, store
from partial_rollout.run.cpu_environment import apply_cpu_environment

MODES = {
    "whole, one by one": {"step_execution": False, "max_num_seqs": 1},
    "whole, batched": {"step_execution": False, "max_num_seqs": 8},
    "step-wise": {"step_execution": True, "max_num_seqs": 8},
}
WAYS = ("not interrupted", "hold", "snapshot", "regenerate")
TIMED = ("images_per_s", "wait_median_s", "wait_max_s", "seconds")
PATCH = 8
START_S = 240.0


def start_servers(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One actor for each mode."""
    import ray

    from partial_rollout.diffusion.contract import QWEN_IMAGE, resolve
    from partial_rollout.diffusion.sampling import SamplingLimits
    from partial_rollout.diffusion.server import DiffusionServer, ServerOptions

    servers = {}
    for mode, how in MODES.items():
        server = ServerOptions(
            model_path=str(model),
            adapter=resolve(QWEN_IMAGE, "flow_grpo", step_execution=how["step_execution"]),
            limits=SamplingLimits(sizes=((options.size, options.size),), multiple=PATCH, max_steps=100),
            dtype="bfloat16" if options.layers else "float32",
            max_num_seqs=how["max_num_seqs"],
        )
        actor = ray.remote(DiffusionServer).options(max_concurrency=1000, num_gpus=0.3 if options.layers else 0)
        servers[mode] = actor.remote(server)
    ray.get([server.statistics.remote() for server in servers.values()], timeout=START_S)
    return servers


def make_requests(number: int, steps: int, size: int) -> list[Any]:
    """Requests with prompts of unlike lengths."""
    from partial_rollout.diffusion.sampling import SampleRequest
    from partial_rollout.diffusion.sde_window import SdeWindow

    return [
        SampleRequest(
            request_id=f"r{index}",
            prompt_ids=tuple(range(10, 190 + 5 * (index % 8))),
            seed=index,
            height=size,
            width=size,
            num_steps=steps,
            window=SdeWindow(0, 2),
            noise_level=0.7,
        )
        for index in range(number)
    ]


async def generate(server: Any, requests: list[Any], arrivals_s: list[float]) -> dict[str, float]:
    """Ask for each image at its time; images per second and what a caller waits for one."""
    started_s = time.perf_counter()

    async def one(request: Any, arrival_s: float) -> float:
        await asyncio.sleep(max(0.0, started_s + arrival_s - time.perf_counter()))
        asked_s = time.perf_counter()
        await server.generate.remote(request)
        return time.perf_counter() - asked_s

    waits = await asyncio.gather(*(one(*pair) for pair in zip(requests, arrivals_s, strict=True)))
    elapsed_s = time.perf_counter() - started_s
    rate = len(requests) / elapsed_s
    return {"images_per_s": rate, "wait_median_s": statistics.median(waits), "wait_max_s": max(waits)}


async def interrupted(server: Any, requests: list[Any], way: str, after_s: float) -> dict[str, float]:
    """Interrupt all requests once; seconds until all are done, and the denoise steps that came to nothing."""
    steps_before = await server.count_steps.remote()
    started_s = time.perf_counter()
    images = [server.generate.remote(request) for request in requests]
    await asyncio.sleep(after_s)
    stop: Any = server.hold if way == "hold" else server.drain
    go_on: Any = server.release if way == "hold" else server.resume
    pause_s = 0.0
    if way != "not interrupted":
        begun_s = time.perf_counter()
        await stop.remote()
        await go_on.remote()
        pause_s = time.perf_counter() - begun_s
    outcomes = await asyncio.gather(*images)
    again = [(item, out) for item, out in zip(requests, outcomes, strict=True) if hasattr(out, "snapshot")]
    kept = [item.resumed_from(out.snapshot if way == "snapshot" else None) for item, out in again]
    await asyncio.gather(*(server.generate.remote(request) for request in kept))
    seconds = time.perf_counter() - started_s
    computed, needed = await server.count_steps.remote() - steps_before, sum(item.num_steps for item in requests)
    return {
        "seconds": seconds,
        "pause_s": pause_s,
        "came_back": len(again),
        "computed_steps": computed,
        "wasted_steps": computed - needed,
        "wasted_share": (computed - needed) / needed,
    }


async def measure(servers: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """All repeats; every number of each."""
    requests = make_requests(options.images, options.steps, options.size)
    clock, arrivals_s = random.Random(0), [0.0]
    while len(arrivals_s) < len(requests):
        arrivals_s.append(arrivals_s[-1] + clock.expovariate(1 / options.gap_s))
    together = make_requests(MODES["step-wise"]["max_num_seqs"], options.steps, options.size)
    found: dict[str, Any] = {"at_once": {}, "spread": {}, "interrupted": {}}
    server, after_s = servers["step-wise"], 0.0
    for number in range(options.repeats + 1):
        for scenario, times_s in (("at_once", [0.0] * len(requests)), ("spread", arrivals_s)):
            for mode in MODES:
                row = await generate(servers[mode], requests, times_s)
                found[scenario].setdefault(mode, []).append(row)
        for way in WAYS:
            row = await interrupted(server, together, way, after_s)
            found["interrupted"].setdefault(way, []).append(row)
            if way == "not interrupted":
                after_s = row["seconds"] / 2
        print(f"repeat {number} of {options.repeats}" + (" (warm-up, not counted)" if number == 0 else ""), flush=True)
    return {name: {key: rows[1:] for key, rows in block.items()} for name, block in found.items()}


def summary(repeats: dict[str, Any]) -> dict[str, Any]:
    """Median, least and most over repeats of every number."""

    def over_repeats(rows: list[dict[str, float]]) -> dict[str, list[float]]:
        columns = {field: [row[field] for row in rows] for field in rows[0]}
        return {field: [statistics.median(values), min(values), max(values)] for field, values in columns.items()}

    return {name: {key: over_repeats(rows) for key, rows in block.items()} for name, block in repeats.items()}


def ratios(repeats: dict[str, Any]) -> dict[str, Any]:
    """Median, least and most of every timed number divided by that of the block's first way in the same repeat."""

    def divided(rows: list[dict[str, float]], by: list[dict[str, float]]) -> list[dict[str, float]]:
        pairs = zip(rows, by, strict=True)
        return [{field: row[field] / first[field] for field in TIMED if field in row} for row, first in pairs]

    blocks = {name: (block, next(iter(block.values()))) for name, block in repeats.items()}
    return summary(
        {name: {key: divided(rows, first) for key, rows in block.items()} for name, (block, first) in blocks.items()}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gap-s", type=float, default=0.1, help="mean time between arrivals, when they are spread")
    parser.add_argument("--size", type=int, default=64, help="height and width of the images (%(default)s)")
    parser.add_argument("--layers", type=int, default=0, help="of Qwen-Image's sizes, on a GPU; 0: tiny, on a CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    if not options.layers:
        apply_cpu_environment()
    import ray

    make, result = "partial_rollout.run.tiny_qwen_image.make_checkpoint", about_run(options)
    with tempfile.TemporaryDirectory() as folder:
        # A process of its own gives a GPU's memory back.
        subprocess.run([sys.executable, "-m", make, "--out", folder, "--layers", str(options.layers)], check=True)
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
        servers = start_servers(Path(folder), options)
        repeats = asyncio.run(measure(servers, options))
        ray.get([server.shutdown.remote() for server in servers.values()], timeout=START_S)
        ray.shutdown()
    result |= {"summary": summary(repeats), "ratios": ratios(repeats), "repeats": repeats}
    for name, block in result["summary"].items():
        for key, fields in block.items():
            print(name, key, {field: round(values[0], 4) for field, values in fields.items()}, sep=" | ")
    store(result, options.json)


if __name__ == "__main__":
    main()
