"""What the worker actor adds to verl's: which prompts it takes, what it says of trajectories, how validation ends."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from partial_rollout.agent_loop import limits
from partial_rollout.agent_loop import worker as worker_module
from partial_rollout.agent_loop.event_texts import EventTexts
from partial_rollout.agent_loop.limits import PhaseLimits
from partial_rollout.agent_loop.trajectory import CURRENT, Trajectory
from partial_rollout.agent_loop.worker import CountingClient, PartialRolloutAgentLoopWorker, summaries
from partial_rollout.core.interrupt import FRESH, Context
from partial_rollout.core.resume import ResumableGeneration, Segment
from partial_rollout.errors import CallOverdue, ClusterError, DataError, StaleClaim, TooStale
from partial_rollout.observability.events import EventReader, PhaseBegan, RequestSent, SegmentEnded, TrajectoryEnded
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.train.replay_buffer import PartialRolloutReplayBuffer
from partial_rollout.types import VersionSpan
from tests.fake_worker import make_claim
from tests.unit.runtime.virtual_time import settle

SAMPLING = SimpleNamespace(
    temperature=1.0, top_p=1.0, top_k=-1, calculate_log_probs=True, enable_rollout_routing_replay=False
)


class WordTokenizer:
    """One token per word of all that a template could render."""

    def apply_chat_template(
        self, messages, *, tools=None, add_generation_prompt, tokenize, return_dict, system="", **_
    ):
        assert (add_generation_prompt, tokenize, return_dict) == (True, True, False)
        words = [message["content"] for message in messages] + [tool["description"] for tool in tools or []]
        return " ".join([*words, system]).split()


class Tool:
    def __init__(self, name, description):
        self.name = name
        self.tool_schema = SimpleNamespace(model_dump=lambda **_: {"name": name, "description": description})


class Worker(PartialRolloutAgentLoopWorker):
    """The real actor class around nothing."""

    def __init__(self, *, prompt_length=4, tools=(), template_kwargs=None):
        agent = SimpleNamespace(default_agent_loop="tool_agent")
        self.rollout_config = SimpleNamespace(prompt_length=prompt_length, agent=agent)
        self.config = OmegaConf.create({"data": {"apply_chat_template_kwargs": template_kwargs or {}}})
        self.tokenizer = WordTokenizer()
        self.tools = list(tools)
        self.background_tasks = set()


def make_row(words, **fields):
    return {"raw_prompt": [{"role": "user", "content": words}], "index": 3, **fields}


def test_an_agent_loops_arguments_are_the_row_and_what_the_claim_says():
    row = make_row("one two", __rollout_n__=9)
    prepared = Worker().prepare(make_claim("a"), row)
    assert prepared == make_row("one two", agent_name="tool_agent", uid="a", global_steps=1)
    assert "__rollout_n__" in row


def test_a_prompt_longer_than_the_limit_is_refused_with_its_length():
    assert Worker(prompt_length=4).prepare(make_claim(), make_row("1 2 3 4"))
    with pytest.raises(DataError, match=r"prompt of 5 tokens is longer than data\.max_prompt_length=4") as caught:
        Worker(prompt_length=4).prepare(make_claim(), make_row("1 2 3 4 5"))
    assert caught.value.reason == "prompt_too_long"


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({}, 1 + 2 + 3),
        ({"agent_name": "single_turn_agent"}, 1),
        ({"extra_info": {"tool_selection": ["sub"]}}, 1 + 3),
        ({"extra_info": {"tool_selection": ["gone"]}}, 1),
        ({"extra_info": {"tool_selection": []}}, 1 + 2 + 3),
        ({"extra_info": None}, 1 + 2 + 3),
    ],
)
def test_the_tools_that_the_agent_loop_renders_count(fields, num_tokens):
    worker = Worker(prompt_length=0, tools=[Tool("add", "a b"), Tool("sub", "a b c")])
    with pytest.raises(DataError, match=f"prompt of {num_tokens} tokens"):
        worker.prepare(make_claim(), make_row("hello", **fields))


def test_the_users_template_arguments_count():
    worker = Worker(prompt_length=0, template_kwargs={"system": "be very brief"})
    with pytest.raises(DataError, match="prompt of 4 tokens"):
        worker.prepare(make_claim(), make_row("hello"))


def output(num_tokens, **extra):
    return SimpleNamespace(prompt_ids=[1, 2], response_ids=[7] * num_tokens, extra_fields=extra)


def trajectory_of(*calls):
    trajectory = Trajectory(make_claim("a"), 0)
    trajectory.generations += calls
    return trajectory


def test_interruptions_of_a_trajectory_with_several_outputs_are_counted_once():
    call = ResumableGeneration([1, 2], 8)
    call.add(Segment([7] * 5, None, "aborted", 3, 0, Context(3, FRESH)))
    call.add(Segment([7] * 2, None, "completed", 4, 1, Context(4, "abort")))
    spans = (VersionSpan(3, 5), VersionSpan(4, 2))
    first, last = summaries(trajectory_of(call), [output(5), output(2)])
    assert (first.key, last.key) == ("a_0_0", "a_0_1")
    assert (first.num_interruptions, first.num_reprefilled_tokens, first.version_spans) == (0, 0, ())
    assert (last.num_interruptions, last.num_reprefilled_tokens, last.version_spans) == (1, 7, spans)
    assert {(item.min_version, item.max_version) for item in (first, last)} == {(3, 4)}


def test_an_agent_loop_that_asked_somebody_else_reports_verls_versions():
    (only,) = summaries(trajectory_of(), [output(5, min_global_steps=2, max_global_steps=6)])
    assert (only.min_version, only.max_version, only.response_len, only.prompt_len) == (2, 6, 5, 2)


async def test_generate_calls_are_counted_until_they_return_and_all_else_is_the_wrapped_clients():
    ends = asyncio.get_running_loop().create_future()

    async def generate(request_id, *, prompt_ids):
        await ends
        return request_id, prompt_ids

    client = CountingClient(SimpleNamespace(generate=generate, tokenizer="tokenizer"))
    call = asyncio.create_task(client.generate("r", prompt_ids=[1]))
    await settle()
    assert (client.num_in_flight, client.tokenizer) == (1, "tokenizer")
    ends.set_result(None)
    assert await call == ("r", [1])
    assert client.num_in_flight == 0


class ValidatingWorker(Worker):
    """Starts one task per prompt as verl does: nobody awaits them."""

    async def generate_sequences(self, batch):
        for prompt in batch:
            task = asyncio.create_task(prompt)
            self.background_tasks.add(task)
            task.add_done_callback(self.background_tasks.discard)


async def test_validation_raises_what_a_prompt_raised_after_all_have_ended():
    ended = []

    async def prompt(name, error=None):
        await asyncio.sleep(0)
        ended.append(name)
        if error is not None:
            raise error

    await ValidatingWorker().validate([prompt("a"), prompt("b")])
    await ValidatingWorker().validate([])
    with pytest.raises(ConnectionError, match="TransferQueue is gone"):
        await ValidatingWorker().validate([prompt("c", ConnectionError("TransferQueue is gone")), prompt("d")])
    assert ended == ["a", "b", "c", "d"]


@pytest.fixture
async def connected(monkeypatch, tmp_path):
    """A worker by its real constructor, and verl's client as it is given to it."""
    client = SimpleNamespace()

    def verls_constructor(self):
        self.llm_client, self.config = client, OmegaConf.create({"algorithm": {}})
        self.rollout_config = SimpleNamespace(agent=SimpleNamespace(num_workers=2))
        self.reward_loop_worker_handles = None
        self.tokenizer = WordTokenizer()

    monkeypatch.setattr(worker_module.AgentLoopWorkerTQBase, "__init__", verls_constructor)
    monkeypatch.setattr(worker_module, "find_manager", lambda: None)
    monkeypatch.setattr(worker_module, "report_to", lambda writer: None)  # it would stay for later tests
    return PartialRolloutAgentLoopWorker("worker-0", PartialRolloutConfig(events=str(tmp_path)), 4), client


