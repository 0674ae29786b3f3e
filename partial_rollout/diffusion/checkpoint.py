"""Checkpoints of an image job: what they hold, which one a start goes on from, and how they are written.

    OUTPUT_DIR/checkpoints/
      latest_checkpointed_iteration.txt      names the newest whole one
      global_step_40/
        actor/weights.safetensors            what is trained: all weights, or the adapters
        actor/state.pt                       the optimizer's state, and torch's random state
        job.json                             steps, groups begun and not trained, settings that must not change
        partial_rollout/whole.json           the manifest, written last

    write aside ──> rename ──> read back ──> write the manifest ──> tracker names it ──> prune older ones

Folder names, tracker and manifest are those of text jobs. Images are not saved: those of groups that were not trained
are generated again, for the same prompts, with the same noise.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from partial_rollout.diffusion.books import Books
from partial_rollout.errors import ConfigError, DataError
from partial_rollout.train.checkpoints import (
    MANIFEST,
    STEP_FOLDER,
    choose_checkpoint,
    mark_whole,
    prune,
    write_tracker,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from partial_rollout.diffusion.actor import FlowGrpoActor
    from partial_rollout.diffusion.config import DiffusionConfig

FOLDER = "checkpoints"
ACTOR, JOB = "actor", "job.json"
PARTS = (ACTOR, JOB)
FOLDER_KEY = "trainer.output_dir"
FORMAT = 1


class Checkpoints:
    """The checkpoints of one run, of which at most one is being written."""

    def __init__(self, config: DiffusionConfig, prompts: Sequence[str]) -> None:
        """Find the checkpoint to go on from; nothing is written or loaded.

        Raises:
            DataError: there are checkpoints, and none of them is whole.
            ConfigError: the checkpoint is of a run with other settings; names the first one.
        """
        self._root = Path(config.trainer.output_dir).absolute() / FOLDER
        self._keep = config.trainer.max_actor_ckpt_to_keep
        self._settings = _lasting(config, prompts)
        self._batch_size = config.trainer.train_batch_size
        goes_on = config.trainer.resume_mode == "auto" and self._root.is_dir()
        step = choose_checkpoint(self._root, folder_key=FOLDER_KEY) if goes_on else None
        self.found = None if step is None else self._root / f"global_step_{step}"
        """The checkpoint to go on from; None: the run begins with step 1."""
        # What came later, or before a fresh beginning, belongs to a run that was left: it is not removed.
        folders = [STEP_FOLDER.fullmatch(path.name) for path in self._root.glob("global_step_*")]
        self._own = {int(match[1]) for match in folders if match and step is not None and int(match[1]) <= step}
        self.books = Books(self._batch_size) if self.found is None else self._read(self.found)

    def restore(self, actor: FlowGrpoActor) -> None:
        """Load what was found into the training model; nothing if nothing was found."""
        if self.found is not None:
            actor.load_state(self.found / ACTOR)

    def save(self, mapping: dict[str, Any], actor: FlowGrpoActor, is_given_up: threading.Event) -> int:
        """Save a checkpoint of the books' `mapping` and the training model, which stands still; returns its bytes.

        Whoever calls sets `is_given_up` when the model may change: a checkpoint that has not got it by then is dropped.

        Raises:
            DataError: it could not be written, or is not read back as it was; those before it stay.
        """
        step = mapping["step"]
        folder, aside = self._root / f"global_step_{step}", self._root / f"global_step_{step}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            (aside / ACTOR).mkdir(parents=True)
            actor.save_state(aside / ACTOR)
            if is_given_up.is_set():
                raise DataError(
                    f"the checkpoint of step {step} is late and is dropped: the model has changed meanwhile"
                )
            books = {"format": FORMAT, "books": mapping, "settings": self._settings}
            (aside / JOB).write_text(json.dumps(books, indent=1), encoding="utf-8")
            if folder.exists():  # of a start that had come further, before this one went on from an earlier step
                (folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder)
            aside.rename(folder)
            self._read(folder)
            actor.check_state(folder / ACTOR)
            num_bytes = mark_whole(folder, PARTS, folder_key=FOLDER_KEY)
            write_tracker(self._root, step)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch says "unexpected pos" of a full disk
            raise DataError(
                f"the checkpoint of step {step} could not be saved in {self._root}: {error}. The checkpoints before it "
                f"are kept; is the disk full ({FOLDER_KEY})?"
            ) from error
        self._own.add(step)
        prune(self._root, self._keep, among=self._own)
        return num_bytes

    def _read(self, folder: Path) -> Books:
        try:
            found: dict[str, Any] = json.loads((folder / JOB).read_text(encoding="utf-8"))
            settings, mapping = found["settings"], found["books"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{folder / JOB} cannot be read ({error!r}): start afresh with trainer.resume_mode=disable, or set "
                f"{FOLDER_KEY} to another folder"
            ) from error
        for key, value in self._settings.items():
            if settings.get(key) != value:
                raise ConfigError(
                    f"{key}={_short(value)} is not allowed: the checkpoint in {folder} was made with "
                    f"{_short(settings.get(key))}, and a run cannot go on with another one (set {key} as it was, start "
                    f"afresh with trainer.resume_mode=disable, or set {FOLDER_KEY} to another folder)"
                )
        return Books.read(self._batch_size, mapping)


def _lasting(config: DiffusionConfig, prompts: Sequence[str]) -> dict[str, Any]:
    """What groups ask for, and what the weights are, depends on these settings: they last as long as the run."""
    model, trainer = config.model, config.trainer
    return {
        "model.path": model.path,
        "model.architecture": model.architecture,
        "model.dtype": model.dtype,
        "model.lora_rank": model.lora_rank,
        "model.lora_alpha": model.lora_alpha,
        "algorithm.name": config.algorithm.name,
        "algorithm.sde_window_interval": config.algorithm.sde_window_interval,
        "trainer.seed": trainer.seed,
        "trainer.train_batch_size": trainer.train_batch_size,
        "rollout.n": config.rollout.n,
        "data.prompts": f"{len(prompts)} prompts, sha256 {hashlib.sha256(chr(10).join(prompts).encode()).hexdigest()}",
    }


def _short(value: object) -> str:
    """A value as text; a text with a hash keeps only the hash's beginning."""
    return repr(value if not isinstance(value, str) or "sha256" not in value else value[:-52])
