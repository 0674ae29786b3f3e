"""A prompt whose agent loop does not return is named in the log while batches fill from others."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from partial_rollout.core.queue.tail import Partial, TailPolicy, Wait
from partial_rollout.runtime import prompt_manager
from partial_rollout.runtime.prompt_manager import RolloutPromptManager
from partial_rollout.settings.block import PartialRolloutConfig, TimeoutConfig
from tests.unit.core.queue.queues import ManualClock, prompts, trajectories

BATCH_S = 100.0
STEP_S = 30.0
BATCH = 2


class Steps:
    """Training steps of `STEP_S` each, in which prompt `p0` never ends."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.manager = RolloutPromptManager(Partial(4), 9, self.clock, batch_s=BATCH_S)
        self.num_admitted = 0

    async def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            num_fresh = (await self.manager.begin_round()).num_fresh
            uids = [f"p{index}" for index in range(self.num_admitted, self.num_admitted + num_fresh)]
            await self.manager.admit(prompts(*uids))
            self.num_admitted += num_fresh
            for claim in await self.manager.claim("w3", 100, 0):
                if claim.uid != "p0":
                    await self.manager.finish_many([(claim, trajectories(claim.uid))])
            self.clock.now_s += STEP_S
            assert len((await self.manager.take_batch(BATCH, 0)).groups) == BATCH


@pytest.fixture(autouse=True)
def _warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a library has done to the root logger."""
    caplog.set_level(logging.WARNING)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_prompt_that_never_ends_is_warned_of_once_with_its_worker_and_age(caplog: pytest.LogCaptureFixture):
    steps = Steps()
    await steps.run(3)
    assert warnings(caplog) == []
    await steps.run(20)
    (message,) = warnings(caplog)
    assert "prompt 'p0' is ongoing at worker 'w3' for 120.0 s" in message
    assert "partial_rollout.timeouts.batch_s=100" in message
    assert (await steps.manager.statistics()).oldest_ongoing_uid == "p0"


async def test_a_later_claim_of_the_prompt_is_warned_of_again(caplog: pytest.LogCaptureFixture):
    steps = Steps()
    await steps.run(4)
    await steps.manager.fence_worker("w3")
    await steps.manager.release_worker("w3")
    await steps.run(3)
    assert len(warnings(caplog)) == 1
    await steps.run(1)
    first, second = warnings(caplog)
    assert "'w3' for 120.0 s (attempt 1;" in first
    assert "'w3' for 120.0 s (attempt 2;" in second


async def test_the_limit_of_a_job_is_its_longest_wait_for_a_batch(monkeypatch: pytest.MonkeyPatch):
    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_, **given: given))
    monkeypatch.setattr(prompt_manager.ray, "remote", lambda _: options)
    given: Any = prompt_manager.create_manager(PartialRolloutConfig(timeouts=TimeoutConfig(batch_s=5.0)), BATCH)
    assert given["batch_s"] == 5.0


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (Wait(4), "an admitted prompt is trained or dropped within 1 steps"),
        (Partial(4), "there is no limit to the steps after which an admitted prompt is trained or dropped"),
    ],
)
def test_how_long_a_prompt_may_take_is_a_sentence(policy: TailPolicy, told: str):
    assert prompt_manager.describe_bound(policy) == told
