"""The engine's loop with its hold, over an executor that only counts steps."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.executor.abstract import DiffusionExecutor
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.utils import BatchRunnerOutput, RunnerOutput
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from partial_rollout.diffusion.engine import HOLD, RELEASE, HoldableEngine
from partial_rollout.diffusion.sample import OPTIONS_KEY, SampleOptions

CALL_S = 60.0


class CountingExecutor(DiffusionExecutor):
    """Takes steps when it is given permits; remembers who was in each."""

    def _init_executor(self):
        self.begin(permits=100)  # for the warm-up that an engine of vllm-omni 0.24 takes when it starts

    def begin(self, permits=0):
        self.steps, self.permits, self.progress, self.state = [], threading.Semaphore(permits), {}, set()
        self.after_step = lambda number: None

    def execute_request(self, output):
        raise NotImplementedError

    execute_batch = execute_request

    @property
    def is_dead(self):
        return False

    def check_health(self):
        pass

    def execute_step(self, output):
        self.permits.acquire(timeout=CALL_S)
        self.state -= output.finished_req_ids
        self.state |= {new.request_id for new in output.scheduled_new_reqs}
        rows = []
        for name in output.scheduled_request_ids:
            assert name in self.state, f"a step of {name}, whose state was given away"
            self.progress[name] = self.progress.get(name, 0) + 1
            done = self.progress[name] >= 3
            rows.append(RunnerOutput(name, self.progress[name], done, DiffusionOutput(output=name) if done else None))
        self.steps.append(sorted(output.scheduled_request_ids))
        self.after_step(len(self.steps))
        return BatchRunnerOutput.from_list(rows)

    def collective_rpc(self, method, **_):
        if method == "take":
            taken, self.state = self.state, set()
            return [taken]
        return [len(self.steps)]

    def remove_diffusion_kv_requests(self, request_ids):
        pass

    def shutdown(self):
        pass


@pytest.fixture
def engine():
    executor: Any = CountingExecutor
    engine = HoldableEngine(
        OmniDiffusionConfig(step_execution=True, max_num_seqs=4, distributed_executor_backend=executor)
    )
    engine.executor.begin()
    yield engine
    engine.executor.permits.release(100)
    engine.close()


def start(engine, name, on_arrival=None):
    options = SampleOptions(name=f"{name}#0", on_arrival=on_arrival)
    params = OmniDiffusionSamplingParams(num_inference_steps=3, seed=0, extra_args={OPTIONS_KEY: options})
    request = OmniDiffusionRequest(prompt={"prompt": ""}, sampling_params=params, request_id=name)
    return asyncio.ensure_future(engine.async_add_req_and_wait_for_response(request))


async def call(engine, method, **kwargs):
    return await asyncio.to_thread(engine.collective_rpc, method, CALL_S, (), kwargs or None)


async def test_held_between_steps_nothing_runs_and_released_everybody_goes_on(engine):
    await engine._check_and_start_background_loop()
    assert (await call(engine, HOLD))["unstarted"] == []
    tasks = [start(engine, name) for name in "ab"]
    await asyncio.sleep(0)  # both are in the engine when their tasks have run once
    assert await call(engine, HOLD) == {"unstarted": ["a#0", "b#0"], "num_denoise_steps": 0}
    engine.executor.permits.release(1)
    await call(engine, "boundary")
    assert engine.executor.steps == []
    await call(engine, RELEASE)
    engine.executor.permits.release(2)
    assert [output.output for output in await asyncio.wait_for(asyncio.gather(*tasks), CALL_S)] == ["a", "b"]
    assert engine.executor.steps == [["a", "b"]] * 3


async def test_what_was_taken_and_aborted_is_never_stepped_again(engine):
    """Aborts are on their way when the release comes: no step may run without its state."""
    await engine._check_and_start_background_loop()
    await call(engine, HOLD)
    tasks = [start(engine, name) for name in "abc"]
    await asyncio.sleep(0)
    engine.executor.permits.release(100)
    reached = threading.Event()

    def hold_after_the_first(number):
        if number == 1:
            engine.scheduler.hold()
            reached.set()

    engine.executor.after_step = hold_after_the_first
    await call(engine, RELEASE)
    await asyncio.to_thread(reached.wait, CALL_S)
    assert await call(engine, HOLD) == {"unstarted": [], "num_denoise_steps": 1}
    [taken] = await call(engine, "take")
    await call(engine, "boundary")
    with engine._cv:  # the loop sleeps or stands before its schedule, and sees both at once
        for name in taken:
            engine.abort_queue.put(name)
        engine.collective_rpc(RELEASE)
    new = start(engine, "new")
    assert (await asyncio.wait_for(new, CALL_S)).output == "new"
    outputs = await asyncio.wait_for(asyncio.gather(*tasks), CALL_S)
    assert all(output.aborted for output in outputs)
    assert engine.executor.steps == [["a", "b", "c"]] + [["new"]] * 3
    assert engine.worker_thread.is_alive()


async def test_held_an_abort_is_answered_at_once(engine):
    await engine._check_and_start_background_loop()
    await call(engine, HOLD)
    task = start(engine, "a")
    await asyncio.sleep(0)
    engine.abort("a")
    assert (await asyncio.wait_for(task, CALL_S)).aborted


async def test_it_says_that_a_request_has_come_in_and_keeps_the_way_to_say_so_from_workers(engine):
    await engine._check_and_start_background_loop()
    await call(engine, HOLD)
    seen = []
    aborts = []

    def arrived(abort):
        seen.append(engine.scheduler.unstarted())
        aborts.append(abort)

    task = start(engine, "a", on_arrival=arrived)
    await asyncio.sleep(0)
    assert seen == [["a#0"]]
    [state] = engine.scheduler._request_states.values()
    assert SampleOptions.of(state.req.sampling_params.extra_args) == SampleOptions(name="a#0")
    aborts[0]()
    assert (await asyncio.wait_for(task, CALL_S)).aborted
