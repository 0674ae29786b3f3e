"""Where a segment ends, with vLLM's own collector: whatever waits in it when a request is cut was sampled before."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from partial_rollout.rollout.gated_engine import EngineRequest, KeptRequests
from tests.fake_engine import output


def request(*, may_stay: bool = True, has_tokens: bool = False) -> EngineRequest:
    return EngineRequest(RequestOutputCollector(RequestOutputKind.DELTA, "a-1"), may_stay, has_tokens)


async def segment(of: EngineRequest) -> tuple[list[int], str | None, list]:
    counted = []
    merged = await of.segment(counted.append)
    (completion,) = merged.outputs
    assert sum(counted) == len(completion.token_ids)
    return completion.token_ids, completion.finish_reason, completion.logprobs


async def test_tokens_that_wait_when_a_request_is_cut_are_of_the_segment_before():
    cut = request()
    cut.queue.put(output([5], logprobs=["of 5"]))
    assert cut.cut()
    assert await segment(cut) == ([5], "abort", ["of 5"])
    cut.is_cut = False
    cut.queue.put(output([6], logprobs=["of 6"]))
    cut.queue.put(output([7], "stop", logprobs=["of 7"]))
    assert await segment(cut) == ([6, 7], "stop", ["of 6", "of 7"])


async def test_log_probs_that_an_abort_repeats_belong_to_no_token():
    left = request()
    left.queue.put(output([5], logprobs=["of 5"]))
    left.queue.put(output([], "abort", logprobs=["of 5"]))
    assert await segment(left) == ([5], "abort", ["of 5"])


async def test_a_request_is_cut_again_before_it_has_got_further():
    cut = request(has_tokens=True)
    for _ in range(2):
        assert cut.cut()
        assert await segment(cut) == ([], "abort", [])


async def test_a_request_that_has_ended_is_not_cut():
    ended = request()
    ended.queue.put(output([5], "stop", logprobs=["of 5"]))
    assert ended.cut()
    assert not ended.is_cut
    assert await segment(ended) == ([5], "stop", ["of 5"])


async def test_a_dead_engine_is_told_to_whoever_waits():
    dead = request(has_tokens=True)
    dead.queue.put(EngineDeadError())
    assert dead.cut()
    assert not dead.is_cut
    with pytest.raises(EngineDeadError):
        await dead.segment(print)


@pytest.mark.parametrize(("may_stay", "has_tokens"), [(False, True), (True, False)])
def test_what_is_not_worth_keeping_is_not_cut(may_stay, has_tokens):
    leaves = request(may_stay=may_stay, has_tokens=has_tokens)
    assert not leaves.cut()
    assert leaves.queue.output is None


def test_an_output_without_tokens_is_nothing_to_keep():
    leaves = request()
    leaves.queue.put(output([]))
    assert not leaves.cut()


def test_only_a_kept_request_that_somebody_is_here_for_stays():
    kept = KeptRequests()
    kept.keep(stays := request())
    with kept.claimed("a-1"), kept.claimed(None):
        assert kept.drop_unclaimed() == []
        assert kept.take("a-1") is stays
        assert kept.take("a-1") is kept.take(None) is None
    kept.keep(stays)
    assert kept.drop_unclaimed() == ["a-1"]
    assert len(kept) == 0
