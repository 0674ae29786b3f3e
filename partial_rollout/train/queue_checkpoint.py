"""The prompt queue in a checkpoint, beside verl's folder `transfer_queue`.

`global_step_N/partial_rollout/queue.json` has the prompts and their states, `tokens.msgpack` the tokens so far of
unfinished prompts.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import transfer_queue as tq

from partial_rollout.core.resume import GenerationState
from partial_rollout.errors import ConfigError, DataError, TransferQueueSilent
from partial_rollout.runtime.bounded import call_bounded
from partial_rollout.train.checkpoints import write_durably
from partial_rollout.types import PromptMeta, QueueSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    import ray
    from omegaconf import DictConfig
    from ray.actor import ActorHandle

    from partial_rollout.agent_loop.trajectory import Saved

T = TypeVar("T")
logger = logging.getLogger(__name__)

TOKENS_FILE = "tokens.msgpack"
PARTITION = "train"
"""verl's TransferQueue partition of training prompts."""
VALIDATION = "val"
"""verl's partition of prompts that are validated."""
RESTORE_TIMEOUT_S = 300.0
"""Bound of one call that lists or clears all rows: TransferQueue's client waits for a dead controller for ever."""
DROPPED_AFTER_SNAPSHOT = "dropped_after_snapshot"
"""Drop reason of a prompt whose row was cleared after the queue was saved and before TransferQueue was."""


def queue_path(config: DictConfig, step: int, name: str = "queue.json") -> Path:
    """Path of the file `name` of training step `step`; a resumed run reads it from the folder it resumes from."""
    folder = Path(config.trainer.default_local_dir)
    if config.trainer.resume_mode == "resume_path" and f"global_step_{step}" in str(config.trainer.resume_from_path):
        folder = Path(config.trainer.resume_from_path).parent
    return folder / f"global_step_{step}" / "partial_rollout" / name


def save_queue(snapshot: QueueSnapshot, config: DictConfig, step: int) -> None:
    """Write the queue's snapshot as `queue.json`, whole or not at all."""
    _write(msgspec.json.encode(snapshot), config, step, "queue.json")


def save_tokens(saved: Saved, config: DictConfig, step: int) -> None:
    """Write the tokens of unfinished trajectories as `tokens.msgpack`, whole or not at all."""
    _write(msgspec.msgpack.encode(saved, enc_hook=_plain), config, step, TOKENS_FILE)


def load_tokens(snapshot: QueueSnapshot, config: DictConfig, step: int) -> Saved:
    """Tokens saved with step `step` of the unfinished prompts in `snapshot`; empty if the checkpoint has no tokens.

    Raises:
        DataError: the file exists and cannot be read.
    """
    path, unfinished = queue_path(config, step, TOKENS_FILE), {prompt.uid for prompt in snapshot.unfinished}
    if not path.exists():
        return {}
    try:
        saved = msgspec.msgpack.decode(path.read_bytes(), type=dict[str, list[GenerationState]])
    except (msgspec.DecodeError, OSError) as error:
        raise DataError(
            f"token checkpoint {path} is unreadable ({error}); delete it to generate its unfinished responses again, "
            "or resume from an earlier step"
        ) from error
    return {key: calls for key, calls in saved.items() if key.rsplit("_", 1)[0] in unfinished}


def load_queue(config: DictConfig, step: int) -> QueueSnapshot | None:
    """Read the queue saved with step `step`, or make a queue of the prompts in a checkpoint of another trainer mode.

    None at the start of a run, and if there are no prompts to go on with.

    Raises:
        DataError: the file exists and cannot be read as a snapshot.
        ConfigError: the run was saved with another actor_rollout_ref.rollout.n.
    """
    if step == 0:
        return None
    path = queue_path(config, step)
    if not path.exists():
        return _adopt_prompts(config.actor_rollout_ref.rollout.n)
    try:
        snapshot = msgspec.json.decode(path.read_bytes(), type=QueueSnapshot)
    except (msgspec.DecodeError, OSError) as error:
        raise DataError(f"queue checkpoint {path} is unreadable ({error}); resume from an earlier step") from error
    _check_group_size(snapshot, config.actor_rollout_ref.rollout.n, path)
    return snapshot


