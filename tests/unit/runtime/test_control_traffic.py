"""What a worker sends to the manager for a finished group has the same size whatever the length of its responses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ray import cloudpickle

from partial_rollout.agent_loop.event_texts import EventTexts
from partial_rollout.agent_loop.limits import PhaseLimits
from partial_rollout.agent_loop.rollout_log import WorkerLog
from partial_rollout.agent_loop.trajectory import Trajectories
from partial_rollout.agent_loop.worker import PartialRolloutAgentLoopWorker
from partial_rollout.observability.events import EventWriter
from partial_rollout.runtime.heartbeat import Pulse
from partial_rollout.types import Claim

GROUP = 4
INT_BYTES = 8
"""A longer response has a longer length, as an integer."""
CLAIM = Claim("a", claim_id=1, worker_id="w0", num_trajectories=GROUP, global_step=1, attempt=1)


class Worker(PartialRolloutAgentLoopWorker):
    """The real worker around an agent loop that has nothing to do."""

    def __init__(self, response_len: int) -> None:
        self._response_len = response_len
        self._trajectories, self._events, self._limits = Trajectories(), EventWriter(None, "w0"), PhaseLimits({})
        self._texts, self._log = EventTexts(None, 0), WorkerLog("w0", 60.0)
        self._pulse = Pulse(lambda count: None, claim_s=300.0)
        self.rollout_config: Any = SimpleNamespace(
            temperature=1.0, top_p=1.0, top_k=-1, calculate_log_probs=True, prompt_length=64
        )

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        tokens = list(range(self._response_len))
        versions = {"min_global_steps": 3, "max_global_steps": 4}
        return [
            SimpleNamespace(
                prompt_ids=[1, 2],
                response_ids=tokens,
                response_mask=tokens,
                response_logprobs=[float(token) for token in tokens],
                extra_fields=versions,
            )
        ]


async def finish_many_payload_bytes(response_len: int) -> int:
    worker = Worker(response_len)
    outcomes = [await worker.generate(CLAIM, {"index": 0}, session) for session in range(GROUP)]
    summaries = [summary for outcome in outcomes for summary in outcome]
    assert [summary.response_len for summary in summaries] == [response_len] * GROUP
    return len(cloudpickle.dumps([(CLAIM, summaries)]))


async def test_a_report_does_not_grow_with_the_response_length() -> None:
    short, long = await finish_many_payload_bytes(10), await finish_many_payload_bytes(100_000)
    assert long - short <= GROUP * INT_BYTES
