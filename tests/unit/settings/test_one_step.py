"""A batch that is one optimizer step needs no old log-probs: verl's loss that weighs tokens by the log-probs of the
update itself has the gradient of the usual one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.config import omega_conf_to_dataclass

from partial_rollout.settings.by_hand import ByHand
from partial_rollout.settings.prepare import prepare

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from verl.workers.config import ActorConfig

    from tests.unit.settings.support import Composed

CORRECTION = "algorithm.rollout_correction"
USUAL = [f"{CORRECTION}.bypass_mode=False"]
NUM_ROWS, NUM_TOKENS = 8, 32
HIGHEST = -0.01


class Batch:
    """Tokens of one optimizer step: log-probs of the trained weights, and of those that sampled them."""

    def __init__(self) -> None:
        """Drawn anew, always the same; about a third of the weights is cut at 2."""
        draw = torch.Generator().manual_seed(0)
        shape = (NUM_ROWS, NUM_TOKENS)
        trained = (torch.randn(shape, generator=draw) - 2).clamp(max=HIGHEST)
        self.sampled = (trained + torch.randn(shape, generator=draw)).clamp(max=HIGHEST)
        self.trained = trained.requires_grad_()
        self.mask = (torch.rand(shape, generator=draw) < 0.8).float()
        self.advantages = torch.randn(shape, generator=draw)

    def gradient(self, actor: ActorConfig, old: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Gradient of the loss that this configuration has."""
        actor.global_batch_info.update(
            dp_size=1, batch_num_tokens=self.mask.sum(), global_batch_size=NUM_ROWS, loss_scale_factor=None
        )
        loss_of: Any = get_policy_loss_fn(actor.policy_loss.loss_mode)
        loss, _ = loss_of(
            old_log_prob=old, log_prob=self.trained, advantages=self.advantages, response_mask=self.mask,
            loss_agg_mode=actor.loss_agg_mode, config=actor, rollout_is_weights=weights,
        )  # fmt: skip
        return torch.autograd.grad(loss, self.trained)[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What a run can know of a model without dropout."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def actor_of(composed: Composed, changes: dict[str, Any], typed: Sequence[str] = ()) -> ActorConfig:
    """The actor's configuration as a training rank has it."""
    config = composed(changes)
    OmegaConf.update(config, "async_training.partial_rollout", True, force_add=True)
    config = prepare(config, ByHand.read(typed)).config
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


@pytest.mark.parametrize(("bound", "typed"), [(2.0, []), (1.1, []), (2.0, [f"{CORRECTION}.rollout_is=null"])])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_gradient_is_that_of_the_usual_loss_to_the_last_bit(
    composed: Composed, model: Path, bound: float, typed: list[str], aggregation: str
) -> None:
    shared = {f"{CORRECTION}.rollout_is_threshold": bound, "actor_rollout_ref.actor.loss_agg_mode": aggregation}
    shared |= {f"{CORRECTION}.rollout_is": None, "actor_rollout_ref.model.path": str(model)}
    usual, weighed = actor_of(composed, shared, [*USUAL, *typed]), actor_of(composed, shared, typed)
    assert (usual.policy_loss.loss_mode, weighed.policy_loss.loss_mode) == ("vanilla", "bypass_mode")
    batch = Batch()
    old, weights = batch.trained.detach(), None
    if not typed:
        found: Any = compute_rollout_correction_and_rejection_mask(
            old_log_prob=old, rollout_log_prob=batch.sampled, response_mask=batch.mask, rollout_is="token",
            rollout_is_threshold=bound,
        )  # fmt: skip
        weights = found[0].batch["rollout_is_weights"]
    expected = batch.gradient(usual, old, weights)
    assert expected.abs().max() > 0
    assert torch.equal(batch.gradient(weighed, batch.sampled, None), expected)
    # What the other loss of bypass_mode does is something else.
    assert not torch.equal(batch.gradient(usual, batch.sampled, None), expected)
