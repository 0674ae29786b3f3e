"""Who removes old checkpoints: `train.checkpoints`, with verl's numbers, where it can reach all files; else verl."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omegaconf import OmegaConf

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from partial_rollout.settings.changes import Changes

KEEP_ALL = {
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.max_critic_ckpt_to_keep": None,
    "trainer.remove_previous_ckpt_in_save": False,
}
"""verl's keys, with the values at which verl removes nothing."""


def removes_checkpoints(config: DictConfig) -> bool:
    """Whether this package removes old checkpoints: on one node, where verl's save has ended when its call returns."""
    saves_later = OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.async_save")
    return not saves_later and config.trainer.nnodes == 1


def num_kept_checkpoints(config: DictConfig) -> int | None:
    """The larger of verl's two limits, since a checkpoint is removed as a whole; None: one of them keeps all."""
    trainer = config.trainer
    if trainer.get("remove_previous_ckpt_in_save"):
        return 1
    limits = [trainer.get("max_actor_ckpt_to_keep")]
    if OmegaConf.select(config, "critic.enable") or OmegaConf.select(config, "algorithm.adv_estimator") == "gae":
        limits.append(trainer.get("max_critic_ckpt_to_keep"))
    # verl reads whatever is no positive number as "all".
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
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
