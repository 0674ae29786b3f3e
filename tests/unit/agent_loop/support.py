"""The agent-loop workers as the trainer sees them, with workers and a prompt manager of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from partial_rollout.agent_loop.manager import PartialRolloutAgentLoopManager
from partial_rollout.settings.block import PartialRolloutConfig

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_workers(
    workers: Sequence[Any] = (),
    *,
    num_workers: int = 2,
    batch: int = 5,
    group: int = 4,
    settings: PartialRolloutConfig | None = None,
    prompt_manager: Any = None,
) -> PartialRolloutAgentLoopManager:
    """With a slot for each trajectory of a batch; no actor is started."""
    rollout = {"n": group, "agent": {"num_workers": num_workers}, "custom": None}
    config = OmegaConf.create(
        {
            "data": {"train_batch_size": batch},
            "actor_rollout_ref": {"rollout": rollout, "model": {}},
            "trainer": {"device": "cpu"},
            "partial_rollout": (settings or PartialRolloutConfig()).to_mapping(),
        }
    )
    made = PartialRolloutAgentLoopManager(config, None, prompt_manager=prompt_manager or SimpleNamespace())
    made.agent_loop_workers = list(workers)
    return made