async def test_before_every_segment_a_trajectory_is_held_back_and_ends_if_it_is_too_stale(connected):
    worker, client = connected
    claim, call = make_claim("a"), ResumableGeneration([1], 8)

    async def trajectory():
        CURRENT.set(worker._trajectories.start(claim, 0))
        client.on_generation(call)
        await client.before_segment()
        call.add(Segment([5], [-0.5], "aborted", version=3, openings=0, context=Context(3, FRESH)))
        await worker.hold([], 3)
        await client.before_segment()
        await worker.hold([claim], 4)
        await client.before_segment()

    holds, slots = worker._claim_loop.holds, worker._claim_loop.slots
    assert holds.begin(claim.claim_id)
    slots.reserve(1)
    task = asyncio.create_task(trajectory())
    await asyncio.wait_for(slots.wait_free(4), 60)  # a trajectory that is held back has none
    assert (holds.num_waiting, task.done()) == (1, False)
    assert not holds.begin(claim.claim_id)
    with pytest.raises(TooStale, match="prompt a has tokens of version 3, allowed: 4"):
        await task


async def test_segments_of_trajectories_are_events_and_those_of_validation_are_not(connected, tmp_path):
    worker, client = connected
    call = ResumableGeneration([1, 2], 8)
    parts = [
        Segment([5], [-0.5], "aborted", version=3, openings=0, context=Context(3, FRESH)),
        Segment([6, 7], [-0.5] * 2, "completed", version=4, openings=1, context=Context(3, "reuse_kv", 2)),
    ]

    async def asks_for_tokens():
        for part, seconds in zip(parts, (2.0, 3.0), strict=True):
            client.on_server("server-7")
            client.on_segment(call, part, "server-7", seconds)
            call.add(part)

    async def agent_loop(*args, **kwargs):
        client.on_generation(call)
        await asks_for_tokens()
        return [output(3)]

    worker._run_agent_loop, worker.rollout_config = agent_loop, SAMPLING
    await asyncio.create_task(worker.generate(make_claim("a"), {"index": 0}, 1))
    call = ResumableGeneration([1, 2], 8)
    await asyncio.create_task(asks_for_tokens())

    events = EventReader(tmp_path).read()
    first, second = (event for event in events if isinstance(event, SegmentEnded))
    assert (first.uid, first.session, first.server, first.version, first.seconds) == ("a", 1, "server-7", 3, 2.0)
    assert (first.prompt_tokens, first.tokens, first.reused_tokens, first.reason) == (2, 1, 0, "aborted")
    assert (second.prompt_tokens, second.tokens, second.reused_tokens, second.version) == (3, 2, 2, 4)
    sent = [event for event in events if isinstance(event, RequestSent)]
    assert [(event.uid, event.session, event.server) for event in sent] == [("a", 1, "server-7")] * 2
    (ended,) = (event for event in events if isinstance(event, TrajectoryEnded))
    assert (ended.uid, ended.session, ended.engine_seconds, ended.tokens) == ("a", 1, 5.0, 3)


