"""The holdable scheduler alone, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.sched.interface import DiffusionRequestStatus
from vllm_omni.diffusion.worker.utils import BatchRunnerOutput, RunnerOutput
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from partial_rollout.diffusion.engine import HoldableScheduler
from partial_rollout.diffusion.sample import OPTIONS_KEY, SampleOptions


@pytest.fixture
def scheduler():
    scheduler = HoldableScheduler(lambda request_id: None)
    scheduler.initialize(SimpleNamespace(max_num_seqs=2))
    return scheduler


def add(scheduler, name):
    params = OmniDiffusionSamplingParams(
        num_inference_steps=3, seed=0, extra_args={OPTIONS_KEY: SampleOptions(name=f"{name}#0")}
    )
    return scheduler.add_request(OmniDiffusionRequest(prompt={"prompt": ""}, sampling_params=params, request_id=name))


def run_step(scheduler, *, finished=()):
    output = scheduler.schedule()
    rows = [RunnerOutput(name, step_index=1, finished=name in finished) for name in output.scheduled_request_ids]
    return output, scheduler.update_from_output(output, BatchRunnerOutput.from_list(rows))


def test_held_it_has_nothing_to_do_and_released_it_goes_on(scheduler):
    add(scheduler, "a")
    run_step(scheduler)
    scheduler.hold()
    assert not scheduler.has_requests()
    assert scheduler.schedule().is_empty
    scheduler.release()
    assert scheduler.has_requests()
    assert scheduler.schedule().scheduled_cached_reqs.request_ids == ["a"]


def test_it_names_who_has_not_begun(scheduler):
    for name in "abc":
        add(scheduler, name)
    run_step(scheduler)
    scheduler.hold()
    add(scheduler, "d")
    assert scheduler.unstarted() == ["c#0", "d#0"]


def test_held_it_reports_aborts_once_and_tells_the_worker_later(scheduler):
    for name in "ab":
        add(scheduler, name)
    run_step(scheduler)
    scheduler.hold()
    scheduler.finish_requests("a", DiffusionRequestStatus.FINISHED_ABORTED)
    assert scheduler.has_requests()
    assert scheduler.schedule().finished_req_ids == {"a"}
    assert not scheduler.has_requests()
    scheduler.release()
    assert scheduler.schedule().finished_req_ids == {"a"}
    assert scheduler.schedule().finished_req_ids == set()


def test_released_it_reports_aborts_before_others_go_on(scheduler):
    """vllm-omni 0.24 would never end a request that was aborted beside one that goes on."""
    for name in "ab":
        add(scheduler, name)
    run_step(scheduler)
    scheduler.finish_requests("a", DiffusionRequestStatus.FINISHED_ABORTED)
    output = scheduler.schedule()
    assert output.is_empty
    assert output.finished_req_ids == {"a"}
    output = scheduler.schedule()
    assert (output.scheduled_request_ids, output.finished_req_ids) == (["b"], {"a"})


def test_what_ended_by_itself_before_the_hold_is_not_reported(scheduler):
    """The engine has forgotten it: asked about it again, the thread of the denoise steps would end."""
    for name in "ab":
        add(scheduler, name)
    _, finished = run_step(scheduler, finished="a")
    assert finished == {"a"}
    scheduler.pop_request_state("a")
    scheduler.hold()
    assert not scheduler.has_requests()
    assert scheduler.schedule().finished_req_ids == set()
    scheduler.release()
    assert scheduler.schedule().finished_req_ids == {"a"}
