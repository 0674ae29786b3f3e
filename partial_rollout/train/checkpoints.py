"""Which checkpoints of a run are whole, which one to go on from, and which ones to remove.

verl writes `ROOT/global_step_N/` part by part (actor, critic, data, TransferQueue) and names the latest one in
`ROOT/latest_checkpointed_iteration.txt`. A run that is killed in between, or a disk that is full, leaves a folder with
some of its parts, or a tracker file without a number, which verl cannot start from.

    save all parts ──> look at them, write the manifest ──> (tracker names it) ──> prune older ones

The manifest (`partial_rollout/whole.json`) lists all files of the folder with their sizes. It is written last, when all
files are on the disk, so a folder with a manifest that its files agree with is whole, also after a loss of power. Of
each torch file the directory is read back, which torch writes at its end. Its tensors are not: that would take as long
as the save, so a disk that changes bytes is not noticed.
Checkpoints of release 0.1, of verl's own modes and of `async_save` have no manifest: they count as whole if all parts
are there that their mode writes, none of their torch files was cut off, and the manifest of verl's Megatron engine is
there where it saved the model.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from partial_rollout.errors import DataError
from partial_rollout.settings.memory import checkpoint_bytes
from partial_rollout.settings.retention import (
    KEEP_ALL,
    TRACKER,
    num_kept_checkpoints,
    removes_checkpoints,
    saves_by_time,
)
from partial_rollout.train.save_cadence import lack_of_room
from partial_rollout.train.start_choices import free_host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from omegaconf import DictConfig

logger = logging.getLogger(__name__)

MANIFEST = "partial_rollout/whole.json"
BY_TIME = "partial_rollout/saved_by_time"
"""An empty file in each checkpoint that nobody asked for: such a one may be removed when a newer one is whole."""
QUEUE = "partial_rollout/queue.json"
"""Written first by this package's mode; verl's `sync` mode writes neither this nor TransferQueue's dump."""
PARTS = ("actor", "data.pt")
PARTS_WITH_QUEUE = (*PARTS, "transfer_queue")
MEGATRON_FOLDERS = ("model", "optimizer", "extra")
"""Folders of a model that verl's Megatron engine has saved, of which with `async_save` any may be unfinished."""
MEGATRON_MANIFEST = "ckpt_contents.json"
"""Written beside these folders when all of them are whole, before verl's tracker."""
KEPT_BY_NFS = ".nfs"
"""Beginning of the name of a removed file that NFS keeps while a program on this machine has it open."""
ZIP_MARK = b"PK\x03\x04"
"""The first bytes of a file that `torch.save` has written."""
STEP_FOLDER = re.compile(r"global_step_(\d+)")
FOLDER_KEY = "trainer.default_local_dir"
"""Where users of text jobs set the folder of checkpoints. Image jobs use these functions too, with a key of theirs."""


class CheckpointKeeper:
    """Stands around verl's saving and loading of checkpoints, and takes the removal of old ones over from verl.

    verl removes the old actor once all ranks have saved the new one, before the rest of the new checkpoint is written,
    and forgets over a restart which ones it has saved.
    """

    def __init__(self, config: DictConfig, remove_elsewhere: Callable[[Sequence[Path]], object] | None = None) -> None:
        """Tell verl in `config` to keep all, where this class removes old ones: if verl saves at once.

        `remove_elsewhere` removes folders on the nodes of training ranks: each may save to a disk of its own.
        """
        self._trainer, self._remove_elsewhere = config.trainer, remove_elsewhere
        # Else verl may still be writing when its call has returned, and a whole checkpoint cannot be told.
        self._saves_at_once = removes_checkpoints(config)
        self._own: set[int] = set()
        """Steps of the checkpoints of this run, and of those that it goes on from: only these are removed."""
        self._by_time = saves_by_time(config)
        self._num_bytes = checkpoint_bytes(config) if self._by_time else None
        """About what a checkpoint has; None: not known."""
        self._keep: int | None = None
        if self._saves_at_once:
            self._keep = num_kept_checkpoints(config)
            # verl removes an old one while it saves the next, which then may never be whole.
            for key, value in KEEP_ALL.items():
                OmegaConf.update(config, key, value, force_add=True)

    def before_load(self) -> None:
        """Let verl find a whole checkpoint.

        Raises:
            DataError: the chosen checkpoint is not whole, or verl's tracker names one that is not and no other one is.
        """
        mode, path = self._trainer.resume_mode, self._trainer.get("resume_from_path")
        if mode == "auto":
            # With `async_save` verl's ranks write the tracker, after the first save that has ended.
            has_saved = self._saves_at_once or (self._root / TRACKER).exists()
            first = choose_checkpoint(self._root) if has_saved else None
        elif mode == "resume_path" and isinstance(path, str):
            require_whole(Path(path).absolute())
            match = STEP_FOLDER.fullmatch(Path(path).name)
            first = int(match[1]) if match and Path(path).absolute().parent == self._root else None
        else:
            first = None
        # What came later belongs to a run that was left for this one.
        steps = _steps(self._root)
        self._own = {step for step in steps if first is not None and step <= first}
        if self._by_time:  # the others were saved because somebody wanted them
            marked = {step for step, folder in steps.items() if (folder / BY_TIME).exists()}
            self._own = {step for step in marked if step in self._own or missing_parts(steps[step])}

    def lack_of_room(self) -> str:
        """What stands in the way of one more checkpoint, in words; empty if nothing does."""
        self._root.mkdir(parents=True, exist_ok=True)
        return lack_of_room(self._num_bytes, shutil.disk_usage(self._root).free, free_host_memory())

    def before_save(self, step: int) -> None:
        """A folder of that step is no longer whole: it is written over."""
        folder = self._root / f"global_step_{step}"
        # Before anything is written over: a run that is killed now must not leave a manifest over a mixture.
        (folder / MANIFEST).unlink(missing_ok=True)
        if self._by_time:
            (folder / BY_TIME).parent.mkdir(parents=True, exist_ok=True)
            (folder / BY_TIME).touch()

    def after_save(self, step: int) -> int:
        """Mark the checkpoint that verl has saved; returns its bytes, 0: not known."""
        num_bytes = mark_whole(self._root / f"global_step_{step}") if self._saves_at_once else 0
        self._own.add(step)
        if self._by_time:
            self._num_bytes = num_bytes or self._num_bytes
        return num_bytes

    def remove_old(self) -> None:
        """Remove checkpoints of this run that nobody asked to keep and that are older than a whole one."""
        if not self._saves_at_once:
            return
        removed = prune(self._root, self._keep, among=self._own)
        if removed and self._remove_elsewhere is not None:
            self._remove_elsewhere(removed)

    @property
    def _root(self) -> Path:
        return Path(self._trainer.default_local_dir).absolute()


