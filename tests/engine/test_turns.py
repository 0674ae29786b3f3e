"""An agent that calls a tool between its turns, on a real engine: interrupted, saved, restarted, and the same."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.types import Claim, PromptMeta, QueueSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from partial_rollout.agent_loop.worker import PartialRolloutAgentLoopWorker
    from partial_rollout.rollout.engine_process import RolloutStatistics
    from tests.engine.conftest import EngineUnderTest

pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7, 8, 9]
NUM_TURNS = 4
TURN = {"temperature": 0.0, "logprobs": True, "ignore_eos": True, "max_tokens": 120}
NUM_SAID = NUM_TURNS * TURN["max_tokens"]
HALF_A_TURN = 60
"""Tokens after which the first turn is interrupted: their KV fills a block."""
WAIT_S = 120.0
"""Bound of each wait: far more than all turns take."""
LOG_PROB_TOLERANCE = 1e-4
ROLLOUT = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "calculate_log_probs": True}


@pytest.fixture(scope="module")
def engine(engine_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """A replica that may keep requests, or their KV."""
    from tests.engine import support
    from tests.engine.conftest import run_engine

    path = tmp_path_factory.mktemp("turns")
    support.make_model(path, seed=0)
    mode = {"+actor_rollout_ref.rollout.custom.partial_rollout.tail.interrupt_mode": "keep_kv"}
    yield from run_engine(path, support.make_config(path, **mode), replica_rank=7)


class ToolAgent:
    """Says something, lets a tool answer, goes on after the answer; the tool takes as long as the test wants."""

    def __init__(self) -> None:
        self.output: Any = None
        self.num_tool_calls = 0
        self.tool_runs, self.tool_may_end = asyncio.Event(), asyncio.Event()

    async def run(self, client: Any) -> Any:
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

        ids, mask, log_probs = list(PROMPT), [], []
        for turn in range(NUM_TURNS):
            said = await client.generate(f"turn-{turn}", prompt_ids=ids, sampling_params=dict(TURN))
            heard = await self._call_tool(said.token_ids) if turn < NUM_TURNS - 1 else []
            ids = [*ids, *said.token_ids, *heard]
            mask += [1] * len(said.token_ids) + [0] * len(heard)
            log_probs += [*said.log_probs, *(0.0 for _ in heard)]
        self.output = AgentLoopOutput(
            prompt_ids=PROMPT,
            response_ids=ids[len(PROMPT) :],
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=2 * NUM_TURNS,
            metrics=AgentLoopMetrics(),
        )
        return [self.output]

    async def _call_tool(self, said: list[int]) -> list[int]:
        """Tokens that depend on all that was said."""
        self.num_tool_calls += 1
        self.tool_runs.set()
        await asyncio.wait_for(self.tool_may_end.wait(), WAIT_S)
        return [10 + sum(said) % 50, 10 + sum(said[::2]) % 50, 11]


@pytest.fixture
def make_worker(
    engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ToolAgent], PartialRolloutAgentLoopWorker]:
    """The real worker, with the real engine's client, around a scripted agent."""
    from partial_rollout.agent_loop import worker as worker_module
    from partial_rollout.rollout.client import ResumingLLMServerClient
    from tests.engine import support

    def verls_constructor(self: Any) -> None:
        self.llm_client = ResumingLLMServerClient(engine.config, support.make_router(engine.replica))
        self.config, self.tokenizer = OmegaConf.create({"algorithm": {}}), None
        self.reward_loop_worker_handles = None
        self.rollout_config = SimpleNamespace(
            **ROLLOUT, enable_rollout_routing_replay=False, agent=SimpleNamespace(num_workers=1)
        )

    monkeypatch.setattr(worker_module.AgentLoopWorkerTQBase, "__init__", verls_constructor)
    monkeypatch.setattr(worker_module, "find_manager", lambda: None)
    monkeypatch.setattr(worker_module, "report_to", lambda writer: None)

    def make(agent: ToolAgent) -> PartialRolloutAgentLoopWorker:
        worker: Any = worker_module.PartialRolloutAgentLoopWorker("worker-0", PartialRolloutConfig(events=None), 4)

        async def run_agent_loop(*args: Any, **kwargs: Any) -> Any:
            return await agent.run(worker.llm_client)

        worker._run_agent_loop = run_agent_loop
        return worker

    return make


def start(worker: PartialRolloutAgentLoopWorker, *, goes_on: bool = False) -> asyncio.Task[Any]:
    claim = Claim("a", 1, "worker-0", num_trajectories=1, global_step=1, attempt=1, goes_on=goes_on)
    return asyncio.create_task(worker.generate(claim, {"index": 0}, 0))


