"""FlowGRPO with partial rollout: generate, interrupt, train, send the weights, go on.

| loop       | consumes            | produces         | waits for                   | unblocked by           |
|------------|---------------------|------------------|-----------------------------|------------------------|
| `_sample`  | a prompt            | a whole group    | its n images                | a server               |
| `step`     | whole groups        | a weight update  | enough whole groups         | `_sample`, `timeout_s` |
| `pictures` | the first prompts   | their images     | all of them                 | servers, `timeout_s`   |

More prompts are in flight than a step trains, so that every engine runs full batches until the step has its groups.
Requests that are unfinished then are interrupted between two denoise steps and go on under the new weights. Engines
always stand still while weights are sent. While the model trains, they stand still only if both use one device.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partial_rollout.diffusion.result import Group
from partial_rollout.diffusion.sampling import SampleRequest
from partial_rollout.diffusion.sde_window import NO_WINDOW
from partial_rollout.errors import DataError, WaitTimeout
from partial_rollout.observability.events import (
    DENOISE_STEPS,
    BatchTaken,
    EventWriter,
    GateMoved,
    PhaseBegan,
    SegmentEnded,
    TrajectoryEnded,
    WeightsUpdated,
)
from partial_rollout.observability.record import INTERRUPTED
from partial_rollout.runtime.remote_call import answer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerBase

    from partial_rollout.diffusion.actor import FlowGrpoActor
    from partial_rollout.diffusion.config import DiffusionConfig
    from partial_rollout.diffusion.contract import Adapter
    from partial_rollout.diffusion.replicas import Replicas, Sampled

SEED_LIMIT = 2**31
TRAINED = "transformer"
"""Folder of the trained weights."""
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
"""The prompt template that Qwen-Image was trained with."""


@dataclass(frozen=True, slots=True)
class _Rollout:
    """The images of one prompt, before their rewards."""

    prompt: str
    row: int
    """Which prompt it is, from 0."""
    sampled: tuple[Sampled, ...]


class DiffusionJob:
    """One training run, on servers that run already."""

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
        events: EventWriter | None = None,
    ) -> None:
        """Keep the parts; nothing is generated before the first `step`. `events`: where the job says what happens."""
        self._config, self._adapter, self._replicas, self._actor = config, adapter, replicas, actor
        self._tokenizer, self._reward, self._prompts = tokenizer, reward, list(prompts)
        self._events = events or EventWriter(None, "trainer")
        self._plan = config.algorithm.window_plan()
        self._order = random.Random(config.trainer.seed)
        self._groups: dict[int, asyncio.Task[_Rollout]] = {}
        """Groups that are unfinished or not trained yet, by the order in which they began."""
        self._group_numbers, self._numbers = itertools.count(), itertools.count()
        self.version = 0
        self.latest: list[np.ndarray[Any, Any]] = []
        """Images of the batch that was trained last."""
        self._running: dict[tuple[str, int], int] = {}
        """Images that were asked for and are not finished, with the weight version at that time."""
        self._stood_s: dict[int, float] = {}
        """When the engines stood for the update that ended a weight version, in seconds since 1970."""

    async def step(self) -> dict[str, float]:
        """Run one training step; return its metrics."""
        started_s = time.perf_counter()
        self._fill()
        rollouts = await self._take_batch()
        generated_s = time.perf_counter()
        groups = [self._scored(rollout) for rollout in rollouts]
        self.latest = [result.image for group in groups for result in group.results]
        together = not self._config.shares_device
        interrupt_s = 0.0 if together else await self._interrupt()
        begun_s = time.perf_counter()
        metrics = await asyncio.to_thread(self._actor.update, groups)
        trained_s = time.perf_counter()
        interrupt_s += await self._interrupt() if together else 0.0
        held_s = time.perf_counter()
        mixture, queue = self._mixture(rollouts), self._queue()
        self.version += 1
        updated_s = time.perf_counter()
        limit_s = self._config.trainer.weights_timeout_s
        await self._replicas.update(self._actor.weights, self.version, self._actor.device, limit_s)
        ended_s = time.perf_counter()
        self._events.write(WeightsUpdated(step=self.version, version=self.version, seconds=ended_s - updated_s))
        await self._go_on()
        ended_s = time.perf_counter()
        return {
            "step": self.version,
            "reward/mean": float(np.mean([group.rewards for group in groups])),
            "reward/std": float(np.mean([np.std(group.rewards) for group in groups])),
            **queue,
            **mixture,
            "timing/generate_s": generated_s - started_s,
            "timing/interrupt_s": interrupt_s,
            "timing/train_s": trained_s - begun_s,
            "timing/update_s": ended_s - held_s,
            "timing/step_s": ended_s - started_s,
            **metrics,
        }

    async def pictures(self, number: int) -> list[np.ndarray[Any, Any]]:
        """Images of the first prompts, by plain ODE steps: all calls start from the same noise and can be compared.

        Raises:
            WaitTimeout: the images are not finished within `trainer.timeout_s`.
        """
        requests = [
            self._request(f"picture-{index}", self._prompts[index % len(self._prompts)], seed=index, window=NO_WINDOW)
            for index in range(number)
        ]
        images = self._gathered(map(self._replicas.sample, requests))
        limit_s = self._config.trainer.timeout_s
        found = await answer_of(images, timeout_s=limit_s, who_waits=f"the job for {number} pictures")
        return [sampled.result.image for sampled in found]

    def save(self) -> Path:
        """Write the trained weights; return their folder."""
        folder = Path(self._config.trainer.output_dir) / TRAINED
        self._actor.save(folder)
        return folder

    async def end(self) -> None:
        """Give up the unfinished groups."""
        for task in self._groups.values():
            task.cancel()
        await asyncio.gather(*self._groups.values(), return_exceptions=True)

    def _fill(self) -> None:
        """Begin as many groups as may be in flight: one batch only, if requests cannot be interrupted."""
        ahead = self._config.rollout.prefetch_factor if self._adapter.stepwise else 1
        while len(self._groups) < int(self._config.trainer.train_batch_size * ahead):
            number, row = next(self._group_numbers), self._order.randrange(len(self._prompts))
            self._groups[number] = asyncio.ensure_future(self._sample(number, row))

    async def _take_batch(self) -> list[_Rollout]:
        """Wait for as many whole groups as a step trains, and take the oldest; a group that failed ends the run.

        If all samples of a step share one window, the step waits for the groups whose windows were drawn for it.
        """
        trainer = self._config.trainer
        want, deadline_s = trainer.train_batch_size, time.monotonic() + trainer.timeout_s
        while True:
            whole = {number: task.result() for number, task in sorted(self._groups.items()) if task.done()}
            taken = [number for number in whole if self._trains_now(number)][:want]
            if len(taken) == want:
                for number in taken:
                    del self._groups[number]
                self._say_taken({number: whole[number] for number in taken})
                return [whole[number] for number in taken]
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise WaitTimeout(
                    f"the trainer has {len(taken)} of {want} groups of images after trainer.timeout_s="
                    f"{trainer.timeout_s:g} seconds"
                )
            unfinished = [task for number, task in self._groups.items() if number not in whole]
            await asyncio.wait(unfinished, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def _say_taken(self, rollouts: dict[int, _Rollout]) -> None:
        taken = BatchTaken(
            step=self.version + 1,
            uids=[_uid(number) for number in rollouts],
            source_index=[str(rollout.row) for rollout in rollouts.values()],
            deferrals=[0] * len(rollouts),
            interruptions=[sum(_num_updates(each) for each in rollout.sampled) for rollout in rollouts.values()],
        )
        self._events.write(taken)

    def _step_of(self, number: int) -> int:
        """The training step that the windows of a group are drawn for; another step may train it."""
        return number // self._config.trainer.train_batch_size

    def _trains_now(self, number: int) -> bool:
        return not self._adapter.shares_window or self._step_of(number) == self.version

    async def _sample(self, group: int, row: int) -> _Rollout:
        rollout, global_step, prompt = self._config.rollout, self._step_of(group), self._prompts[row]
        requests = []
        for _ in range(rollout.n):
            number, seed = next(self._numbers), self._order.randrange(SEED_LIMIT)
            window = self._adapter.window(
                self._plan, run_seed=self._config.trainer.seed, global_step=global_step, request_seed=seed
            )
            requests.append(self._request(f"sample-{number}", prompt, seed=seed, window=window))
        calls = (self._sample_one((_uid(group), session), row, request) for session, request in enumerate(requests))
        return _Rollout(prompt, row, tuple(await self._gathered(calls)))

    async def _sample_one(self, key: tuple[str, int], row: int, request: SampleRequest) -> Sampled:
        """One image, with its events."""
        (uid, session), began_s, timer_s = key, time.time(), time.perf_counter()
        self._events.write(PhaseBegan(uid=uid, session=session, phase="engine", response=1, row=str(row)))
        self._running[key] = self.version
        try:
            sampled = await self._replicas.sample(request)
        finally:
            del self._running[key]
        seconds = time.perf_counter() - timer_s
        self._say_segments(key, sampled, began_s, began_s + seconds)
        ended = TrajectoryEnded(
            uid=uid, session=session, seconds=seconds, engine_seconds=seconds, tokens=len(sampled.result.versions),
            interruptions=_num_updates(sampled),
        )  # fmt: skip
        self._events.write(ended)
        return sampled

    def _say_segments(self, key: tuple[str, int], sampled: Sampled, began_s: float, ended_s: float) -> None:
        """The denoise steps of an image, by weight version and server. Its prompt is encoded and counts nothing."""
        done, computed = 0, zip(sampled.result.versions, sampled.servers, strict=True)
        for (version, server), steps in itertools.groupby(computed):
            count = len(list(steps))
            is_last = done + count == len(sampled.servers)
            end_s = ended_s if is_last else self._stood_s.get(version, ended_s)
            segment = SegmentEnded(
                t=end_s, uid=key[0], session=key[1], server=f"images {server}", version=version,
                seconds=max(0.0, end_s - began_s), prompt_tokens=done, reused_tokens=done, tokens=count,
                reason="stop" if is_last else INTERRUPTED, unit=DENOISE_STEPS,
            )  # fmt: skip
            self._events.write(segment)
            began_s, done = end_s, done + count

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
        """Results in order. If one call fails the others are cancelled: none of them runs unobserved."""
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
        """Metrics of a batch: how many of its images were interrupted, and how many of its denoise steps are stale.

        A denoise step is stale if its weight version is not the one that is trained now.
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

    def _queue(self) -> dict[str, float]:
        """Groups by state, under the names that the queue of a language model has."""
        done = sum(task.done() for task in self._groups.values())
        return {
            "partial_rollout/groups_in_flight": len(self._groups),
            "partial_rollout/queue/ongoing": len(self._groups) - done,
            "partial_rollout/queue/done": done,
            "partial_rollout/queue/taken": (self.version + 1) * self._config.trainer.train_batch_size,
        }

    async def _interrupt(self) -> float:
        """Stop the engines between two denoise steps; return how many seconds that took."""
        started_s = time.perf_counter()
        if self._adapter.stepwise:
            await (self._replicas.hold() if self._config.rollout.interrupt == "hold" else self._replicas.drain())
        seconds = time.perf_counter() - started_s
        if self._adapter.stepwise:
            self._say_gate(is_open=False, seconds=seconds)
        return seconds

    async def _go_on(self) -> None:
        if not self._adapter.stepwise:
            return
        await (self._replicas.release() if self._config.rollout.interrupt == "hold" else self._replicas.resume())
        self._say_gate(is_open=True)

    def _say_gate(self, *, is_open: bool, seconds: float = 0.0) -> None:
        """Engines stand, or run again. Images that were asked for and are not finished are interrupted."""
        unfinished = 0 if is_open else len(self._running)
        if not is_open:
            oldest = min(self._running.values(), default=self.version)
            self._stood_s = {version: at_s for version, at_s in self._stood_s.items() if version >= oldest}
            self._stood_s[self.version] = time.time()
        step = self.version if is_open else self.version + 1
        move = GateMoved(step=step, version=self.version, is_open=is_open, seconds=seconds, interrupted=unfinished)
        self._events.write(move)


def _uid(number: int) -> str:
    return f"group-{number}"


def _num_updates(sampled: Sampled) -> int:
    """Weight updates between an image's denoise steps."""
    return len(set(sampled.result.versions)) - 1


def to_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[int, ...]:
    """Token ids of the prompt in its template."""
    return tuple(tokenizer(TEMPLATE.format(prompt))["input_ids"])


def read_prompts(path: str) -> list[str]:
    """The lines of a file that are not empty.

    Raises:
        DataError: the file cannot be read or has no prompt.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"data.prompts={path} cannot be read: {error}") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise DataError(f"data.prompts={path} has no prompt: one a line is expected")
    return prompts
