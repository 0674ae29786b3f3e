"""FlowGRPO with partial rollout: generate, interrupt, train, send the weights, go on.

| loop        | consumes            | produces         | waits for                   | unblocked by           |
|-------------|---------------------|------------------|-----------------------------|------------------------|
| `_sample`   | a prompt            | a whole group    | its n images                | a server               |
| `step`      | whole groups        | a weight update  | enough whole groups         | `_sample`, `timeout_s` |
|             |                     |                  | rewards, training           | threads, their limits  |
| `save_last` | weights and books   | a checkpoint     | the end of a training       | `step`, `stop_s`       |
| `pictures`  | the first prompts   | their images     | all of them                 | servers, `timeout_s`   |

More prompts are in flight than a step trains, so that every engine runs full batches until the step has its groups.
Requests that are unfinished then are interrupted between two denoise steps and go on under the new weights. Engines
always stand still while weights are sent. While the model trains, they stand still only if both use one device.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partial_rollout.core.deadlines import WARN_SHARE
from partial_rollout.diffusion.books import Books, drawn
from partial_rollout.diffusion.result import Group, checked_rewards
from partial_rollout.diffusion.sampling import SampleRequest
from partial_rollout.diffusion.sde_window import NO_WINDOW
from partial_rollout.errors import CallOverdue, DataError, PartialRolloutError, WaitTimeout
from partial_rollout.observability.events import (
    DENOISE_STEPS,
    BatchTaken,
    CheckpointSaved,
    DeadlinePassed,
    EventWriter,
    GateMoved,
    PhaseBegan,
    SegmentEnded,
    TrajectoryEnded,
    WeightsUpdated,
)
from partial_rollout.observability.record import INTERRUPTED
from partial_rollout.runtime.bounded import in_own_thread
from partial_rollout.runtime.remote_call import answer_of
from partial_rollout.train.save_cadence import SaveCadence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerBase

    from partial_rollout.diffusion.actor import FlowGrpoActor
    from partial_rollout.diffusion.checkpoint import Checkpoints
    from partial_rollout.diffusion.config import DiffusionConfig
    from partial_rollout.diffusion.contract import Adapter
    from partial_rollout.diffusion.replicas import Replicas, Sampled

logger = logging.getLogger(__name__)

TRAINED = "transformer"
"""Folder of the trained weights."""
SAVE_SHARE, STILL_SHARE = 0.3, 0.45
"""Shares of `trainer.stop_s`: for saving the last checkpoint, and before that for the end of a training under way."""
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
        checkpoints: Checkpoints | None = None,
        events: EventWriter | None = None,
    ) -> None:
        """Keep the parts; nothing is generated before the first `step`.

        `checkpoints`: where the job goes on from, and saves to; None: it begins anew and saves nothing. `events`: where
        the job says what happens.
        """
        self._config, self._adapter, self._replicas, self._actor = config, adapter, replicas, actor
        self._tokenizer, self._reward, self._prompts = tokenizer, reward, list(prompts)
        self._events = events or EventWriter(None, "trainer")
        self._plan = config.algorithm.window_plan()
        self._checkpoints = checkpoints
        self._books = checkpoints.books if checkpoints else Books(config.trainer.train_batch_size)
        self._cadence = SaveCadence(config.trainer.save_minutes)
        self.saved_step = self._books.version
        """The step of the last checkpoint; 0: there is none."""
        self._engine_version = 0
        """Version of the weights that the engines have."""
        # One lock for both: a server that starts again must not be sent weights that change meanwhile.
        self._still = replicas.still
        self._is_half_trained = False
        """A training has begun and not ended: the weights belong to no step."""
        self._groups: dict[int, asyncio.Task[_Rollout]] = {}
        """Groups that are unfinished or whole, and not taken for a training step, by their numbers."""
        self.latest: list[np.ndarray[Any, Any]] = []
        """Images of the batch that was trained last."""
        self._running: dict[tuple[str, int], int] = {}
        """Images that were asked for and are not finished, with the weight version at that time."""
        self._stood_s: dict[int, float] = {}
        """When the engines stood for the update that ended a weight version, in seconds since 1970."""

    @property
    def version(self) -> int:
        """Steps that were trained; also the weights' version."""
        return self._books.version

    async def begin(self) -> None:
        """Give the servers the weights of the checkpoint from which the job goes on; call this before all else."""
        await self._replicas.begin(watched=self._adapter.stepwise)
        # Servers start with the weights of `model.path`, which are those of step 0.
        if self.version:
            async with self._still:
                await self._update_servers()
        self._cadence.begin(self.saved_step)

    async def step(self) -> dict[str, float]:
        """Run one training step; return its metrics.

        Raises:
            WaitTimeout: images, training or weights are late.
            CallOverdue: a reward is late.
            DataError: rewards are no finite numbers, or not as many as there are images.
        """
        started_s = time.perf_counter()
        self._fill()
        rollouts = await self._take_batch()
        generated_s = time.perf_counter()
        groups = [await self._scored(number, rollout) for number, rollout in rollouts.items()]
        scored_s = time.perf_counter()
        self.latest = [result.image for group in groups for result in group.results]
        async with self._still:
            metrics = await self._train(list(rollouts.values()), groups)
        ended_s = time.perf_counter()
        return {
            "step": self.version,
            "reward/mean": float(np.mean([group.rewards for group in groups])),
            "reward/std": float(np.mean([np.std(group.rewards) for group in groups])),
            "timing/generate_s": generated_s - started_s,
            "timing/reward_s": scored_s - generated_s,
            "timing/step_s": ended_s - started_s,
            **metrics,
        }

    async def _train(self, rollouts: list[_Rollout], groups: list[Group]) -> dict[str, float]:
        """Train, with the engines interrupted for as long as they must be, and send the weights; return metrics."""
        # On a GPU of their own engines go on while the model trains, and stand only while weights are sent.
        together = not self._config.shares_device
        interrupt_s = 0.0 if together else await self._interrupt()
        begun_s = time.perf_counter()
        self._is_half_trained = True
        training = in_own_thread(lambda: self._actor.update(groups), "training")
        who_waits = f"the job for the training of step {self.version + 1} (trainer.timeout_s)"
        metrics = await answer_of(training, timeout_s=self._config.trainer.timeout_s, who_waits=who_waits)
        trained_s = time.perf_counter()
        # Before `trained` counts the step on: staleness is that of the version which these weights had.
        mixture, queue = self._mixture(rollouts), self._queue()
        self._books.trained()
        self._is_half_trained = False
        interrupt_s += await self._interrupt() if together else 0.0
        held_s = time.perf_counter()
        await self._update_servers()
        await self._go_on()
        return {
            **queue,
            **mixture,
            "timing/interrupt_s": interrupt_s,
            "timing/train_s": trained_s - begun_s,
            "timing/update_s": time.perf_counter() - held_s,
            **metrics,
        }

    async def _update_servers(self) -> None:
        started_s = time.perf_counter()
        limit_s = self._config.trainer.weights_timeout_s
        actor, is_part = self._actor, self._config.model.lora_rank > 0
        await self._replicas.update(actor.weights, self.version, actor.device, limit_s, is_part=is_part)
        seconds, self._engine_version = time.perf_counter() - started_s, self.version
        self._events.write(WeightsUpdated(step=self.version, version=self.version, seconds=seconds))

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

    async def save_last(self) -> bool:
        """Save what no checkpoint has, when the run ends before its time; whether a checkpoint was saved. Never raises.

        Half a training cannot be saved: its end is waited for, for a part of `trainer.stop_s`.
        """
        stop_s = self._config.trainer.stop_s
        try:
            await asyncio.wait_for(self._still.acquire(), STILL_SHARE * stop_s)
        except asyncio.TimeoutError:  # noqa: UP041 - not the built-in one on Python 3.10
            why = "a training or a save has not ended"
            logger.warning("the run ends without a last checkpoint, the one before it stays: %s", why)
            return False
        try:
            # Asked with the lock held: a training may have begun while it was waited for.
            if self._is_half_trained or self.version == self.saved_step or self._checkpoints is None:
                return False
            await self._save(SAVE_SHARE * stop_s)
        except Exception as error:  # noqa: BLE001 - the run's own error must reach the user, whatever goes wrong here
            said = f"{type(error).__name__}: {error}"
            logger.warning("the run ends without a last checkpoint, the one before it stays: %s", said)
            return False
        finally:
            self._still.release()
        return True

    async def save_if_due(self) -> None:
        """Save a checkpoint, if it is time for one; call this at the end of each step.

        A checkpoint that cannot be saved ends no run: the one before it stays, and saving is tried again.
        """
        trainer = self._config.trainer
        by_steps = trainer.save_freq > 0 and self.version % trainer.save_freq == 0
        is_last = self.version >= trainer.total_training_steps
        if self._checkpoints is None or not (by_steps or self._cadence.is_due(self.version, is_last=is_last)):
            return
        try:
            async with self._still:
                await self._save(trainer.timeout_s)
        except PartialRolloutError as error:
            logger.warning("%s; the run goes on, and tries again", error)
            self._cadence.put_off()

    async def _save(self, limit_s: float) -> None:
        """Save in a thread, with the weights standing still; engines go on."""
        checkpoints, step, began_s = self._checkpoints, self.version, time.monotonic()
        if checkpoints is None:
            return
        mapping, is_given_up = self._books.as_mapping(), threading.Event()
        saving = in_own_thread(lambda: checkpoints.save(mapping, self._actor, is_given_up), "checkpoint")
        who_waits = f"the job for its checkpoint of step {step}"
        try:
            num_bytes = await answer_of(saving, timeout_s=limit_s, who_waits=who_waits)
        finally:
            is_given_up.set()  # from now on weights change
        seconds, self.saved_step = time.monotonic() - began_s, step
        self._cadence.saved(step, seconds)
        self._events.write(CheckpointSaved(step=step, seconds=seconds, num_bytes=num_bytes))

    async def end(self) -> None:
        """Give up the unfinished groups."""
        for task in self._groups.values():
            task.cancel()
        await asyncio.gather(*self._groups.values(), return_exceptions=True)

    async def close(self) -> None:
        """Watch the servers no more: they are about to end."""
        await self._replicas.end()

    def _fill(self) -> None:
        """Begin as many groups as may be in flight: one batch only, if requests cannot be interrupted."""
        # A request that cannot be interrupted would hold up the update of weights; nothing is begun beyond the batch.
        ahead = self._config.rollout.prefetch_factor if self._adapter.stepwise else 1
        for number in self._books.untrained:  # those that a run before has left
            if number not in self._groups:
                self._groups[number] = asyncio.ensure_future(self._sample(number))
        while len(self._groups) < int(self._config.trainer.train_batch_size * ahead):
            number = self._books.begin()
            self._groups[number] = asyncio.ensure_future(self._sample(number))

    async def _take_batch(self) -> dict[int, _Rollout]:
        """Wait for as many whole groups as a step trains, and take the oldest, by number; one that failed ends the run.

        If all samples of a step share one window, the step waits for the groups whose windows were drawn for it.
        """
        trainer = self._config.trainer
        want, deadline_s = trainer.train_batch_size, time.monotonic() + trainer.timeout_s
        while True:
            whole = {number: task.result() for number, task in sorted(self._groups.items()) if task.done()}
            # With windows of its own for each image any whole group will do, so that no step waits for one group.
            taken = [number for number in whole if self._trains_now(number)][:want]
            if len(taken) == want:
                self._books.take(taken)
                for number in taken:
                    del self._groups[number]
                rollouts = {number: whole[number] for number in taken}
                self._say_taken(rollouts)
                return rollouts
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise WaitTimeout(
                    f"the trainer has {len(taken)} of {want} groups of images after trainer.timeout_s="
                    f"{trainer.timeout_s:g} seconds"
                )
            # Whole groups of later steps are left out, or this wait would return at once for ever.
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

    async def _sample(self, group: int) -> _Rollout:
        # All that is drawn follows from the group's number, so that a new start asks for the same images.
        run_seed, num_images, global_step = self._config.trainer.seed, self._config.rollout.n, self._step_of(group)
        row, seeds = drawn(run_seed, group, num_prompts=len(self._prompts), num_images=num_images)
        prompt, requests = self._prompts[row], list[SampleRequest]()
        for number, seed in enumerate(seeds, group * num_images):
            window = self._adapter.window(self._plan, run_seed=run_seed, global_step=global_step, request_seed=seed)
            requests.append(self._request(f"sample-{number}", prompt, seed=seed, window=window))
        calls = (self._sample_one((_uid(group), session), row, request) for session, request in enumerate(requests))
        return _Rollout(prompt, row, tuple(await self._gathered(calls)))

    async def _sample_one(self, key: tuple[str, int], row: int, request: SampleRequest) -> Sampled:
        """One image, with its events."""
        (uid, session), began_s, timer_s = key, time.time(), time.perf_counter()
        self._events.write(PhaseBegan(uid=uid, session=session, phase="engine", response=1, row=str(row)))
        # `_say_gate` sees by this which ends of versions nobody asks for any more.
        self._running[key] = self._engine_version
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
            # Servers do not say when a version's last step ended; all engines stood still for the update after it.
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

    async def _scored(self, number: int, rollout: _Rollout) -> Group:
        """A group with its rewards, which the user's function computes in a thread of its own: engines go on."""
        results, limit_s = tuple(sampled.result for sampled in rollout.sampled), self._config.trainer.reward_s
        whose = f"trainer.reward={self._config.trainer.reward} of prompt row {rollout.row} ({rollout.prompt[:60]!r})"

        def score() -> tuple[float, ...]:
            found = self._reward([result.image for result in results], [rollout.prompt] * len(results))
            return checked_rewards(found, len(results), whose)

        began_s = time.monotonic()
        # A thread that hangs cannot be ended: it must be a daemon's, so that the process can.
        rewards = in_own_thread(score, f"reward of {_uid(number)}")
        done, _ = await asyncio.wait([rewards], timeout=limit_s * WARN_SHARE)
        if not done:
            seconds = time.monotonic() - began_s
            logger.warning("%s has not answered for %.0f s; after %g s the run ends", whose, seconds, limit_s)
            done, _ = await asyncio.wait([rewards], timeout=limit_s - seconds)
        if not done:
            seconds = time.monotonic() - began_s
            uid, row = _uid(number), str(rollout.row)
            overdue = DeadlinePassed(
                uid=uid, session=0, phase="reward", response=1, row=row, attempt=1, seconds=seconds, limit_s=limit_s
            )
            self._events.write(overdue)
            raise CallOverdue(
                f"{whose} has not answered for {seconds:.0f} s, the limit is {limit_s:g} s (set trainer.reward_s=...)"
            )
        return Group(rollout.prompt, results, rewards.result())

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
            # The batch that was taken now is counted in advance: its step has not ended.
            "partial_rollout/queue/taken": self._books.num_trained + self._config.trainer.train_batch_size,
        }

    async def _interrupt(self) -> float:
        """Stop the engines between two denoise steps; return how many seconds that took."""
        started_s = time.perf_counter()
        # Whole requests cannot be stopped, and need not be: none was begun beyond the batch, which is complete.
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
            oldest = min(self._running.values(), default=self._engine_version)
            self._stood_s = {version: at_s for version, at_s in self._stood_s.items() if version >= oldest}
            self._stood_s[self._engine_version] = time.time()
        step = self._engine_version if is_open else self._engine_version + 1
        move = GateMoved(
            step=step, version=self._engine_version, is_open=is_open, seconds=seconds, interrupted=unfinished
        )
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