async def statistics(engine: EngineUnderTest) -> RolloutStatistics:
    return (await engine.replica.statistics())[0]


async def until_parked(engine: EngineUnderTest) -> None:
    from tests.engine import support

    await support.until(engine.replica, lambda now: now.gate.parked == 1)


async def resume_and_interrupt(engine: EngineUnderTest, agent: ToolAgent, num_tokens: int = 1) -> bool:
    """Called while a turn waits at the closed gate; true: it waits there again, with tokens, and not a later turn."""
    from tests.engine import support

    num_tool_calls = agent.num_tool_calls
    await support.begin_interruptions(engine.replica, [num_tokens], opens=True, stays_closed=True)
    aborted = await support.end_interruptions(engine.replica)
    await support.until(engine.replica, lambda now: now.gate.parked == 1 or agent.num_tool_calls > num_tool_calls)
    if agent.num_tool_calls > num_tool_calls:
        return False
    assert aborted == [1]
    return True


def stored(saved: Any, folder: Path) -> Any:
    """What a restarted run reads of what this one writes."""
    from partial_rollout.train.queue_checkpoint import load_tokens, save_tokens

    config = OmegaConf.create({"trainer": {"default_local_dir": str(folder), "resume_mode": "auto"}})
    save_tokens(saved, config, 1)
    return load_tokens(QueueSnapshot(pending=(PromptMeta("a", 1, 1),)), config, 1)


def assert_same(output: Any, reference: Any) -> None:
    assert output.response_ids == reference.response_ids
    assert output.response_mask == reference.response_mask
    assert output.response_logprobs == pytest.approx(reference.response_logprobs, abs=LOG_PROB_TOLERANCE)


@pytest.mark.parametrize("mode", ["abort", "reuse_kv", "keep_kv"])
async def test_a_conversation_with_a_tool_is_the_same_over_interruptions_a_checkpoint_and_a_restart(
    engine, make_worker, tmp_path, mode
):
    from tests.engine import support

    await support.set_interrupt_mode(engine.replica, mode)
    undisturbed = ToolAgent()
    undisturbed.tool_may_end.set()
    await asyncio.wait_for(start(make_worker(undisturbed)), WAIT_S)
    assert sum(undisturbed.output.response_mask) == NUM_SAID
    assert undisturbed.output.response_mask.count(0) == (NUM_TURNS - 1) * 3

    # In the middle of a turn; then while the tool runs, so that the next turn meets a closed gate.
    async def interrupted() -> Any:
        agent = ToolAgent()
        worker = make_worker(agent)
        await engine.replica.abort_all_requests()  # the first turn waits for the test too
        task = start(worker)
        await until_parked(engine)
        read_before = (await statistics(engine)).num_reprefilled_tokens
        saved = None
        if await resume_and_interrupt(engine, agent, HALF_A_TURN):
            assert (await statistics(engine)).kept == (mode == "keep_kv")
            await engine.replica.resume_generation()
            await asyncio.wait_for(agent.tool_runs.wait(), WAIT_S)
            read_again = (await statistics(engine)).num_reprefilled_tokens - read_before
            least, most = {
                "abort": (len(PROMPT) + HALF_A_TURN, len(PROMPT) + NUM_SAID),
                "reuse_kv": (1, support.BLOCK_SIZE),
                "keep_kv": (0, 0),
            }[mode]
            assert least <= read_again <= most
            await engine.replica.abort_all_requests()
            agent.tool_may_end.set()
            await until_parked(engine)
            if await resume_and_interrupt(engine, agent):
                saved = stored(await worker.tokens_in_flight(frozenset()), tmp_path)
        # The run ends in the middle of a turn.
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.replica.reject_parked()
        assert agent.output is None
        return saved

    saved = await support.in_time(interrupted)
    calls = saved["a_0"]
    assert [call.stop_reason for call in calls][:-1] == ["completed"] * (len(calls) - 1)
    assert len(calls) >= 2
    assert calls[-1].token_ids
    assert calls[-1].stop_reason is None
    assert all(len(call.prompt_ids) == 3 for call in calls[1:])  # what the tool said

    await engine.replica.resume_generation()
    again = ToolAgent()
    again.tool_may_end.set()
    worker = make_worker(again)
    await worker.restore_tokens(saved)
    before = (await statistics(engine)).num_generated_tokens
    (summary,) = await asyncio.wait_for(start(worker, goes_on=True), WAIT_S)
    assert_same(again.output, undisturbed.output)
    assert summary.num_interruptions >= 2
    assert again.num_tool_calls == NUM_TURNS - 1
    num_saved = sum(len(call.token_ids) for call in calls)
    assert (await statistics(engine)).num_generated_tokens - before == NUM_SAID - num_saved
