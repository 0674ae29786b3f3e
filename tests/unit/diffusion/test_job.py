"""The loop of a job, with replicas that finish images when they are told to."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading

import pytest

from partial_rollout.diffusion.checkpoint import Checkpoints
from partial_rollout.diffusion.config import DiffusionConfig
from partial_rollout.diffusion.contract import QWEN_IMAGE, resolve
from partial_rollout.diffusion.job import DiffusionJob
from partial_rollout.diffusion.replicas import Sampled
from partial_rollout.diffusion.result import advantages
from partial_rollout.errors import CallOverdue, DataError, EngineError, WaitTimeout
from partial_rollout.observability.events import (
    BatchTaken,
    CheckpointSaved,
    DeadlinePassed,
    EventReader,
    EventWriter,
    GateMoved,
    SegmentEnded,
    WeightsUpdated,
)
from partial_rollout.observability.why import Interruptions
from tests.unit.diffusion.fake_actor import FakeActor
from tests.unit.diffusion.results import make_result

PROMPTS = ["one", "two"]
WAIT_S = 20.0


class FakeReplicas:
    """Finishes the first `ready` images at once; the others when they are released."""

    def __init__(self, ready):
        self.ready, self.events, self.requests, self.waiting = ready, [], [], []
        self.version, self.failure, self.slow = 0, None, set()
        self.still = asyncio.Lock()

    async def begin(self, *, watched):
        self.events.append("begin")

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

    async def update(self, weights, version, device, limit_s, *, is_part):
        self.events.append(f"update {version}")
        self.version, self.is_part = version, is_part

    async def release(self):
        self.events.append("release")
        for future in self.waiting:
            if not future.done():
                future.set_result(None)

    async def resume(self):
        self.events.append("resume")


def fake_tokenizer(text):
    return {"input_ids": list(text.encode())}


def make_job(replicas, events=None, *, model=None, reward=None, folder=None, **blocks):
    """A job; with a `folder` it saves checkpoints there, and goes on from them."""
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
    checkpoints, actor = None, model or FakeActor(replicas.events)
    if folder is not None:
        config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, output_dir=str(folder)))
        checkpoints = Checkpoints(config, PROMPTS)
        checkpoints.restore(actor)
    return DiffusionJob(
        config,
        adapter=resolve(QWEN_IMAGE, config.algorithm.name, step_execution=stepwise),
        replicas=replicas,
        actor=actor,
        tokenizer=fake_tokenizer,
        prompts=PROMPTS,
        reward=reward or (lambda images, prompts: [float(image.mean()) for image in images]),
        checkpoints=checkpoints,
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
    """Groups of the next step are whole first, and are trained in the next step."""
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


async def test_gates_tell_the_version_that_engines_have(tmp_path):
    """The gate tells the engines' version, also where they generate by old weights until the new ones are trained."""
    writer = EventWriter(tmp_path, "trainer")
    blocks = {"rollout": {"gpus_per_server": 1}, "actor": {"device": "cuda"}}
    job = make_job(FakeReplicas(ready=10**6), writer, **blocks)
    for _ in range(2):
        await within(job.step())
    await job.end()
    gates = [event for event in EventReader(tmp_path).read() if isinstance(event, GateMoved)]
    assert [(each.is_open, each.step, each.version) for each in gates] == [
        (False, 1, 0),
        (True, 1, 1),
        (False, 2, 1),
        (True, 2, 2),
    ]


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
    job = make_job(FakeReplicas(ready=2), trainer={"timeout_s": 0.5})
    with pytest.raises(WaitTimeout, match="the trainer has 1 of 2 groups"):
        await job.step()
    await job.end()


def test_advantages_compare_within_a_group():
    found = advantages([[1.0, 3.0], [10.0, 10.0], [0.0, 100.0]], limit=0.5)
    assert found.tolist() == [-0.5, 0.5, 0.0, 0.0, -0.5, 0.5]
    assert advantages([[1.0, 3.0]], limit=5).tolist() == pytest.approx([-1.0, 1.0], abs=1e-3)


async def within(call):
    return await asyncio.wait_for(call, WAIT_S)


