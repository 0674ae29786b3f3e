"""Old tokens that are trained without a correction are told of once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from omegaconf import OmegaConf

from partial_rollout.train import uncorrected
from partial_rollout.train.uncorrected import UncorrectedTokens


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Without those of other modules: a thread of an earlier test may warn at any time."""
    return [record.getMessage() for record in caplog.records if record.name == uncorrected.logger.name]


def look(shares: list[float], *, calculate_log_probs: bool = True, **correction: Any) -> None:
    """A run whose steps have these shares of stale tokens."""
    rollout = {"calculate_log_probs": calculate_log_probs}
    config = {"algorithm": {"rollout_correction": correction}, "actor_rollout_ref": {"rollout": rollout}}
    tokens = UncorrectedTokens(OmegaConf.create(config))
    for number, share in enumerate(shares, start=1):
        tokens.look(number, {"partial_rollout/stale_token_share": share})


def test_the_first_step_that_trains_stale_tokens_warns_with_their_share(caplog: pytest.LogCaptureFixture):
    look([0.0, 0.257, 0.4], rollout_is=None)
    (text,) = warnings_of(caplog)
    assert "step 2 trains tokens of older weights without a correction: 26 % of its tokens" in text


@pytest.mark.parametrize(
    ("correction", "warns"),
    [
        ({"rollout_is": "token", "rollout_is_threshold": 2.0}, False),
        ({"rollout_is": "token"}, True),
        ({"bypass_mode": True}, False),
        ({"rollout_rs": "token_k1"}, False),
        ({"rollout_is": "token", "rollout_is_threshold": 2.0, "calculate_log_probs": False}, True),
        ({}, True),
    ],
)
def test_a_correction_of_any_kind_says_nothing(caplog: pytest.LogCaptureFixture, correction: dict, warns: bool):
    look([0.0], **correction)
    assert not warnings_of(caplog)
    look([0.5], **correction)
    assert bool(warnings_of(caplog)) == warns
