"""The resuming client with a fake balancer and a server that follows a script."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("vllm")

from ray.exceptions import ActorDiedError
from verl.workers.rollout.replica import TokenOutput

from partial_rollout.core.interrupt import Context, Retained
from partial_rollout.core.resume import ResumableGeneration, Segment
from partial_rollout.errors import ActorLost, ConfigError, EngineDead, EngineError, ResumeStalled, RunEnded
from partial_rollout.rollout.client import ResumingLLMServerClient


def remote(function):
    """An actor method whose `.remote` answers with an awaitable."""

    async def call(**kwargs):
        return function(**kwargs)

    return SimpleNamespace(remote=call)


def raising(error):
    def call(**_):
        raise error

    return call


def answer(tokens, stop_reason, *, version=1, openings=0, **fields):
    fields = {"retained": None, "context": Context(version, "abort")} | fields
    fields |= {"global_steps": version, "gate_openings": openings}
    return TokenOutput(
        token_ids=tokens, log_probs=[-1.0] * len(tokens), stop_reason=stop_reason, extra_fields=fields, num_preempted=1
    )


class Script:
    """A server that gives prepared answers and keeps the requests."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.requests = []
        self.generate = remote(self._generate)

    def _generate(self, **request):
        self.requests.append(request)
        item = self.answers.pop(0)
        if isinstance(item, Exception):
            raise item
        return item


def make_client(script, *, response_length=8, prompt_length=4, max_model_len=None):
    rollout = SimpleNamespace(
        name="vllm", response_length=response_length, prompt_length=prompt_length, max_model_len=max_model_len
    )
    client = ResumingLLMServerClient(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
    released = []

    def note_release(**kwargs):
        released.append(kwargs["server_id"])

    client._load_balancer = SimpleNamespace(
        require_acquire_fields=remote(list),
        require_release_fields=remote(list),
        acquire_server=remote(lambda request_id: ("server-7", script)),
        release_server=SimpleNamespace(remote=note_release),
    )
    client.released = released
    return client


async def generate(client, params=None, prompt=(1, 2, 3), **inputs):
    return await client.generate(
        "q", prompt_ids=list(prompt), sampling_params={} if params is None else params, **inputs
    )


async def test_segments_are_stitched_and_accounted():
    script = Script(
        answer([5, 6], "aborted", version=1, openings=0, num_cached_tokens=2),
        answer([7], "aborted", version=2, openings=1, num_cached_tokens=0),
        answer([8], "completed", version=2, openings=2),
    )
    client = make_client(script)
    output = await generate(client, {"logprobs": True}, image_data=["picture"])
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([5, 6, 7, 8], [-1.0] * 4, "completed")
    assert output.num_preempted == 3
    assert output.extra_fields == {
        "global_steps": 2,
        "min_global_steps": 1,
        "max_global_steps": 2,
        "num_interruptions": 2,
        "num_reprefilled_tokens": 5 + 6,
        "version_spans": [[1, 2], [2, 2]],
        "context_spans": [[1, "fresh", 2], [2, "abort", 2]],
        "num_cached_tokens": 2,
    }
    assert [request["prompt_ids"] for request in script.requests] == [[1, 2, 3], [1, 2, 3, 5, 6], [1, 2, 3, 5, 6, 7]]
    assert [request["sampling_params"]["max_tokens"] for request in script.requests] == [8, 6, 5]
    assert [request.get("is_resumption", False) for request in script.requests] == [False, True, True]
    assert {request["image_data"][0] for request in script.requests} == {"picture"}
    assert client.released == ["server-7"] * 3


class Letters:
    """A tokenizer without a fast backend: token 5 is `f`, and so on."""

    is_fast = False
    all_special_ids = all_special_tokens = ()

    def convert_ids_to_tokens(self, ids, skip_special_tokens=False):
        return [chr(97 + each) for each in ids]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def get_added_vocab(self):
        return {}

    def __len__(self):
        return 26


async def test_a_stop_string_over_two_segments_cuts_the_response_with_all_that_belongs_to_its_tokens():
    def experts(num_tokens):
        return np.arange(num_tokens)

    script = Script(
        answer([5, 6], "aborted").model_copy(update={"routed_experts": experts(5)}),
        answer([7, 8, 9], "completed", openings=1).model_copy(update={"routed_experts": experts(8)}),
    )
    client = make_client(script)
    client.stop_tokenizer = Letters()
    output = await generate(client, {"stop": "gh", "logprobs": True})
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([5, 6, 7], [-1.0] * 3, "completed")
    assert output.routed_experts.tolist() == list(range(6))
    assert output.extra_fields["version_spans"] == [[1, 3]]
    assert {request["sampling_params"]["stop"] for request in script.requests} == {"gh"}


async def test_a_stop_string_that_only_the_engine_saw_is_passed_over():
    script = Script(
        answer([5, 6], "aborted"),
        answer([7], "completed", openings=1, stop_string="ab"),
        answer([0, 1], "completed", openings=1, stop_string="ab"),
    )
    client = make_client(script)
    client.stop_tokenizer = Letters()
    assert (await generate(client, {"stop": ["ab"]})).token_ids == [5, 6, 7, 0, 1]


async def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ConfigError, match=r"stop='x' needs the model's tokenizer"):
        await generate(make_client(Script()), {"stop": "x"})


