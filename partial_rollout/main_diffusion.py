"""`python -m partial_rollout.main_diffusion`: FlowGRPO or MixGRPO of an image model (configs/diffusion.yaml)."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import numpy as np
from omegaconf import OmegaConf
from PIL import Image

from partial_rollout.diffusion.config import DiffusionConfig
from partial_rollout.errors import PartialRolloutError, RunStopped, UserError
from partial_rollout.observability.events import Choice, CommandEnded, EventWriter, StageBegan, StepEnded
from partial_rollout.observability.log import report_to
from partial_rollout.observability.report import report_at_end
from partial_rollout.observability.step_line import REWARD
from partial_rollout.runtime.folder_lock import folder_of_one_command
from partial_rollout.runtime.termination import INTERRUPTED_CODE, heed_termination

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from omegaconf import DictConfig

    from partial_rollout.diffusion.config import TrainerConfig
    from partial_rollout.diffusion.job import DiffusionJob

CONFIGS = Path(__file__).resolve().parent / "configs"
METRICS, EVENTS = "metrics.jsonl", "events"
STAGES = ("engines", "first pictures", "first step")
"""Stages of the start, in their order."""
GAP = 2
"""Pixels between the images of a grid."""


@hydra.main(config_path=str(CONFIGS), config_name="diffusion", version_base=None)
def main(config: DictConfig) -> None:
    """Train; a user's mistake ends in one line and exit code 2, Ctrl-C and SIGTERM in exit code 130."""
    ended, events = CommandEnded(code=1, text="see the command's output"), EventWriter(None, "trainer")
    stream: Path | None = None
    try:
        settings = DiffusionConfig.from_mapping(read_block(config))
        from partial_rollout.diffusion.launch import launched

        folder = Path(settings.trainer.output_dir)
        with folder_of_one_command(folder, "trainer.output_dir"):
            stream = folder / EVENTS
            events = EventWriter(stream, "trainer", keep_all=True)
            report_to(events)
            begin("engines", events)
            with launched(settings, events) as job:
                asyncio.run(train_until_stopped(job, settings.trainer, events))
        ended = CommandEnded(code=0)
    except RunStopped as stop:
        ended = CommandEnded(code=INTERRUPTED_CODE, text=str(stop))
    except UserError as error:
        ended = CommandEnded(code=2, text=str(error))
    except PartialRolloutError as error:
        ended = CommandEnded(code=1, text=str(error))
        raise
    except KeyboardInterrupt:
        ended = CommandEnded(code=INTERRUPTED_CODE, text="interrupted before the training, or while the run ended")
    finally:
        events.write(ended)
        if stream is not None:
            report_at_end(stream)
    if ended.code:
        print(f"error: {ended.text}", file=sys.stderr)
        sys.exit(ended.code)


def read_block(config: DictConfig) -> dict[str, Any]:
    """The composed configuration as plain values; OmegaConf raises an error that names a missing value."""
    block: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return block


