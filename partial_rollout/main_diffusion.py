"""`python -m partial_rollout.main_diffusion`: FlowGRPO or MixGRPO of an image model (configs/diffusion.yaml)."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import numpy as np
from omegaconf import OmegaConf
from PIL import Image

from partial_rollout.diffusion.config import DiffusionConfig
from partial_rollout.errors import UserError
from partial_rollout.observability.events import CommandEnded, EventWriter, StageBegan, StepEnded
from partial_rollout.observability.log import report_to
from partial_rollout.observability.report import report_at_end
from partial_rollout.observability.step_line import REWARD
from partial_rollout.runtime.termination import INTERRUPTED_CODE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from omegaconf import DictConfig

    from partial_rollout.diffusion.config import TrainerConfig
    from partial_rollout.diffusion.job import DiffusionJob

CONFIGS = Path(__file__).resolve().parent / "configs"
METRICS, EVENTS = "metrics.jsonl", "events"
STAGES = ("engines", "first pictures", "first step")
"""Of the start, in their order."""
GAP = 2
"""Pixels between the images of a grid."""


@hydra.main(config_path=str(CONFIGS), config_name="diffusion", version_base=None)
def main(config: DictConfig) -> None:
    """Train; a user's mistake ends in one line and exit code 2, Ctrl-C and SIGTERM in exit code 130."""
    ended, events, folder = CommandEnded(code=1, text="see the command's output"), EventWriter(None, "trainer"), None
    try:
        settings = DiffusionConfig.from_mapping(read_block(config))
        from partial_rollout.diffusion.launch import launched

        folder = Path(settings.trainer.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        events = EventWriter(folder / EVENTS, "trainer", keep_all=True)
        report_to(events)
        begin("engines", events)
        with launched(settings, events) as job, (folder / METRICS).open("a", encoding="utf-8") as metrics_file:
            asyncio.run(train(job, settings.trainer, metrics_file, events))
        ended = CommandEnded(code=0)
    except UserError as error:
        ended = CommandEnded(code=2, text=str(error))
    except KeyboardInterrupt:
        ended = CommandEnded(code=INTERRUPTED_CODE, text="interrupted; only the metrics of the training are kept")
    finally:
        events.write(ended)
        if folder is not None:
            report_at_end(folder / EVENTS)
    if ended.code:
        print(f"error: {ended.text}", file=sys.stderr)
        sys.exit(ended.code)


def read_block(config: DictConfig) -> dict[str, Any]:
    """The composed configuration as plain values; OmegaConf raises an error that names a missing value."""
    block: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return block


async def train(job: DiffusionJob, trainer: TrainerConfig, metrics_file: TextIO, events: EventWriter) -> None:
    """Run all steps, with a line of metrics for each; save pictures before and after, and the trained weights."""
    folder = Path(trainer.output_dir)
    if trainer.num_pictures:
        begin("first pictures", events)
        save_grid(await job.pictures(trainer.num_pictures), folder / "before.png")
    begin("first step", events)
    for _ in range(trainer.total_training_steps):
        metrics = await job.step()
        events.write(as_step(metrics, trainer.total_training_steps))
        metrics_file.write(json.dumps(metrics) + "\n")
        metrics_file.flush()
        print(describe(metrics, trainer.total_training_steps), flush=True)
        if trainer.num_pictures:
            await asyncio.to_thread(save_grid, job.latest[: trainer.num_pictures], folder / "latest.png")
    await job.end()
    print(f"trained weights: {await asyncio.to_thread(job.save)}", flush=True)
    if trainer.num_pictures:
        save_grid(await job.pictures(trainer.num_pictures), folder / "after.png")


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