async def test_events_have_texts_where_the_user_wants_them(connected, tmp_path):
    worker, client = connected
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(f"w{each}" for each in ids))
    worker._texts = EventTexts(tokenizer, 2)
    call = ResumableGeneration([1, 2], 8)
    part = Segment([5, 6, 7], [-0.5] * 3, "completed", version=3, openings=0, context=Context(3, FRESH))

    async def agent_loop(*args, **kwargs):
        client.on_generation(call)
        client.on_segment(call, part, "server-7", 1.0)
        call.add(part)
        return [output(3)]

    worker._run_agent_loop, worker.rollout_config = agent_loop, SAMPLING
    row = {"index": 0, "raw_prompt": [{"content": "what?"}, {"content": [{"type": "image"}, {"text": "this"}]}]}
    for session in (0, 1):
        await asyncio.create_task(worker.generate(make_claim("a"), row, session))
        call = ResumableGeneration([1, 2], 8)
    events = EventReader(tmp_path).read()
    assert [(each.text, each.text_tokens) for each in events if isinstance(each, SegmentEnded)] == [("w6 w7", 2)] * 2
    assert [each.text for each in events if isinstance(each, PhaseBegan) and each.phase == "agent"] == ["is", ""]


def test_a_prompts_text_is_that_of_its_messages_without_pictures():
    row = {"raw_prompt": [{"content": "what?"}, {"content": [{"type": "image"}, {"text": "this"}]}, {"content": None}]}
    assert EventTexts(None, 100).of_prompt(row) == "what?\n\nthis\n"


async def test_what_a_trajectory_waits_for_is_an_event_and_its_seconds_are_summed(connected, tmp_path, monkeypatch):
    worker, client = connected
    now = itertools.count()
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    claim = make_claim("a")
    worker._claim_loop.holds.begin(claim.claim_id)
    worker._claim_loop.slots.reserve(1)

    async def generate(request_id):
        call = ResumableGeneration([1], 8)
        client.on_generation(call)
        await client.before_segment()

    async def scored(self, output, validate, **kwargs):
        return None

    async def agent_loop(*args, **kwargs):
        await worker.llm_client.generate("r")
        await worker.hold([claim], None)
        await worker.llm_client.generate("r")
        return await worker._agent_loop_postprocess([output(3, min_global_steps=0, max_global_steps=0)], False)

    client.generate = generate
    monkeypatch.setattr(worker_module.AgentLoopWorkerTQBase, "_agent_loop_postprocess", scored, raising=False)
    worker._run_agent_loop, worker.rollout_config = agent_loop, SAMPLING
    task = asyncio.create_task(worker.generate(claim, {"index": 17}, 1))
    await asyncio.wait_for(worker._claim_loop.slots.wait_free(4), 60)  # held back
    worker._claim_loop.holds.begin(claim.claim_id)
    await task

    events = EventReader(tmp_path).read()
    phases = [(each.phase, each.response, each.row) for each in events if isinstance(each, PhaseBegan)]
    expected = [("agent", 0), ("engine", 1), ("tool", 1), ("engine", 2), ("held", 2), ("engine", 2), ("tool", 2)]
    assert phases == [(phase, number, "17") for phase, number in [*expected, ("reward", 2)]]
    (ended,) = (event for event in events if isinstance(event, TrajectoryEnded))
    assert (ended.tool_seconds, ended.reward_seconds, ended.held_seconds, ended.responses) == (4.0, 1.0, 1.0, 2)


