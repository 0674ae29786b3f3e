"""Blocks as `benchmarks.gpu.policies` stores them."""

from __future__ import annotations

from typing import Any


def step(wall_s: float, tokens: float, *, warmup: bool = False, **others: float) -> dict[str, Any]:
    usual = {
        "ended_s": 1000.0 * (not warmup),
        "generated_tokens": tokens,
        "drain_ms": 0.0,
        "resume_ms": 0.0,
        "staleness_steps/max": 0.0,
    }
    return {"wall_s": wall_s, "useful_tokens": tokens, "warmup": warmup, **usual, **others}


def block(
    mode: str, *steps: dict[str, Any], samples: list[list[float]] | None = None, slots: int = 4
) -> dict[str, Any]:
    return {
        "mode": mode,
        "trace": "long_tail",
        "round": 0,
        "slots": slots,
        "steps": list(steps),
        "samples": samples or [],
        "ended": "done",
    }


def sample(second: float, running: int, tokens: int) -> list[float]:
    return [second, running, running, 0, 0.5, tokens]