def restore_queue(
    snapshot: QueueSnapshot,
    call: Callable[[ray.ObjectRef], Any],
    manager: ActorHandle,
    partition_id: str,
) -> tuple[QueueSnapshot, int]:
    """Give the restored prompts to the manager, and clear TransferQueue's rows that belong to none of them.

    Returns what was restored, and how many prompts that is.

    Such rows exist: verl saves TransferQueue before it clears the trained batch, and an unfinished prompt may have
    trajectories that had ended, which are generated again. A row that nobody clears would be trained or never leave.
    TransferQueue is saved after the queue: a prompt without a row was dropped in between, and is dropped here as well.

    Raises:
        DataError: TransferQueue has no row at all, or lacks a trajectory of a group that waits for training.
        TransferQueueSilent: TransferQueue did not answer.
    """
    stored = _rows(partition_id).keys()
    if not stored and snapshot.unfinished:
        raise DataError(
            f"the checkpoint's queue has {len(snapshot.unfinished)} unfinished prompts, but none of their rows was "
            "loaded: its folder transfer_queue is missing or empty. Bring the folder back, resume from an earlier step "
            "(trainer.resume_mode=resume_path, trainer.resume_from_path), or start afresh (trainer.resume_mode=disable)"
        )
    kept = _drop_without_row(snapshot, stored)
    owned = kept.owned_keys()
    missing = sorted(owned - stored)
    if missing:
        raise DataError(
            f"the checkpoint's TransferQueue lacks {len(missing)} rows of finished prompts in its queue, for example "
            f"{missing[0]}; resume from an earlier step (trainer.resume_mode=resume_path, trainer.resume_from_path)"
        )
    orphaned = sorted(stored - owned)
    if orphaned:
        _bounded(lambda: tq.kv_clear(keys=orphaned, partition_id=partition_id), "clear rows nobody owns")
    statistics = call(manager.restore.remote(kept))
    logger.info("restored the prompt queue: %s", statistics)
    return kept, statistics.in_flight


def forget_validation() -> None:
    """Clear the rows of a validation in which the run was that saved the checkpoint: nobody takes part in it any more.

    verl takes the oldest rows first, so every later validation would report responses of the one before it.
    """
    if keys := [*_rows(VALIDATION)]:
        _bounded(lambda: tq.kv_clear(keys=keys, partition_id=VALIDATION), "clear rows of a validation that was left")


def _plain(value: Any) -> int | float:
    """Turn numpy numbers into plain ones: some agent loops and engines compute token ids and log-probs with numpy."""
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    raise NotImplementedError(f"a trajectory's tokens hold a {type(value).__name__}, which cannot be saved")


def _write(content: bytes, config: DictConfig, step: int, name: str) -> None:
    write_durably(Path(config.trainer.default_local_dir) / f"global_step_{step}" / "partial_rollout" / name, content)


def _adopt_prompts(group_size: int) -> QueueSnapshot | None:
    """A queue in which all restored prompts are pending: it is not known which of their trajectories are whole."""
    prompts = tuple(
        PromptMeta(uid, group_size, global_step=int(tag["global_steps"]))
        for uid, tag in _rows(PARTITION).items()
        if tag.get("is_prompt")
    )
    if not prompts:
        return None
    logger.warning("the checkpoint is of another trainer mode: its %d prompts are generated afresh", len(prompts))
    return QueueSnapshot(pending=prompts, admitted=len(prompts))


def _drop_without_row(snapshot: QueueSnapshot, stored: AbstractSet[str]) -> QueueSnapshot:
    lost = {prompt.uid for prompt in snapshot.unfinished} - stored
    if lost:
        logger.warning("%d prompts were dropped while the checkpoint was written: %s", len(lost), sorted(lost))
    return snapshot.without(lost, DROPPED_AFTER_SNAPSHOT)


def _check_group_size(snapshot: QueueSnapshot, group_size: int, path: Path) -> None:
    """Refuse groups of another size: they would be trained as they are, or fit no worker's slots and wait for ever."""
    sizes = {prompt.num_trajectories for prompt in snapshot.unfinished}
    sizes |= {len({t.key.rsplit("_", 1)[0] for t in group.trajectories}) for group in snapshot.done}
    other = sorted(sizes - {group_size})
    if other:
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={group_size} is not allowed here: {path} has groups of {other[0]}; "
            f"resume with actor_rollout_ref.rollout.n={other[0]}, or start afresh with trainer.resume_mode=disable"
        )


def _rows(partition_id: str) -> dict[str, dict[str, Any]]:
    """The tags of all rows of the partition in TransferQueue, by key."""
    return (_bounded(lambda: tq.kv_list(partition_id), "list its rows") or {}).get(partition_id, {})


def _bounded(call: Callable[[], T], what: str) -> T:
    who_waits = f"trainer waits for TransferQueue to {what}"
    return call_bounded(call, timeout_s=RESTORE_TIMEOUT_S, who_waits=who_waits, late=TransferQueueSilent)
