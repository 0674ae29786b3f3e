"""verl's replay buffers with a short poll, so that its 2 s default does not decide a comparison of 2 s steps."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_INTERVAL_S = 0.05


class FastPollReplayBuffer(ReplayBuffer):
    """verl's `sync` buffer, polling every 50 ms."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_INTERVAL_S)


class FastPollReplayBufferAsync(ReplayBufferAsync):
    """verl's asynchronous buffer, polling every 50 ms."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_INTERVAL_S)
