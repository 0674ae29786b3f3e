"""The prompt queue in a checkpoint: `global_step_N/partial_rollout/queue.json`, beside verl's `transfer_queue`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import transfer_queue as tq

from partial_rollout.errors import DataError
from partial_rollout.types import QueueSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    import ray
    from omegaconf import DictConfig
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)


def queue_path(config: DictConfig, step: int) -> Path:
    """Where the queue of training step `step` is saved; a resumed run reads from the folder it resumes from."""
    folder = Path(config.trainer.default_local_dir)
    if config.trainer.resume_mode == "resume_path" and f"global_step_{step}" in str(config.trainer.resume_from_path):
        folder = Path(config.trainer.resume_from_path).parent
    return folder / f"global_step_{step}" / "partial_rollout" / "queue.json"


def save_queue(snapshot: QueueSnapshot, config: DictConfig, step: int) -> None:
    """Write the snapshot atomically."""
    path = Path(config.trainer.default_local_dir) / f"global_step_{step}" / "partial_rollout" / "queue.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_bytes(msgspec.json.encode(snapshot))
    os.replace(partial, path)


def load_queue(config: DictConfig, step: int) -> QueueSnapshot | None:
    """Read the queue saved with step `step`; None at the start of a run or after a checkpoint of another mode.

    Raises:
        DataError: the file is there but cannot be read as a snapshot.
    """
    path = queue_path(config, step)
    if step == 0 or not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=QueueSnapshot)
    except (msgspec.DecodeError, OSError) as error:
        raise DataError(f"queue checkpoint {path} is unreadable ({error}); resume from an earlier step") from error


def restore_queue(
    snapshot: QueueSnapshot,
    call: Callable[[ray.ObjectRef], Any],
    manager: ActorHandle,
    partition_id: str,
) -> int:
    """Give the restored prompts to the manager and clear what TransferQueue holds beyond them.

    verl saves TransferQueue before it clears the trained batch, and interrupted groups may have finished siblings:
    both are trajectories that no queued group owns. They are cleared, so they can neither be trained nor leak.
    """
    stored = set((tq.kv_list(partition_id) or {}).get(partition_id, {}))
    owned = snapshot.owned_keys()
    missing = sorted(owned - stored)
    if missing:
        raise DataError(f"the checkpoint's TransferQueue lacks {len(missing)} keys of its queue, e.g. {missing[0]}")
    if stored - owned:
        tq.kv_clear(keys=sorted(stored - owned), partition_id=partition_id)
    statistics = call(manager.restore.remote(snapshot))
    logger.info("restored the prompt queue: %s", statistics)
    return statistics.in_flight