def mark_whole(folder: Path, parts: Sequence[str] = PARTS_WITH_QUEUE, *, folder_key: str = FOLDER_KEY) -> int:
    """Write the manifest of a checkpoint of which every part has been saved; returns the bytes of its parts.

    Raises:
        DataError: a part of the folder is missing or empty, or a torch file has no end.
    """
    for part in parts:
        _require_content(folder / part, folder_key)
    for path in _torch_files(folder):
        if error := _torn(path):
            raise DataError(
                f"the checkpoint's file {path} was not saved whole: {error}. The checkpoints before it are kept; is "
                f"the disk full ({folder_key})?"
            )
    # Nor a manifest whose writing was cut off, which goes when this one is written.
    sizes = {name: size for name, size in _sizes(folder).items() if not name.startswith(MANIFEST)}
    # verl's files may still be in memory only: after a loss of power the manifest would vouch for empty ones.
    for path in (*_below(folder), folder, folder.parent):
        _put_on_disk(path)
    write_durably(folder / MANIFEST, json.dumps({"format": 1, "bytes": sizes}).encode())
    return sum(sizes.values())


def missing_parts(folder: Path, *, was_finished: bool = False) -> list[str]:
    """What a checkpoint lacks to be whole, as relative paths; empty for a whole one.

    `was_finished`: somebody says that the save had ended, as verl's tracker file does and a user who names the folder.
    What is missing of such a checkpoint, and verl can start without, was taken out on purpose: the data loader's state
    and the optimizer's. A manifest says the same.
    """
    manifest = folder / MANIFEST
    if not manifest.exists():
        parts = PARTS_WITH_QUEUE if (folder / QUEUE).exists() else PARTS
        parts = (*parts, *_megatron_manifests(folder))
        needed = [part for part in parts if not (was_finished and _is_dispensable(part))]
        torn = [str(path.relative_to(folder)) for path in _torch_files(folder) if _torn(path)]
        return [part for part in needed if not _has_content(folder / part)] + torn
    try:
        expected: dict[str, int] = json.loads(manifest.read_text(encoding="utf-8"))["bytes"]
    except (ValueError, KeyError, TypeError):
        return [MANIFEST]
    found = _sizes(folder)
    return sorted(
        name
        for name, size in expected.items()
        if not Path(name).name.startswith(KEPT_BY_NFS)
        and found.get(name) != size
        and (name in found or not _is_dispensable(name))
    )


def _megatron_manifests(folder: Path) -> list[str]:
    """Where verl's Megatron engine says of each model that it has saved that all of it is there."""
    models = {path.parent.name for name in MEGATRON_FOLDERS for path in folder.glob(f"*/{name}") if path.is_dir()}
    return [f"{model}/{MEGATRON_MANIFEST}" for model in sorted(models)]


def _is_dispensable(name: str) -> bool:
    return name == "data.pt" or Path(name).name == MEGATRON_MANIFEST or Path(name).name.startswith("optim_")