async def test_what_an_agent_loop_brings_after_its_deadline_is_refused(connected, tmp_path, monkeypatch):
    """The tool swallows its cancellation; by the time it is back the prompt may be with another worker."""
    worker, client = connected
    worker._limits = PhaseLimits({"tool": 0.01})
    monkeypatch.setattr(limits, "CANCEL_S", 0.01)
    back, stored, late = asyncio.Event(), [], []

    async def generate(request_id):
        client.on_generation(ResumableGeneration([1], 8))

    async def scored(self, output, validate, **kwargs):
        stored.append(output)

    async def agent_loop(*args, **kwargs):
        late.append(asyncio.current_task())
        await worker.llm_client.generate("r")
        while not back.is_set():
            try:
                await back.wait()
            except asyncio.CancelledError:
                continue
        await worker.llm_client.generate("r")  # no event says that the trajectory goes on
        with pytest.raises(StaleClaim, match="claim .* on prompt a has ended"):
            await client.before_segment()
        return await worker._agent_loop_postprocess([output(3)], False)

    client.generate = generate
    monkeypatch.setattr(worker_module.AgentLoopWorkerTQBase, "_agent_loop_postprocess", scored, raising=False)
    worker._run_agent_loop, worker.rollout_config = agent_loop, SAMPLING
    with pytest.raises(CallOverdue, match="at response 1, has waited"):
        await asyncio.create_task(worker.generate(make_claim("a"), {"index": 17}, 1))
    back.set()
    await asyncio.wait(late)
    with pytest.raises(StaleClaim, match="a late result of it is refused"):
        late[0].result()
    assert stored == []
    *_, phase = (event.phase for event in EventReader(tmp_path).read() if isinstance(event, PhaseBegan))
    assert phase == "ended"


class ReplayBuffer(PartialRolloutReplayBuffer):
    """verl's terminal prompts, told by the test."""

    def __init__(self, num_ended):
        self.num_ended = num_ended
        timeouts = SimpleNamespace(batch_s=60)
        self.waits = []
        self.bind(
            None, SimpleNamespace(wait_validation=self.waits.append), SimpleNamespace(timeouts=timeouts), mini_batch=1
        )

    def get_sampleable_count(self, global_steps, partition_id):
        assert (self.waits, partition_id) == ([60], "val")
        return self.num_ended

    def wait_for_sampleable(self, global_steps, partition_id, target_count):
        raise InterruptedError("verl waits")


def test_a_prompt_missing_after_validation_is_an_error_and_not_a_wait():
    with pytest.raises(ClusterError, match="validation of step 5 ended with 7 of 8 prompts"):
        ReplayBuffer(7).sample(5, "val", 8)
    with pytest.raises(InterruptedError):
        ReplayBuffer(8).sample(5, "val", 8)


async def test_outside_of_a_trajectory_nothing_is_held_back_recorded_or_too_stale(connected):
    worker, client = connected
    await worker.hold([], 9)
    client.on_generation(ResumableGeneration([1], 8))
    await client.before_segment()
    assert await worker.tokens_in_flight(frozenset()) == {}


async def test_trajectories_that_run_side_by_side_record_their_own_calls(connected):
    worker, client = connected

    async def trajectory(session):
        CURRENT.set(worker._trajectories.start(claim, session))
        await asyncio.sleep(0)
        client.on_generation(ResumableGeneration([session], 8))

    claim = make_claim("a")
    await asyncio.gather(trajectory(0), trajectory(1))
    saved = await worker.tokens_in_flight(frozenset())
    assert {key: [call.prompt_ids for call in calls] for key, calls in saved.items()} == {"a_0": [[0]], "a_1": [[1]]}