async def test_the_callers_parameters_are_not_touched():
    params = {"max_new_tokens": 5, "min_tokens": 3, "seed": 11}
    script = Script(answer([5, 6], "aborted"), answer([7], "completed", openings=1))
    await generate(make_client(script), params)
    assert params == {"max_new_tokens": 5, "min_tokens": 3, "seed": 11}
    sent = [request["sampling_params"] for request in script.requests]
    assert sent == [{"max_tokens": 5, "min_tokens": 3, "seed": 11}, {"max_tokens": 3, "min_tokens": 1, "seed": 13}]


@pytest.mark.parametrize(
    ("params", "prompt_len", "max_model_len", "budget"),
    [
        ({}, 3, None, 8),
        ({}, 6, None, 6),
        ({}, 30, None, 1),
        ({"max_tokens": 20}, 3, None, 20),
        ({"max_tokens": 20}, 3, 10, 7),
    ],
)
async def test_the_budget_is_the_servers_own_default_within_the_context(params, prompt_len, max_model_len, budget):
    script = Script(answer([], "completed"))
    await generate(make_client(script, max_model_len=max_model_len), params, [1] * prompt_len)
    assert script.requests[0]["sampling_params"]["max_tokens"] == budget


async def test_a_rejected_request_ends_with_run_ended():
    with pytest.raises(RunEnded, match="server-7"):
        await generate(make_client(Script(answer([], "aborted", rejected=True))))


async def test_a_lost_server_is_named():
    with pytest.raises(EngineDead, match="server-7"):
        await generate(make_client(Script(ActorDiedError())))


async def test_a_lost_load_balancer_is_not_taken_for_the_server_before():
    client = make_client(Script(answer([5], "aborted"), answer([6], "completed", openings=1)))
    answers = [client._load_balancer.acquire_server, remote(raising(ActorDiedError()))]
    client._load_balancer.acquire_server = SimpleNamespace(remote=lambda **asked: answers.pop(0).remote(**asked))
    with pytest.raises(ActorLost, match="the load balancer died when request 'q' asked"):
        await generate(client)


async def test_interruptions_that_lead_nowhere_are_an_error():
    with pytest.raises(ResumeStalled):
        await generate(make_client(Script(answer([], "aborted"), answer([], "aborted"))))


async def test_a_request_that_the_engine_gave_up_is_no_response():
    with pytest.raises(EngineError, match="ended a request with 'error' after 1 of 8 tokens"):
        await generate(make_client(Script(answer([5], "aborted"), answer([6], "error", openings=1))))


async def test_what_cannot_be_resumed_exactly_is_refused():
    with pytest.raises(ConfigError, match="presence_penalty=0.5"):
        await generate(make_client(Script()), {"presence_penalty": 0.5})


async def test_many_generations_share_a_client():
    outputs = await asyncio.gather(
        *(
            generate(make_client(Script(answer([i], "aborted"), answer([i], "completed", openings=1))))
            for i in range(20)
        )
    )
    assert [output.token_ids for output in outputs] == [[i, i] for i in range(20)]


async def test_every_request_waits_for_leave_and_keeps_its_tokens_meanwhile():
    script = Script(answer([5], "aborted"), answer([6], "completed", openings=1))
    client, leave, asked = make_client(script), asyncio.Event(), []

    async def before_segment():
        asked.append(len(script.requests))
        if script.requests:
            await leave.wait()

    client.before_segment = before_segment
    task = asyncio.create_task(generate(client))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (asked, len(script.requests)) == ([0, 1], 1)
    leave.set()
    assert (await task).token_ids == [5, 6]


async def test_a_new_generation_may_be_given_tokens_to_go_on_from():
    saved = ResumableGeneration([1, 2, 3], 8, settings="max_tokens=8")
    saved.add(Segment([5, 6], [-1.0, -1.0], "aborted", version=1, openings=0, context=Context(1, "fresh")))
    script = Script(answer([7], "completed", version=4))
    client = make_client(script)
    client.on_generation = lambda generation: generation.adopt(saved.state())
    output = await generate(client)
    assert (output.token_ids, output.log_probs) == ([5, 6, 7], [-1.0] * 3)
    assert output.extra_fields["version_spans"] == [[1, 2], [4, 1]]
    assert output.extra_fields["context_spans"] == [[1, "fresh", 2], [4, "abort", 1]]
    assert script.requests[0]["prompt_ids"] == [1, 2, 3, 5, 6]
    assert script.requests[0]["is_resumption"] is True


