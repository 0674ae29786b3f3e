"""verl's own buffer and our queue get the same finished groups, and drop the same ones."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1 import replay_buffer as verls
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from partial_rollout.agent_loop.trajectory import Trajectory
from partial_rollout.agent_loop.worker import summaries
from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.tail import Partial
from partial_rollout.errors import ConfigError
from partial_rollout.types import PromptMeta
from tests.fake_worker import make_claim

if TYPE_CHECKING:
    from collections.abc import Sequence

Outputs = list[AgentLoopOutput]
"""What one agent loop returned."""
REWARDS = st.sampled_from([0.0, 1.0, 0.1, 1 / 3, -1.0, float("nan")])


def output(reward: float, accuracy: float) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5],
        response_mask=[1, 1, 1],
        reward_score=reward,
        metrics=AgentLoopMetrics(),
        extra_fields={
            "reward_extra_info": {"acc": accuracy},
            "min_global_steps": 0,
            "max_global_steps": 0,
        },
    )


class Rows:
    """TransferQueue with the rows of finished groups, as verl's worker writes them."""

    def __init__(self, groups: dict[str, Sequence[Outputs]]) -> None:
        self.rows = {
            f"{uid}_{session}_{index}": each
            for uid, sessions in groups.items()
            for session, outputs in enumerate(sessions)
            for index, each in enumerate(outputs)
        }
        self.tags = {uid: {"is_prompt": True, "status": "finished", "global_steps": 1} for uid in groups}
        self.cleared: set[str] = set()

    def kv_list(self) -> dict[str, Any]:
        return {"train": self.tags | {key: {"status": "success"} for key in self.rows}}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        fields = [{name: self.rows[key].as_dict()[name] for name in select_fields} for key in keys]
        return list_of_dict_to_tensordict(fields)

    def kv_clear(self, partition_id: str, keys: list[str]) -> None:
        self.cleared |= set(keys)


def verls_verdict(groups: dict[str, Sequence[Outputs]], metric: str) -> tuple[set[str], dict[float, int], int]:
    """Prompts that verl's asynchronous buffer evicts, their number by metric, and how many it asks for instead."""
    rows, refills = Rows(groups), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verls, "tq", rows)
        buffer = verls.ReplayBufferAsync(
            "colocate_async", cast("Any", {}), None, "drop", cast("Any", {}), 0.0, refills.append, metric
        )
        buffer._sync_metadata_from_transfer_queue()
        evicted, _, num_filtered, metrics = buffer._evict_terminal_groups(
            1, "train", buffer._terminal_eviction_reasons(1, "train")
        )
    assert num_filtered == len(evicted) == len(rows.cleared & groups.keys())
    return evicted, metrics.get(verls.DAPO_FILTERED_REWARD_COUNTS_KEY, {}), len(evicted)


def our_verdict(groups: dict[str, Sequence[Outputs]], metric: str) -> tuple[set[str], dict[float, int], int]:
    queue = PromptQueue(Partial(len(groups)), 1, lambda: 0.0)
    queue.admit([PromptMeta(uid, len(sessions), 1) for uid, sessions in groups.items()])
    evicted = set()
    for claim in queue.claim("w0", 10_000):
        found = [
            each
            for session, outputs in enumerate(groups[claim.uid])
            for each in summaries(Trajectory(claim, session), outputs, metric)
        ]
        if not queue.finish(claim, found):
            evicted.add(claim.uid)
    result = queue.take(len(groups)) if evicted else SimpleNamespace(filtered={}, num_missing=0)
    return evicted, result.filtered, result.num_missing


@st.composite
def finished(draw: st.DrawFn) -> Sequence[Outputs]:
    """A group of one to twelve agent loops with one or two outputs each, often with one reward for all."""
    rewards = REWARDS if draw(st.booleans()) else st.just(draw(REWARDS))
    scored = st.tuples(rewards, rewards).map(lambda pair: output(*pair))
    return draw(st.lists(st.lists(scored, min_size=1, max_size=2), min_size=1, max_size=12))


@given(st.lists(finished(), min_size=1, max_size=4), st.sampled_from(["reward", "acc"]))
@settings(max_examples=100, deadline=None)
def test_our_queue_and_verls_buffer_drop_the_same_groups(drawn: list[Sequence[Outputs]], metric: str) -> None:
    groups = {f"u{number}": sessions for number, sessions in enumerate(drawn)}
    evicted, counts, num_refilled = our_verdict(groups, metric)
    assert (evicted, Counter(counts), num_refilled) == verls_verdict(groups, metric)


def test_a_metric_that_the_reward_does_not_give_ends_the_run_with_what_it_gives() -> None:
    trajectory = Trajectory(make_claim(), 0)
    with pytest.raises(ConfigError, match=r"filter_groups\.metric=accuracy is not allowed.*numbers for \['acc'\]"):
        summaries(trajectory, [output(1.0, 1.0)], "accuracy")
    unscored = output(1.0, 1.0).model_copy(update={"reward_score": None})
    with pytest.raises(ConfigError, match=r"filter_groups\.metric=reward is not allowed: a trajectory has None"):
        summaries(trajectory, [unscored], "reward")
