"""The loop of a job, with replicas that finish images when they are told to."""

from __future__ import annotations

import asyncio

import pytest

from partial_rollout.diffusion.config import DiffusionConfig
from partial_rollout.diffusion.contract import QWEN_IMAGE, resolve
from partial_rollout.diffusion.job import DiffusionJob
from partial_rollout.diffusion.replicas import Sampled
from partial_rollout.diffusion.result import advantages
from partial_rollout.errors import EngineError, WaitTimeout
from partial_rollout.observability.events import (
    BatchTaken,
    EventReader,
    EventWriter,
    GateMoved,
    SegmentEnded,
    WeightsUpdated,
)
from partial_rollout.observability.why import Interruptions
from tests.unit.diffusion.results import make_result


class FakeReplicas:
    """Finishes the first `ready` images at once; the others when they are released."""

    def __init__(self, ready):
        self.ready, self.events, self.requests, self.waiting = ready, [], [], []
        self.version, self.failure, self.slow = 0, None, set()

    async def sample(self, request):
        self.requests.append(request)
        if self.failure:
            raise self.failure
        versions = (self.version,)
        if self.ready <= 0 or request.request_id in self.slow:
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]
            versions += (self.version,)
        self.ready -= 1
        result = make_result(
            request.request_id,
            versions,
            level=len(self.requests),
            window=request.window,
        )
        return Sampled(result, 0, (0,) * len(versions))

    async def hold(self):
        self.events.append("hold")

    async def drain(self):
        self.events.append("drain")

    async def update(self, weights, version, device, limit_s):
        self.events.append(f"update {version}")
        self.version = version

    async def release(self):
        self.events.append("release")
        for future in self.waiting:
            if not future.done():
                future.set_result(None)

    async def resume(self):
        self.events.append("resume")


class FakeActor:
    device = "cpu"

    def __init__(self, events):
        self.events, self.trained = events, []

    def update(self, groups):
        self.events.append("train")
        self.trained.append(groups)
        return {"actor/loss": 0.0}

    def weights(self):
        return []


def fake_tokenizer(text):
    return {"input_ids": list(text.encode())}


def make_job(replicas, events=None, **blocks):
    given = {
        "model": {"path": "m"},
        "data": {"prompts": "p"},
        "trainer": {"output_dir": "o", "reward": "a.b", "train_batch_size": 2, "timeout_s": 30.0},
        "rollout": {"n": 2, "gpus_per_server": 0},
        "actor": {"device": "cpu"},
    }
    for name, block in blocks.items():
        given[name] = given.get(name, {}) | block
    config = DiffusionConfig.from_mapping(given)
    stepwise = config.rollout.step_execution
    return DiffusionJob(
        config,
        adapter=resolve(QWEN_IMAGE, config.algorithm.name, step_execution=stepwise),
        replicas=replicas,
        actor=FakeActor(replicas.events),
        tokenizer=fake_tokenizer,
        prompts=["one", "two"],
        reward=lambda images, prompts: [float(image.mean()) for image in images],
        events=events,
    )


async def test_a_step_interrupts_trains_updates_and_goes_on():
    replicas = FakeReplicas(ready=4)
    job = make_job(replicas)
    metrics = await job.step()
    assert replicas.events == ["hold", "train", "update 1", "release"]
    assert len(replicas.requests) == 8  # two groups of two to train, and as many ahead
    assert metrics["partial_rollout/groups_in_flight"] == 2
    assert metrics["partial_rollout/resumed"] == 0
    assert metrics["partial_rollout/stale_step_share"] == 0.0
    await job.end()


async def test_what_was_interrupted_is_trained_in_the_next_step_and_counted():
    replicas = FakeReplicas(ready=4)
    job = make_job(replicas)
    await job.step()
    metrics = await job.step()
    trained = [result.request_id for groups in job._actor.trained for group in groups for result in group.results]
    assert len(set(trained)) == len(trained) == 8
    assert metrics["partial_rollout/resumed"] == 4
    assert metrics["partial_rollout/stale_step_share"] == 0.5
    await job.end()


async def test_what_happens_is_in_the_event_stream(tmp_path):
    """Eight images are begun, four are finished and trained, four are held over the update."""
    writer = EventWriter(tmp_path, "trainer", clock=lambda: 1.0)
    job = make_job(FakeReplicas(ready=4), events=writer)
    await job.step()
    await job.end()
    events = EventReader(tmp_path).read()[1:]
    told = [type(event).__name__ for event in events]
    assert (told.count("PhaseBegan"), told.count("SegmentEnded"), told.count("TrajectoryEnded")) == (8, 4, 4)
    others = [event for event in events if isinstance(event, BatchTaken | GateMoved | WeightsUpdated)]
    assert [type(event) for event in others] == [BatchTaken, GateMoved, WeightsUpdated, GateMoved]
    taken, closed, updated, opened = others
    assert (taken.step, taken.uids) == (1, ["group-0", "group-1"])
    assert (closed.is_open, closed.version, closed.interrupted) == (False, 0, 4)
    assert (updated.version, opened.is_open, opened.version) == (1, True, 1)
    segment = next(event for event in events if isinstance(event, SegmentEnded))
    assert (segment.uid, segment.server, segment.version, segment.tokens) == ("group-0", "images 0", 0, 1)
    assert (segment.unit, segment.reason) == ("denoise steps", "stop")


