"""The prompt queue in a checkpoint, beside verl's `transfer_queue`.

`global_step_N/partial_rollout/queue.json` has the prompts, `tokens.msgpack` what was generated for unfinished ones.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import transfer_queue as tq

from partial_rollout.core.resume import GenerationState
from partial_rollout.errors import ConfigError, DataError
from partial_rollout.runtime.bounded import call_bounded
from partial_rollout.types import PromptMeta, QueueSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    import ray
    from omegaconf import DictConfig
    from ray.actor import ActorHandle

    from partial_rollout.agent_loop.journal import Saved

T = TypeVar("T")
logger = logging.getLogger(__name__)

TOKENS = "tokens.msgpack"
PARTITION = "train"
"""verl's TransferQueue partition of training prompts."""
RESTORE_TIMEOUT_S = 300.0
"""For one listing or clearing of all rows; the client of TransferQueue itself waits for a dead controller for ever."""
DROPPED_AFTER_SNAPSHOT = "dropped_after_snapshot"
"""Drop reason of a prompt whose row was cleared between the queue's save and TransferQueue's."""


def queue_path(config: DictConfig, step: int, name: str = "queue.json") -> Path:
    """Where `name` of training step `step` is saved; a resumed run reads from the folder it resumes from."""
    folder = Path(config.trainer.default_local_dir)
    if config.trainer.resume_mode == "resume_path" and f"global_step_{step}" in str(config.trainer.resume_from_path):
        folder = Path(config.trainer.resume_from_path).parent
    return folder / f"global_step_{step}" / "partial_rollout" / name


def save_queue(snapshot: QueueSnapshot, config: DictConfig, step: int) -> None:
    """Write the snapshot atomically."""
    _write(msgspec.json.encode(snapshot), config, step, "queue.json")


def save_tokens(saved: Saved, config: DictConfig, step: int) -> None:
    """Write the tokens of unfinished trajectories atomically."""
    _write(msgspec.msgpack.encode(saved, enc_hook=_plain), config, step, TOKENS)


def load_tokens(snapshot: QueueSnapshot, config: DictConfig, step: int) -> Saved:
    """Tokens saved with step `step`, of prompts that are still unfinished; none if the checkpoint has none.

    Raises:
        DataError: the file is there but cannot be read.
    """
    path, unfinished = queue_path(config, step, TOKENS), {prompt.uid for prompt in snapshot.unfinished}
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
    """Read the queue saved with step `step`, or make one of the prompts that a checkpoint of another mode holds.

    None at the start of a run, and when there are no prompts to go on with.

    Raises:
        DataError: the file is there but cannot be read as a snapshot.
        ConfigError: the run was saved with another rollout.n.
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
) -> int:
    """Give the restored prompts to the manager and clear what TransferQueue holds beyond them.

    verl saves TransferQueue before it clears the trained batch, and interrupted groups may have finished siblings:
    both are trajectories that no queued group owns. They are cleared, so they can neither be trained nor leak.
    TransferQueue is saved after the queue: a prompt without a row was dropped in between, and is dropped here as well.

    Raises:
        DataError: TransferQueue lacks the row or a trajectory of a group that waits for training.
        WaitTimeout: TransferQueue did not answer.
    """
    stored = _rows(partition_id).keys()
    kept = _drop_without_row(snapshot, stored)
    owned = kept.owned_keys()
    missing = sorted(owned - stored)
    if missing:
        raise DataError(f"the checkpoint's TransferQueue lacks {len(missing)} keys of its queue, e.g. {missing[0]}")
    orphaned = sorted(stored - owned)
    if orphaned:
        _bounded(lambda: tq.kv_clear(keys=orphaned, partition_id=partition_id), "clear rows nobody owns")
    statistics = call(manager.restore.remote(kept))
    logger.info("restored the prompt queue: %s", statistics)
    return statistics.in_flight


def _plain(value: Any) -> int | float:
    """Token ids and log-probs of agent loops and engines that compute with numpy."""
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    raise NotImplementedError(f"{type(value).__name__} in a trajectory's journal")


def _write(content: bytes, config: DictConfig, step: int, name: str) -> None:
    path = Path(config.trainer.default_local_dir) / f"global_step_{step}" / "partial_rollout" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_bytes(content)
    os.replace(partial, path)


def _adopt_prompts(group_size: int) -> QueueSnapshot | None:
    """All restored prompts as pending ones; what was generated for them is not known to be whole."""
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
    """Groups of another size would be trained as they are, or fit in no worker's slots and never be claimed."""
    sizes = {prompt.num_trajectories for prompt in snapshot.unfinished}
    sizes |= {len({t.key.rsplit("_", 1)[0] for t in group.trajectories}) for group in snapshot.done}
    other = sorted(sizes - {group_size})
    if other:
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={group_size} is not allowed here: {path} has groups of {other[0]}; "
            f"resume with actor_rollout_ref.rollout.n={other[0]}, or start afresh with trainer.resume_mode=disable"
        )


def _rows(partition_id: str) -> dict[str, dict[str, Any]]:
    """Tags by key of all that TransferQueue holds in the partition."""
    return (_bounded(lambda: tq.kv_list(partition_id), "list its rows") or {}).get(partition_id, {})


def _bounded(call: Callable[[], T], what: str) -> T:
    return call_bounded(call, timeout_s=RESTORE_TIMEOUT_S, who_waits=f"trainer waits for TransferQueue to {what}")
