"""Whether a run saves checkpoints, and who removes old ones.

`train.checkpoints` removes them, with verl's numbers, where it knows that the new one is whole; else verl does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from partial_rollout.settings.block import AUTO, BLOCK

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from partial_rollout.settings.changes import Changes

ASYNC_SAVE = "actor_rollout_ref.actor.checkpoint.async_save"
KEEP_ALL = {
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.max_critic_ckpt_to_keep": None,
    "trainer.remove_previous_ckpt_in_save": False,
}
"""verl's keys, with the values at which verl removes nothing."""


ANEW = "another trainer.default_local_dir, or trainer.resume_mode=disable"
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's name of the file beside the checkpoints that names the latest one."""
KEPT_BY_TIME = 1
"""Checkpoints of a run that saves by time, where the user has said nothing: verl would keep all of them."""


def saves_by_time(config: DictConfig) -> bool:
    """Whether all checkpoints are those of `save_minutes`."""
    minutes = OmegaConf.select(config, f"{BLOCK}.save_minutes")
    return isinstance(minutes, int | float) and config.trainer.save_freq <= 0


def may_save(config: DictConfig) -> bool:
    """Whether the run saves while it trains, as far as one can see before `auto` is decided."""
    minutes = OmegaConf.select(config, f"{BLOCK}.save_minutes")
    return config.trainer.save_freq > 0 or (removes_checkpoints(config) if minutes == AUTO else minutes is not None)


def removes_checkpoints(config: DictConfig) -> bool:
    """Whether this package removes old checkpoints: where verl's save has ended when its call returns."""
    return not OmegaConf.select(config, ASYNC_SAVE)


def step_to_go_on_from(config: DictConfig) -> int | None:
    """The step of the checkpoint that the folder has already, where the run takes it; None: it begins with step 1.

    The start looks whether it is whole, and takes another one if it is not.
    """
    if config.trainer.resume_mode != "auto":
        return None
    try:
        return int(Path(config.trainer.default_local_dir, TRACKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def num_kept_checkpoints(config: DictConfig, *, by_time: bool | None = None) -> int | None:
    """The larger of verl's two limits, since a checkpoint is removed as a whole; None: one of them keeps all.

    A run that saves by time never keeps all. `by_time`: whether it does; None: as the configuration says.
    """
    trainer = config.trainer
    if trainer.get("remove_previous_ckpt_in_save"):
        return 1
    limits = [trainer.get("max_actor_ckpt_to_keep")]
    if OmegaConf.select(config, "critic.enable") or OmegaConf.select(config, "algorithm.adv_estimator") == "gae":
        limits.append(trainer.get("max_critic_ckpt_to_keep"))
    # verl reads whatever is no positive number as "all".
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    if saves_by_time(config) if by_time is None else by_time:
        return max(known, default=KEPT_BY_TIME)
    return max(known) if len(known) == len(limits) else None


def announce_retention(changes: Changes) -> None:
    """List that verl's limits are taken over; `train.checkpoints` reads and changes them when the trainer starts."""
    if not removes_checkpoints(changes.config):
        return
    keep = num_kept_checkpoints(changes.config)
    kept = (
        "all of them, because not every model has a limit"
        if keep is None
        else f"the {keep} newest"
        if keep > 1
        else "the newest"
    )
    why = (
        "the trainer of the flag removes old checkpoints by itself, actor and critic together, once a newer one is "
        f"whole; it keeps {kept}"
    )
    for key, value in KEEP_ALL.items():
        changes.announce(key, value, why)