async def test_a_reward_that_hangs_is_named_and_engines_go_on_meanwhile(tmp_path):
    """The function never returns; the run's end does not wait for its thread."""
    writer, loop = EventWriter(tmp_path, "trainer"), asyncio.get_running_loop()
    begun, hung = asyncio.Event(), threading.Event()

    def reward(images, prompts):
        loop.call_soon_threadsafe(begun.set)
        hung.wait(WAIT_S)

    job = make_job(FakeReplicas(ready=4), writer, reward=reward, trainer={"reward_s": 0.2})
    step = asyncio.ensure_future(job.step())
    await within(begun.wait())
    with pytest.raises(CallOverdue, match=r"reward=a.b of prompt row \d .* \(set trainer.reward_s"):
        await within(step)
    overdue = [event for event in EventReader(tmp_path).read() if isinstance(event, DeadlinePassed)]
    assert [(each.uid, each.phase, each.limit_s) for each in overdue] == [("group-0", "reward", 0.2)]
    hung.set()
    await job.end()


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (lambda images, prompts: [1.0], "returned 1 numbers: must be one for each of 2 images"),
        (lambda images, prompts: [1.0, math.nan], "returned nan for image 1 of 2: must be a finite number"),
        (lambda images, prompts: [math.inf, 1.0], "returned inf for image 0 of 2"),
        (lambda images, prompts: None, "returned NoneType .*must be one number for each of 2 images"),
    ],
)
async def test_rewards_that_cannot_be_trained_on_are_named(reward, reason):
    job = make_job(FakeReplicas(ready=4), reward=reward)
    with pytest.raises(DataError, match=rf"^trainer.reward=a.b of prompt row \d .*{reason}"):
        await within(job.step())
    assert job._actor.trained == []
    await job.end()


def taken(folder):
    """The groups of each training step, as the events of all starts tell them."""
    batches = [event for event in EventReader(folder).read() if isinstance(event, BatchTaken)]
    return [(each.step, each.uids, each.source_index) for each in batches]


async def test_a_run_that_was_stopped_goes_on_as_one_that_was_not(tmp_path):
    """Steps, groups and prompts are the same, and engines get the weights of the checkpoint before all else."""
    blocks = {"algorithm": {"name": "mix_grpo"}, "trainer": {"train_batch_size": 2, "save_freq": 2}}
    whole = make_job(FakeReplicas(ready=10**6), EventWriter(tmp_path / "whole", "trainer"), **blocks)
    for _ in range(6):
        await within(whole.step())
    await whole.end()

    for start, until in enumerate((3, 5, 6)):  # saved: 2, 4
        replicas = FakeReplicas(ready=10**6)
        writer = EventWriter(tmp_path / f"start-{start}", "trainer")
        job = make_job(replicas, writer, folder=tmp_path / "run", **blocks)
        begun = job.version
        assert begun == (0, 2, 4)[start] == job._actor.num_updates
        await job.begin()
        assert replicas.events == ["begin"] + [f"update {begun}"] * (begun > 0)
        while job.version < until:
            await within(job.step())
            await job.save_if_due()
        await job.end()
    stopped = [batch for start, kept in enumerate((2, 4, 6)) for batch in taken(tmp_path / f"start-{start}")[:2]]
    assert stopped == taken(tmp_path / "whole")
    trained = [uid for _, uids, _ in stopped for uid in uids]
    assert len(trained) == len(set(trained)) == 12


async def test_a_checkpoint_is_saved_when_it_is_due(tmp_path):
    writer = EventWriter(tmp_path / "events", "trainer")
    job = make_job(FakeReplicas(ready=10**6), writer, folder=tmp_path, trainer={"save_freq": 2, "save_minutes": None})
    for _ in range(5):
        await within(job.step())
        await job.save_if_due()
    await job.end()
    events = [event for event in EventReader(tmp_path / "events").read() if isinstance(event, CheckpointSaved)]
    assert [(event.step, event.num_bytes > 0) for event in events] == [(2, True), (4, True)]
    assert job.saved_step == 4


@pytest.mark.parametrize(("minutes", "saved_step"), [(1e-9, 1), (None, 0), (1000.0, 0)])
async def test_a_checkpoint_is_saved_by_time_unless_the_user_wants_none(tmp_path, minutes, saved_step):
    job = make_job(FakeReplicas(ready=10**6), folder=tmp_path, trainer={"save_minutes": minutes})
    await within(job.step())
    await job.save_if_due()
    assert job.saved_step == saved_step
    assert Checkpoints(job._config, PROMPTS).books.version == saved_step
    await job.end()


