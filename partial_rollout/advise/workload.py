"""Which response lengths a prediction or a benchmark has: a log-normal distribution, drawn with a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

PRIMER_TOKENS = 2
"""Length of all responses of a job's first batch, whose step only loads what is loaded at first use."""
TRACES = ("long_tail", "heavy_tail", "uniform")
HEAVY = 8
"""The longest responses of the heavy tail are so many times as long as the longest ones of the long tail."""
UNIFORM_SHARE = 0.25
"""Length of all responses of the uniform trace, as a share of the longest of the long-tailed one."""


@dataclass(frozen=True)
class Workload:
    """Sizes of a job's batches, and its response lengths: log-normal, with a share of them at the longest.

    >>> Workload(batch=4, median=100, longest=1000).limit
    1000
    """

    batch: int = 8
    """Prompts of a training step."""
    group: int = 4
    """Responses to each prompt."""
    steps: int = 14
    skip: int = 4
    """Steps at the beginning of a job that are not counted."""
    median: int = 48
    sigma: float = 0.9
    longest: int = 384
    long_share: float = 0.1
    """Share of the responses that have the longest length, besides those that are cut there."""
    huge: int = 0
    huge_share: float = 0.0
    """Share of the responses that have `huge` tokens."""
    seed: int = 0
    observed: tuple[tuple[int, ...], ...] = ()
    """Lengths of real responses, by prompt; where there are any, prompts are drawn from them and from nothing else."""

    @property
    def limit(self) -> int:
        """Tokens of the longest response."""
        return max(self.longest, self.huge)

    @property
    def num_prompts(self) -> int:
        """Prompts that a job needs: more than it trains, because some are in flight at its end."""
        return self.batch * (self.steps + 4)


LARGE = Workload(batch=32, group=8, median=700, sigma=0.9, longest=4096, long_share=0.1)
"""The distribution of lengths that GPU results were measured with."""
TINY = Workload(batch=4, group=2, median=24, sigma=0.9, longest=96, long_share=0.1)
SMALL = Workload(batch=8, group=4, median=48, sigma=0.9, longest=384, long_share=0.1)
"""The distribution for a CPU: as `LARGE`, with shorter responses and fewer prompts."""
SIZES = {"tiny": TINY, "small": SMALL}


def workload(shape: str, trace: str, **sizes: int) -> Workload:
    """The workload of a model's shape and a trace; `sizes` (batch, median, ...) replace the usual ones."""
    load = replace(SIZES.get(shape, LARGE), **sizes)
    if trace == "heavy_tail":
        return replace(load, huge=HEAVY * load.longest, huge_share=0.01)
    if trace == "uniform":
        return replace(load, median=int(UNIFORM_SHARE * load.longest), sigma=0.0, long_share=0.0)
    return load


def lengths(load: Workload, num_prompts: int) -> np.ndarray:
    """Response lengths, shape (num_prompts, group); the same ones for the same seed and number."""
    rng = np.random.default_rng(load.seed)
    if load.observed:
        prompts = rng.integers(len(load.observed), size=num_prompts)
        if max(map(len, load.observed)) == 1:  # which responses are of one prompt is not known
            return np.array(load.observed)[rng.integers(len(load.observed), size=(num_prompts, load.group)), 0]
        return np.array([rng.choice(load.observed[prompt], size=load.group) for prompt in prompts])
    drawn = np.exp(rng.normal(np.log(load.median), load.sigma, size=(num_prompts, load.group)))
    drawn[rng.random(drawn.shape) < load.long_share] = load.longest
    drawn = np.clip(drawn, 1, load.longest)
    drawn[rng.random(drawn.shape) < load.huge_share] = load.huge
    return drawn.astype(int)


def primed_lengths(load: Workload, num: int) -> np.ndarray:
    """Lengths of the primer's batch and of `num` prompts after it, shape (load.batch + num, load.group)."""
    return np.concatenate([np.full((load.batch, load.group), PRIMER_TOKENS), lengths(load, num)])