async def train_until_stopped(job: DiffusionJob, trainer: TrainerConfig, events: EventWriter) -> None:
    """Train; what ends the training before its time leaves a last checkpoint.

    Raises:
        RunStopped: SIGTERM or Ctrl-C has asked for the end.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    training = asyncio.create_task(train(job, trainer, events), name="training")
    stopped = asyncio.create_task(stop.wait(), name="signals")
    try:
        await asyncio.wait([training, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one ends the command at once
            loop.remove_signal_handler(number)
        heed_termination()
        stopped.cancel()
    try:
        if training.done() and training.exception() is None:
            return
        await job.save_last()
        if training.done():  # its last step, or its error, may have come during the save
            return training.result()
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
    finally:
        await job.close()
    kept = f"the same command goes on from step {job.saved_step}" if job.saved_step else "no step was saved"
    raise RunStopped(f"interrupted in step {job.version + 1}; {kept}")


async def train(job: DiffusionJob, trainer: TrainerConfig, events: EventWriter) -> None:
    """Run all steps, with a line of metrics for each; save pictures before and after, and the trained weights."""
    folder = Path(trainer.output_dir)
    if job.version:
        print(f"goes on from the checkpoint of step {job.version} in {trainer.output_dir}", flush=True)
        reason = f"its checkpoint in {trainer.output_dir} is whole"
        after = f"step {job.version}"
        events.write(Choice(step=job.version, key="trainer.resume_mode", before="auto", after=after, reason=reason))
    await job.begin()
    if trainer.num_pictures and not job.version:
        begin("first pictures", events)
        save_grid(await job.pictures(trainer.num_pictures), folder / "before.png")
    begin("first step", events)
    with open_metrics(folder / METRICS, job.version) as metrics_file:
        await take_steps(job, trainer, metrics_file, events)
    await job.end()
    print(f"trained weights: {await asyncio.to_thread(job.save)}", flush=True)
    if trainer.num_pictures:
        save_grid(await job.pictures(trainer.num_pictures), folder / "after.png")


async def take_steps(job: DiffusionJob, trainer: TrainerConfig, metrics_file: TextIO, events: EventWriter) -> None:
    """Run the steps that are left."""
    folder = Path(trainer.output_dir)
    while job.version < trainer.total_training_steps:
        metrics = await job.step()
        events.write(as_step(metrics, trainer.total_training_steps))
        metrics_file.write(json.dumps(metrics) + "\n")
        metrics_file.flush()
        print(describe(metrics, trainer.total_training_steps), flush=True)
        if trainer.num_pictures:
            await asyncio.to_thread(save_grid, job.latest[: trainer.num_pictures], folder / "latest.png")
        await job.save_if_due()


def open_metrics(path: Path, step: int) -> TextIO:
    """The file of metrics, to append to, with the lines up to `step`: steps after it are taken again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        if kept != lines:
            part, times = path.with_name(f"{path.name}.part"), path.stat()
            part.write_text("".join(kept), encoding="utf-8")
            os.utime(part, ns=(times.st_atime_ns, times.st_mtime_ns))  # a file that is newer than the start has news
            os.replace(part, path)
    return path.open("a", encoding="utf-8")


def begin(stage: str, events: EventWriter) -> None:
    """A part of the start begins."""
    events.write(StageBegan(number=STAGES.index(stage) + 1, total=len(STAGES), name=stage))


def as_step(metrics: dict[str, float], total: int) -> StepEnded:
    """A step's metrics as an event, with the names by which views know those of language models too."""
    interrupt_s = metrics["timing/interrupt_s"]
    known: dict[str, float | None] = {
        REWARD: metrics["reward/mean"],
        "timing_s/gen": metrics["timing/generate_s"] + interrupt_s,
        "timing_s/drain": interrupt_s,
        "timing_s/update_actor": metrics["timing/train_s"],
        "timing_s/update_weights": metrics["timing/update_s"],
        "timing_s/step": metrics["timing/step_s"],
    }
    return StepEnded(step=int(metrics["step"]), total=total, metrics={**metrics, **known})


def describe(metrics: dict[str, float], total: int) -> str:
    """The line that is printed for one step."""
    return (
        f"step {metrics['step']:.0f}/{total} | reward {metrics['reward/mean']:.3f} "
        f"| gen {metrics['timing/generate_s']:.1f} s | train {metrics['timing/train_s']:.1f} s "
        f"| resumed {metrics['partial_rollout/resumed']:.0f} "
        f"| stale {metrics['partial_rollout/stale_step_share']:.0%}"
    )


def save_grid(images: Sequence[np.ndarray[Any, Any]], path: Path) -> None:
    """Write images [H, W, 3], uint8, of one size as a grid that is about square."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    height, width = images[0].shape[:2]
    canvas = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), 255, dtype=np.uint8)
    for index, image in enumerate(images):
        top, left = (index // columns) * (height + GAP), (index % columns) * (width + GAP)
        canvas[top : top + height, left : left + width] = image
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")  # a page may read the picture at any time
    Image.fromarray(canvas).save(part, format="PNG")
    os.replace(part, path)


if __name__ == "__main__":
    main()