async def test_a_run_that_goes_on_from_a_checkpoint_saves_its_last_step(tmp_path):
    last = {"total_training_steps": 3}
    for trainer, saved_step in (({"save_freq": 2}, 2), ({"save_minutes": 1000.0}, 3)):
        job = make_job(FakeReplicas(ready=10**6), folder=tmp_path, trainer=last | trainer)
        await job.begin()
        while job.version < saved_step:
            await within(job.step())
            await job.save_if_due()
        await job.end()
        assert Checkpoints(job._config, PROMPTS).books.version == saved_step


async def test_a_checkpoint_that_fails_ends_no_run(tmp_path, caplog):
    actor = FakeActor()
    job = make_job(FakeReplicas(ready=10**6), model=actor, folder=tmp_path, trainer={"save_freq": 1})
    await within(job.step())
    await job.save_if_due()
    actor.failure = OSError("no space left")
    await within(job.step())
    await job.save_if_due()
    assert "the checkpoint of step 2 could not be saved" in caplog.text
    assert Checkpoints(job._config, PROMPTS).books.version == 1
    await job.end()


class SlowActor(FakeActor):
    """Trains when it is told to."""

    def __init__(self):
        super().__init__()
        self.begun, self.go_on, self.error = threading.Event(), threading.Event(), None

    def update(self, groups):
        self.begun.set()
        assert self.go_on.wait(WAIT_S)
        if self.error:
            raise self.error
        return super().update(groups)


async def test_the_last_checkpoint_is_saved_while_images_are_generated(tmp_path):
    """The half-done batch is in it as groups that are not trained."""
    replicas = FakeReplicas(ready=4)
    job = make_job(replicas, folder=tmp_path, rollout={"prefetch_factor": 1.0})
    await within(job.step())
    replicas.ready = 1
    step = asyncio.ensure_future(job.step())
    await asyncio.sleep(0)
    assert await within(job.save_last())
    assert not step.done()
    assert Checkpoints(job._config, PROMPTS).books.as_mapping() == {"step": 1, "next_group": 4, "untrained": [2, 3]}
    assert not await within(job.save_last())  # there is nothing new
    step.cancel()
    await job.end()


async def test_the_last_checkpoint_waits_for_the_training_of_a_step(tmp_path):
    actor = SlowActor()
    job = make_job(FakeReplicas(ready=4), model=actor, folder=tmp_path)
    step = asyncio.ensure_future(job.step())
    await within(asyncio.to_thread(actor.begun.wait, WAIT_S))
    last = asyncio.ensure_future(job.save_last())
    await asyncio.sleep(0)
    actor.go_on.set()
    assert await within(last)
    await within(step)
    assert Checkpoints(job._config, PROMPTS).books.version == 1
    await job.end()


@pytest.mark.parametrize("ends", [False, True])
async def test_half_a_training_is_not_saved(tmp_path, ends):
    """The training of step 2 does not end in time, or fails: its groups count as not trained."""
    actor = SlowActor()
    job = make_job(FakeReplicas(ready=10**6), model=actor, folder=tmp_path, trainer={"stop_s": WAIT_S if ends else 0.1})
    actor.go_on.set()
    await within(job.step())
    actor.go_on.clear()
    actor.begun.clear()
    step = asyncio.ensure_future(job.step())
    await within(asyncio.to_thread(actor.begun.wait, WAIT_S))
    actor.error = MemoryError("no memory")
    if ends:
        actor.go_on.set()
    assert not await within(job.save_last())
    actor.go_on.set()
    with pytest.raises(MemoryError):
        await within(step)
    assert not await within(job.save_last())
    assert Checkpoints(job._config, PROMPTS).found is None
    assert job._books.untrained[:2] == [2, 3]
    await job.end()


@pytest.mark.parametrize("lora_rank", [0, 4])
async def test_with_adapters_an_update_is_a_part_of_the_weights(lora_rank):
    replicas = FakeReplicas(ready=10**6)
    job = make_job(replicas)
    job._config = dataclasses.replace(job._config, model=dataclasses.replace(job._config.model, lora_rank=lora_rank))
    await within(job.step())
    assert replicas.is_part is (lora_rank > 0)
    await job.end()