async def test_an_image_that_was_held_has_a_segment_of_each_weight_version(tmp_path):
    writer = EventWriter(tmp_path, "trainer")
    job = make_job(FakeReplicas(ready=4), events=writer)
    await job.step()
    metrics = await job.step()
    await job.end()
    events = EventReader(tmp_path).read()[1:]
    held = [event for event in events if isinstance(event, SegmentEnded) and event.uid == "group-2"]
    assert [(each.version, each.tokens, each.prompt_tokens, each.reason) for each in held if not each.session] == [
        (0, 1, 0, "aborted"),
        (1, 1, 1, "stop"),
    ]
    closed = next(event for event in events if isinstance(event, GateMoved))
    assert all(each.t <= closed.t for each in held if each.reason == "aborted")
    taken = [event for event in events if isinstance(event, BatchTaken)]
    assert [each.interruptions for each in taken] == [[0, 0], [2, 2]]
    assert {int(row) for each in taken for row in each.source_index} <= {0, 1}
    found = Interruptions()
    for event in events:
        found.add(event)
    cost = found.of(1)
    assert (cost.requests, cost.resumed, cost.tokens_kept, cost.tokens_again) == (4, 4, 4, 0)
    assert metrics["partial_rollout/queue/taken"] == 4
    assert job._running == {}


async def test_snapshots_are_the_other_way():
    replicas = FakeReplicas(ready=8)
    job = make_job(replicas, rollout={"interrupt": "snapshot"})
    await job.step()
    assert replicas.events == ["drain", "train", "update 1", "resume"]
    await job.end()


async def test_whole_requests_are_not_interrupted():
    replicas = FakeReplicas(ready=4)
    job = make_job(replicas, rollout={"step_execution": False, "prefetch_factor": 1})
    await job.step()
    assert replicas.events == ["train", "update 1"]
    assert len(replicas.requests) == 4


@pytest.mark.parametrize(("algorithm", "shared"), [("mix_grpo", True), ("flow_grpo", False)])
@pytest.mark.parametrize("prefetch_factor", [1.0, 1.5, 3.0])
async def test_mix_grpo_trains_one_window_in_a_step(algorithm, shared, prefetch_factor):
    """Whatever was begun ahead: groups of several steps are whole when a step takes its batch."""
    job = make_job(
        FakeReplicas(ready=10**6), algorithm={"name": algorithm}, rollout={"prefetch_factor": prefetch_factor}
    )
    for _ in range(8):
        await job.step()
        await asyncio.sleep(0)
    windows = [{result.window for group in groups for result in group.results} for groups in job._actor.trained]
    assert all(len(found) == 1 for found in windows) == shared
    assert len(set.union(*windows)) > 1
    await job.end()


async def test_mix_grpo_waits_for_the_groups_of_its_step():
    """Those of the next step are whole first, and are trained in the next."""
    replicas = FakeReplicas(ready=10**6)
    replicas.slow = {"sample-0"}
    job = make_job(replicas, algorithm={"name": "mix_grpo"})
    step = asyncio.ensure_future(job.step())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not step.done()
    assert len(replicas.waiting) == 1
    await replicas.release()
    await step
    await job.step()
    trained = [[result.request_id for group in groups for result in group.results] for groups in job._actor.trained]
    assert trained == [[f"sample-{number}" for number in range(first, first + 4)] for first in (0, 4)]
    await job.end()


async def test_the_oldest_whole_groups_are_trained_first():
    """Group 10 comes after group 9, though "10" sorts before "9"."""
    job = make_job(FakeReplicas(ready=10**6), rollout={"prefetch_factor": 8.0})
    for _ in range(8):
        await job.step()
    trained = [result.request_id for groups in job._actor.trained for group in groups for result in group.results]
    assert trained == [f"sample-{number}" for number in range(32)]
    await job.end()


async def test_a_server_with_a_device_of_its_own_generates_while_the_model_trains():
    replicas = FakeReplicas(ready=4)
    job = make_job(replicas, rollout={"gpus_per_server": 1}, actor={"device": "cuda"})
    await job.step()
    assert replicas.events == ["train", "hold", "update 1", "release"]
    await job.end()


async def test_without_a_stepwise_adapter_no_more_is_begun_than_is_trained():
    replicas = FakeReplicas(ready=4)
    job = make_job(replicas)
    job._adapter = resolve(QWEN_IMAGE, "flow_grpo", step_execution=False)
    await job.step()
    assert len(replicas.requests) == 4
    await job.end()


async def test_pictures_that_do_not_come_are_named():
    job = make_job(FakeReplicas(ready=1), trainer={"timeout_s": 0.01})
    with pytest.raises(WaitTimeout, match=r"the job for 3 pictures.*within 0.01 s"):
        await job.pictures(3)


async def test_a_failed_request_ends_the_run():
    replicas = FakeReplicas(ready=0)
    replicas.failure = EngineError("gone")
    job = make_job(replicas)
    with pytest.raises(EngineError, match="gone"):
        await job.step()
    await job.end()


async def test_a_batch_that_does_not_come_is_named():
    job = make_job(FakeReplicas(ready=2), trainer={"timeout_s": 0.01})
    with pytest.raises(WaitTimeout, match="the trainer has 1 of 2 groups"):
        await job.step()
    await job.end()


def test_advantages_compare_within_a_group():
    found = advantages([[1.0, 3.0], [10.0, 10.0], [0.0, 100.0]], limit=0.5)
    assert found.tolist() == [-0.5, 0.5, 0.0, 0.0, -0.5, 0.5]
    assert advantages([[1.0, 3.0]], limit=5).tolist() == pytest.approx([-1.0, 1.0], abs=1e-3)
