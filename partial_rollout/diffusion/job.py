"""FlowGRPO with partial rollout: generate, interrupt, train, update, go on.

| loop       | consumes            | produces         | waits for                   | unblocked by           |
|------------|---------------------|------------------|-----------------------------|------------------------|
| `_sample`  | a prompt            | a whole group    | its n images                | a server               |
| `step`     | whole groups        | a weight update  | enough whole groups         | `_sample`, `timeout_s` |

More prompts are in flight than a step trains, so that every slot of an engine is busy until the step has its groups.
What is unfinished then is interrupted between two denoise steps and goes on under the new weights.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from partial_rollout.core.sampling import SampleRequest
from partial_rollout.core.sde_window import NO_WINDOW
from partial_rollout.diffusion.groups import Group
from partial_rollout.diffusion.prompts import to_ids
from partial_rollout.errors import WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerBase

    from partial_rollout.diffusion.actor import FlowGrpoActor
    from partial_rollout.diffusion.config import DiffusionConfig
    from partial_rollout.diffusion.contract import Adapter
    from partial_rollout.diffusion.replicas import Replicas, Sampled

SEED_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class _Rollout:
    """A group before its rewards."""

    prompt: str
    sampled: tuple[Sampled, ...]


class DiffusionJob:
    """One training run on running servers."""

    def __init__(
        self,
        config: DiffusionConfig,
        *,
        adapter: Adapter,
        replicas: Replicas,
        actor: FlowGrpoActor,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[str],
        reward: Callable[[Sequence[Any], Sequence[str]], Sequence[float]],
    ) -> None:
        """Take the parts; nothing runs before the first `step`."""
        self._config, self._adapter, self._replicas, self._actor = config, adapter, replicas, actor
        self._tokenizer, self._reward, self._prompts = tokenizer, reward, list(prompts)
        self._plan = config.algorithm.window_plan()
        self._order = random.Random(config.trainer.seed)
        self._groups: set[asyncio.Task[_Rollout]] = set()
        self._numbers = itertools.count()
        self.version = 0

    async def step(self) -> dict[str, float]:
        """One training step; return its metrics."""
        started_s = time.perf_counter()
        self._fill()
        rollouts = await self._take_batch()
        interrupted_s = time.perf_counter()
        await self._interrupt()
        in_flight = len(self._groups)
        trained_s = time.perf_counter()
        groups = [self._scored(rollout) for rollout in rollouts]
        metrics = await asyncio.to_thread(self._actor.update, groups)
        updated_s = time.perf_counter()
        mixture = self._mixture(rollouts)
        self.version += 1
        limit_s = self._config.trainer.weights_timeout_s
        await self._replicas.update(self._actor.weights, self.version, self._actor.device, limit_s)
        await self._go_on()
        ended_s = time.perf_counter()
        return {
            "step": self.version,
            "reward/mean": float(np.mean([group.rewards for group in groups])),
            "reward/std": float(np.mean([np.std(group.rewards) for group in groups])),
            "partial_rollout/groups_in_flight": in_flight,
            **mixture,
            "timing/generate_s": interrupted_s - started_s,
            "timing/interrupt_s": trained_s - interrupted_s,
            "timing/train_s": updated_s - trained_s,
            "timing/update_s": ended_s - updated_s,
            **metrics,
        }

    async def pictures(self, number: int) -> list[np.ndarray[Any, Any]]:
        """Images of the first prompts without noise in between: the same noise at the start, whatever was trained."""
        requests = [
            self._request(f"picture-{index}", self._prompts[index % len(self._prompts)], seed=index, window=NO_WINDOW)
            for index in range(number)
        ]
        return [sampled.result.image for sampled in await self._gathered(map(self._replicas.sample, requests))]

    async def end(self) -> None:
        """Give up what is unfinished."""
        for task in self._groups:
            task.cancel()
        await asyncio.gather(*self._groups, return_exceptions=True)

    def _fill(self) -> None:
        trainer = self._config.trainer
        capacity = int(trainer.train_batch_size * self._config.rollout.prefetch_factor)
        while len(self._groups) < capacity:
            prompt = self._order.choice(self._prompts)
            self._groups.add(asyncio.ensure_future(self._sample(prompt, self.version)))

    async def _take_batch(self) -> list[_Rollout]:
        """The first whole groups, as many as a step trains; a failed one ends the run."""
        trainer, taken = self._config.trainer, []
        deadline_s = time.monotonic() + trainer.timeout_s
        while len(taken) < trainer.train_batch_size:
            left_s = deadline_s - time.monotonic()
            done, self._groups = await asyncio.wait(
                self._groups, timeout=max(left_s, 0), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                have, want = len(taken), trainer.train_batch_size
                raise WaitTimeout(f"the trainer has {have} of {want} groups of images after {trainer.timeout_s:g} s")
            taken += sorted(done, key=lambda task: task.get_name())
        rest = taken[trainer.train_batch_size :]
        self._groups |= set(rest)
        return [task.result() for task in taken[: trainer.train_batch_size]]

    async def _sample(self, prompt: str, global_step: int) -> _Rollout:
        rollout = self._config.rollout
        requests = []
        for _ in range(rollout.n):
            number, seed = next(self._numbers), self._order.randrange(SEED_LIMIT)
            window = self._adapter.window(
                self._plan, run_seed=self._config.trainer.seed, global_step=global_step, request_seed=seed
            )
            requests.append(self._request(f"sample-{number}", prompt, seed=seed, window=window))
        return _Rollout(prompt, tuple(await self._gathered(map(self._replicas.sample, requests))))

    def _request(self, name: str, prompt: str, **options: Any) -> SampleRequest:
        rollout, algorithm, negative = self._config.rollout, self._config.algorithm, self._config.data.negative_prompt
        return SampleRequest(
            request_id=name,
            prompt_ids=to_ids(self._tokenizer, prompt),
            negative_ids=None if negative is None else to_ids(self._tokenizer, negative),
            height=rollout.height,
            width=rollout.width,
            num_steps=rollout.num_steps,
            true_cfg_scale=rollout.true_cfg_scale,
            noise_level=algorithm.noise_level,
            sde_type=algorithm.sde_type,
            **options,
        )

    async def _gathered(self, calls: Any) -> list[Sampled]:
        """Results in order; if one fails the others are cancelled, so that nothing goes on unobserved."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _scored(self, rollout: _Rollout) -> Group:
        results = tuple(sampled.result for sampled in rollout.sampled)
        rewards = self._reward([result.image for result in results], [rollout.prompt] * len(results))
        return Group(rollout.prompt, results, tuple(float(reward) for reward in rewards))

    def _mixture(self, rollouts: Sequence[_Rollout]) -> dict[str, float]:
        """Of the images trained: how many were interrupted, by how many updates at most, and what of them is stale.

        A step is stale if other weights predicted it than the ones that are trained now.
        """
        versions = [item.result.versions for roll in rollouts for item in roll.sampled]
        return {
            "partial_rollout/resumed": sum(len(set(each)) > 1 for each in versions),
            "partial_rollout/updates_max": max(len(set(each)) - 1 for each in versions),
            "partial_rollout/snapshots": sum(item.num_interruptions for roll in rollouts for item in roll.sampled),
            "partial_rollout/stale_step_share": float(
                np.mean([step != self.version for each in versions for step in each])
            ),
        }

    async def _interrupt(self) -> None:
        if not self._adapter.stepwise:
            return
        await (self._replicas.hold() if self._config.rollout.interrupt == "hold" else self._replicas.drain())

    async def _go_on(self) -> None:
        if not self._adapter.stepwise:
            return
        await (self._replicas.release() if self._config.rollout.interrupt == "hold" else self._replicas.resume())