def choose_checkpoint(root: Path, *, folder_key: str = FOLDER_KEY) -> int | None:
    """Let verl's tracker name the newest whole checkpoint below `root`, and return its step; None: begin afresh.

    A tracker that names a whole checkpoint stays as it is: it may name an older one because a user wrote it.

    Raises:
        DataError: the tracker names a checkpoint that is not whole, and no other one is.
    """
    steps = _steps(root)
    named = _read_tracker(root)
    if named in steps and not missing_parts(steps[named], was_finished=True):
        return named
    # Here nobody says that a save had ended, so even parts that verl can start without must be there.
    for step in sorted(steps, reverse=True):
        if not missing_parts(steps[step]):
            logger.warning("%s: %s; this run goes on from step %d", root, _what_is_wrong(root, named, steps), step)
            write_tracker(root, step)
            return step
    if named in steps:
        missing = ", ".join(missing_parts(steps[named], was_finished=True)[:3])
        raise DataError(
            f"no checkpoint in {root} is whole: {steps[named].name} lacks {missing}; start afresh with "
            f"trainer.resume_mode=disable, or set {folder_key} to another folder"
        )
    if steps:
        logger.warning("%s: no save in it was finished (%s); this run begins afresh", root, _names(steps))
    if named is None:
        (root / TRACKER).unlink(missing_ok=True)  # verl cannot read one without a number
    return None


def _names(steps: dict[int, Path]) -> str:
    return ", ".join(steps[step].name for step in sorted(steps))


def require_whole(folder: Path) -> None:
    """Raise DataError for a checkpoint that was chosen by hand and lacks a part that verl cannot start without."""
    if missing := missing_parts(folder, was_finished=True):
        raise DataError(
            f"checkpoint {folder} is not whole, it lacks {', '.join(missing[:3])}: choose another one with "
            "trainer.resume_from_path, or let trainer.resume_mode=auto find the newest whole one"
        )


def write_tracker(root: Path, step: int) -> None:
    """Name the checkpoint that the next run goes on from; the tracker always holds a number, whatever happens."""
    write_durably(root / TRACKER, str(step).encode())


def prune(root: Path, keep: int | None, *, among: Collection[int]) -> list[Path]:
    """Remove checkpoints of the steps `among` that are older than the `keep` newest whole ones of them; None keeps all.

    Returns what was removed. A folder that is newer than the newest whole one was being written when a run was killed:
    it stays until a newer one is whole. The folders go with everything in them, the dumps of queue and TransferQueue
    included. A folder that cannot be removed stays, with a warning.
    """
    steps = {step: folder for step, folder in _steps(root).items() if step in among}
    whole = sorted((step for step, folder in steps.items() if not missing_parts(folder)), reverse=True)
    if keep is None or len(whole) < keep:
        return []
    removed: list[Path] = []
    for step in sorted(step for step in steps if step < whole[keep - 1]):
        try:
            shutil.rmtree(steps[step])
        except OSError as error:
            logger.warning("the old checkpoint %s could not be removed: %s", steps[step], error)
        else:
            removed.append(steps[step])
    return removed


def _steps(root: Path) -> dict[int, Path]:
    """Checkpoint folders by step."""
    if not root.is_dir():
        return {}
    named = ((STEP_FOLDER.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return {int(match[1]): path for match, path in named if match}


def _read_tracker(root: Path) -> int | None:
    try:
        return int((root / TRACKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _what_is_wrong(root: Path, named: int | None, steps: dict[int, Path]) -> str:
    if named is None:
        return f"{TRACKER} names no step" if (root / TRACKER).exists() else f"{TRACKER} is missing"
    if named not in steps:
        return f"{TRACKER} names step {named}, which has no folder"
    return f"the checkpoint of step {named} lacks {', '.join(missing_parts(steps[named])[:3])}"


def _sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in _below(folder) if path.is_file()}


def _below(folder: Path) -> list[Path]:
    """Files and folders below one, without removed files that NFS keeps for a while."""
    return [path for path in folder.rglob("*") if not path.name.startswith(KEPT_BY_NFS)]


def _has_content(part: Path) -> bool:
    if part.is_dir():
        return any(path.is_file() and path.stat().st_size for path in _below(part))
    return part.is_file() and part.stat().st_size > 0


def _require_content(part: Path, folder_key: str) -> None:
    if not _has_content(part):
        raise DataError(
            f"the checkpoint in {part.parent} was not saved whole: {part.name} is missing or empty. The checkpoints "
            f"before it are kept; is the disk full ({folder_key})?"
        )


def _torn(path: Path) -> str:
    """How a torch file was cut off, empty: it was not; one of torch's format before 1.6 has nothing at its end."""
    try:
        with path.open("rb") as file:
            mark = file.read(len(ZIP_MARK))
        if mark == ZIP_MARK:
            with zipfile.ZipFile(path):
                return ""
    except (OSError, zipfile.BadZipFile) as error:
        return str(error)
    return "" if mark.strip(b"\0") else "it is empty, or has zeros where it begins"


def _torch_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.pt") if path.is_file())


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, and on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        # Before the rename: after a crash of the machine the name could stand for an empty file.
        os.fsync(file.fileno())
    os.replace(partial, path)
    _put_on_disk(path.parent)


def _put_on_disk(path: Path) -> None:
    """What the kernel holds of a file, or the names in a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