async def test_every_segment_is_told_before_it_is_added_with_its_server():
    told = []
    client = make_client(Script(answer([5], "aborted"), answer([6, 7], "completed", openings=1, version=2)))
    client.on_segment = lambda generation, segment, server, seconds: told.append(
        (generation.context_len, segment.token_ids, segment.version, server, seconds >= 0)
    )
    await generate(client)
    assert told == [(3, [5], 1, "server-7", True), (4, [6, 7], 2, "server-7", True)]


async def test_every_server_is_told_before_the_request_goes_there():
    script = Script(answer([5], "aborted"), answer([6, 7], "completed", openings=1, version=2))
    client, told = make_client(script), []
    client.on_server = lambda server: told.append((server, len(script.requests)))
    await generate(client)
    assert told == [("server-7", 0), ("server-7", 1)]


async def test_what_an_interrupted_request_has_left_behind_goes_with_the_next_one_only():
    left = [Retained("salt", 1, "kept-1"), Retained("salt", 1, "kept-2")]
    script = Script(
        answer([5], "aborted", retained=left[0]),
        answer([6], "aborted", openings=1, retained=left[1], context=Context(1, "keep_kv", num_reused_tokens=4)),
        answer([7], "aborted", openings=2, context=Context(1, "keep_kv", num_reused_tokens=5)),
        answer([8], "completed", openings=3),
    )
    output = await generate(make_client(script))
    assert [request.get("retained") for request in script.requests] == [None, *left, None]
    assert output.extra_fields["context_spans"] == [[1, "fresh", 1], [1, "keep_kv", 2], [1, "abort", 1]]
    assert output.extra_fields["num_reprefilled_tokens"] == 6
    assert not output.extra_fields.keys() & {"retained", "context"}


SAMPLING = {"logprobs": True, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_tokens": 1, "stop_token_ids": [7]}


@pytest.mark.parametrize(
    ("change", "adopted"),
    [({"max_tokens": 8, "seed": 3}, True), ({"max_tokens": 9}, False)]
    + [
        ({key: value}, False)
        for key, value in {
            "logprobs": False,
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": -1,
            "min_tokens": 2,
            "stop_token_ids": [8],
        }.items()
    ],
)
async def test_tokens_sampled_with_other_settings_are_not_adopted(change, adopted):
    seen = []
    client = make_client(Script(answer([5, 6], "completed"), answer([9], "completed")))
    client.on_generation = seen.append
    await generate(client, SAMPLING)
    client.on_generation = lambda generation: seen.append(generation.adopt(seen[0].state()))
    await generate(client, SAMPLING | change)
    assert seen[1] is adopted


async def adopted(saved, *later):
    """Whether generations with these inputs go on from the tokens of one with those of `saved`."""
    generations, answers = [], []
    client = make_client(Script(*(answer([5, 6], "completed") for _ in (saved, *later))))
    client.on_generation = generations.append
    await generate(client, SAMPLING, **saved)
    client.on_generation = lambda generation: answers.append(generation.adopt(generations[0].state()))
    for inputs in later:
        await generate(client, SAMPLING, **inputs)
    return answers


def video(last):
    """A video as verl hands it over."""
    return [(torch.tensor([[1.0, 2.0], [3.0, last]]), {"fps": 2.0})]


@pytest.mark.parametrize(
    ("seen", "value", "equal", "other"),
    [
        ("image_data", *([Image.new("RGB", (2, 2), color)] for color in ("red", "red", "blue"))),
        ("video_data", video(4.0), video(4.0), video(5.0)),
        ("audio_data", *([(np.array([1.0, last]), 16_000)] for last in (2.0, 2.0, 3.0))),
        ("mm_processor_kwargs", {"max_pixels": 1}, {"max_pixels": 1}, {"max_pixels": 2}),
    ],
)
async def test_tokens_sampled_on_another_picture_are_not_adopted(seen, value, equal, other):
    assert await adopted({seen: value}, {seen: equal}, {seen: other}, {seen: None}) == [True, False, False]


async def test_what_says_that_there_is_no_picture_changes_nothing():
    nothing = {"image_data": None, "video_data": None, "audio_data": None, "mm_processor_kwargs": {}}
    assert await adopted({}, nothing) == [True]
