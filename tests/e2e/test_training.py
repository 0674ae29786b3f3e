"""Real verl, real vLLM, real Ray: fifteen steps with two restarts, and mistakes that must be told early."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import pytest

from partial_rollout.core.resume import GenerationState
from partial_rollout.observability.events import (
    Choice,
    GateMoved,
    QueueMoved,
    RequestSent,
    SegmentEnded,
    StepEnded,
    TrajectoryEnded,
    WeightsUpdated,
)
from partial_rollout.observability.gpu_seconds import gpu_seconds, lost
from partial_rollout.view import RunState
from tests.e2e.conftest import (
    FLAG,
    JOB_TIMEOUT_S,
    LONG,
    SHORT,
    Job,
    is_conserved,
    run_job,
    run_job_and_look,
    with_lengths,
)
from tests.e2e.seen_page import STATES, see_page
from tests.e2e.seen_trace import check_trace
from tests.unit.observability.browser import HAS_CHROMIUM

if TYPE_CHECKING:
    from pathlib import Path

WITHOUT_PADDING = [
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.model.override_config.attn_implementation=varlen_sdpa",
]
PACKED = [
    *WITHOUT_PADDING,
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "partial_rollout.packing.token_budget=400",
]
"""Rows without padding, two mini-batches, and a budget that a mini-batch needs several micro-batches for."""
ABORTING = ["partial_rollout.tail.interrupt_mode=abort"]
FILLED_BLOCKS = [
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
]
"""Most responses fill them, and their KV is found again."""
KEEPING_KV = ["partial_rollout.tail.interrupt_mode=keep_kv"]
PROMPT_LIMIT = 32
"""The quickstart's `data.max_prompt_length`."""
BOUNDED = ["partial_rollout.tail.max_staleness=1", "partial_rollout.tail.past_staleness=finish"]
pytestmark = pytest.mark.e2e


def test_fifteen_steps_in_three_jobs_that_interrupt_in_three_ways(task: Path, tmp_path: Path) -> None:
    """64 prompts, batch 8, 5 steps for each way, the last with packed rows: 120 trained and 8 queued, two epochs.

    What was trained and what is left must together be exactly what the dataloader gave out: every row twice. Every
    third group is long, so that steps end with requests in the engine whatever the machine does beside; the short ones
    differ, and must be padded where rows are.
    """
    lengths = [LONG if row % 3 == 2 else SHORT + row % 5 for row in range(64)]
    rows = with_lengths(task, tmp_path, lengths)
    options = [FLAG, *rows, "trainer.save_freq=5", "trainer.test_freq=4"]
    kept = _run_and_see_the_page(task, tmp_path, *options, *KEEPING_KV, "trainer.total_training_steps=5")
    _check_ended_cleanly(kept, steps=range(1, 6))
    _check_kept_requests_were_saved(kept, tmp_path / "checkpoints/global_step_5")
    _check_the_event_stream_tells_the_same(kept, num_steps=5)
    check_trace(tmp_path, kept.steps)

    first = run_job(task, tmp_path, *options, *ABORTING, "trainer.total_training_steps=10")
    _check_ended_cleanly(first, steps=range(6, 11))
    _check_validation_left_nothing(tmp_path / "checkpoints/global_step_10")
    assert _sum(first, "resumed_trajectories") >= 0.1 * _sum(first, "trajectories")
    assert _sum(first, "reprefilled_tokens") > 0
    validated = [
        step for job in (kept, first) for step in job.steps if any(key.startswith("val-core/") for key in step)
    ]
    assert any(step["partial_rollout/interrupted"] > 0 for step in validated)  # validation met parked trajectories
    for step in kept.steps + first.steps:
        assert 0 < step["packing/padding_share"] < 1
        assert step["actor/packing_rows"] == step["packing/micro_batches"]

    options += [*PACKED, *FILLED_BLOCKS, *BOUNDED]
    second = run_job(task, tmp_path, *options, "trainer.total_training_steps=15")
    _check_ended_cleanly(second, steps=range(11, 16))
    _check_choices(second)
    # Only what was generated before the restart had older KV than weights.
    assert first.steps[-1]["partial_rollout/old_kv_token_share"] == 0
    assert any(step["partial_rollout/old_kv_token_share"] > 0 for step in second.steps)
    # What the checkpoint had may be older; it is trained first.
    assert max(step["partial_rollout/staleness_steps/max"] for step in second.steps[1:]) == 1
    assert all(step["packing/padding_share"] == 0 for step in second.steps)
    assert all(step["packing/micro_batches"] > 2 for step in second.steps)
    # A mean over mini-batches, which have different numbers of rows.
    assert all(step["actor/packing_rows"] * 2 == step["packing/micro_batches"] for step in second.steps)
    _check_validation_left_nothing(tmp_path / "checkpoints/global_step_15")
    _check_saved_tokens_were_trained(second, tmp_path / "checkpoints/global_step_10")
    _check_every_row_was_given_out_twice(second.events, tmp_path / "checkpoints/global_step_15")
    if not HAS_CHROMIUM:
        pytest.skip("all of it passed, but the page of a job that goes on was not seen: it needs a browser")


def _run_and_see_the_page(task: Path, folder: Path, *options: str) -> Job:
    """With the job's page open in a browser, where there is one; its numbers must be those of verl's logger."""
    if not HAS_CHROMIUM:
        return run_job(task, folder, *options)
    job, page = run_job_and_look(
        task,
        folder,
        *options,
        after="[3/5]",
        look=lambda: see_page(folder, folder / "profile", JOB_TIMEOUT_S),
    )
    assert any(part.startswith("health starting, ") for part in page.starting)
    assert "health ended" not in page.live
    moves = [event for event in job.stream if isinstance(event, QueueMoved)]
    assert page.live_flows <= {tuple(getattr(event, state) for state in STATES) for event in moves}
    both = (page.live_flows & page.status) - {(0,) * len(STATES)}  # an empty queue is told before the first step
    assert both, (page.live_flows, page.status)
    last = job.steps[-1]
    assert page.head[0] == f"steps done {last['training/global_step']}/{len(job.steps)}"
    counts = {name: last[f"partial_rollout/queue/{name}"] for name in STATES}
    assert page.flow == [f"{name} {count:.0f}" for name, count in counts.items() if count or name != "deferred"]
    told = [(row[0], row[1], row[4], row[7]) for row in page.steps[1:]]
    assert told == [
        (
            str(step["training/global_step"]),
            f"{step['timing_s/step']:.1f}",
            f"{step['partial_rollout/interrupted']:.0f}",
            "" if step is last else f"{step['partial_rollout/queue/pending']:.0f}",  # workers have stopped
        )
        for step in reversed(job.steps)
    ]
    assert page.causes[-1][:2] == ["lost in all", f"{lost(gpu_seconds(job.steps)):,.1f}"]
    afterwards = RunState(folder).shown
    for part in ("head", "flow", "steps", "causes", "summary", "helps", "charts", "line"):
        assert page.shown[part] == afterwards[part]
    return job


def _check_choices(job: Job) -> None:
    """What the last job chose by itself; the driver, the trainer and the engine all went by it."""
    last_start = max(event.t for event in job.stream if isinstance(event, Choice) and event.after == "reuse_kv")
    chosen = {event.key: event.after for event in job.stream if isinstance(event, Choice) and event.step == 0}
    assert chosen["partial_rollout.tail.interrupt_mode"] == "reuse_kv"
    assert chosen["partial_rollout.slots.adaptive"] is True
    assert chosen["partial_rollout.prefetch_factor"] == 2.0
    lines = [line for line in job.output.splitlines() if "auto: partial_rollout.tail.interrupt_mode = reuse_kv" in line]
    assert len(lines) == 1
    assert last_start < min(event.t for event in job.stream if isinstance(event, StepEnded) and event.step == 11)
    assert all("partial_rollout/slots/num" in step for step in job.steps)
    assert all("rollout_corr/rollout_is_mean" in step for step in job.steps)


def _check_the_event_stream_tells_the_same(job: Job, *, num_steps: int) -> None:
    """Steps as in verl's logger, two moves of the gate and an update a step, and no token without its segment."""
    steps = [event for event in job.stream if isinstance(event, StepEnded)]
    told = [(step["training/global_step"], num_steps) for step in job.steps]
    assert [(event.step, event.total) for event in steps] == told
    assert [event.metrics["critic/score/mean"] for event in steps] == [step["critic/score/mean"] for step in job.steps]
    assert all(step["0_partial_rollout/reward"] == step["critic/score/mean"] for step in job.steps)
    moves = [event for event in job.stream if isinstance(event, GateMoved)]
    assert [(move.step, move.is_open) for move in moves] == [
        (n, is_open) for n in range(1, num_steps + 1) for is_open in (0, 1)
    ]
    interrupted = [move.interrupted for move in moves if not move.is_open]
    assert interrupted == [step["partial_rollout/interrupted"] for step in job.steps]
    updates = [event.version for event in job.stream if isinstance(event, WeightsUpdated)]
    assert updates == list(range(num_steps + 1))
    tokens, sent = Counter(), dict[tuple[str, int], str]()
    for event in job.stream:
        if isinstance(event, RequestSent):
            sent[event.uid, event.session] = event.server
        if isinstance(event, SegmentEnded):
            assert sent.pop((event.uid, event.session)) == event.server  # each request was told before its end
            tokens[event.uid, event.session] += event.tokens
            assert (event.text_tokens, bool(event.text)) == (event.tokens, event.tokens > 0)  # events_text is above
    ended = {(e.uid, e.session): e.tokens for e in job.stream if isinstance(e, TrajectoryEnded)}
    assert len(ended) >= num_steps * 8 * 4
    assert {key: tokens[key] for key in ended} == ended


def _sum(job: Job, name: str) -> float:
    return sum(step[f"partial_rollout/{name}"] for step in job.steps)


def _check_kept_requests_were_saved(job: Job, checkpoint: Path) -> None:
    """The checkpoint was written while the requests of its unfinished generate calls were in the engine."""
    # Only prompts of requests that had no token yet are read again.
    assert _sum(job, "reprefilled_tokens") < PROMPT_LIMIT * _sum(job, "interruptions")
    assert any(step["partial_rollout/old_kv_token_share"] > 0 for step in job.steps)
    tokens = (checkpoint / "partial_rollout/tokens.msgpack").read_bytes()
    calls = msgspec.msgpack.decode(tokens, type=dict[str, list[GenerationState]])
    unfinished = [call for trajectory in calls.values() for call in trajectory if call.stop_reason is None]
    # An unfinished call was interrupted in the job or sampled no token yet, and all of its tokens are there.
    saved = [call for call in unfinished if call.token_ids]
    assert saved
    for call in saved:
        assert len(call.log_probs or ()) == len(call.token_ids) == sum(span.num_tokens for span in call.spans)
        assert sum(span.num_tokens for span in call.context_spans) == len(call.token_ids)
        assert {span.origin for span in call.context_spans} <= {"fresh", "keep_kv"}


def _check_ended_cleanly(job: Job, *, steps: range) -> None:
    assert job.code == 0, job.output[-4000:]
    assert "Traceback" not in job.output
    assert job.survivors == []
    assert [step["training/global_step"] for step in job.steps] == list(steps)
    assert all(is_conserved(step) for step in job.steps)


def _check_saved_tokens_were_trained(job: Job, checkpoint: Path) -> None:
    """In the first batch after a restart, the tokens of older weights are those that the checkpoint has."""
    queue = json.loads((checkpoint / "partial_rollout/queue.json").read_text())
    saved = msgspec.msgpack.decode((checkpoint / "partial_rollout/tokens.msgpack").read_bytes())
    uids = set(job.events[10]["uids"])
    waiting = [trajectory for group in queue["done"] if group["uid"] in uids for trajectory in group["trajectories"]]
    done = sum(span["num_tokens"] for trajectory in waiting for span in trajectory["version_spans"])
    replayed = sum(
        len(call["token_ids"]) for key, calls in saved.items() if key.rsplit("_", 1)[0] in uids for call in calls
    )
    assert replayed > 0
    assert job.steps[0]["partial_rollout/stale_tokens"] == done + replayed


def _check_every_row_was_given_out_twice(events: list[dict], checkpoint: Path) -> None:
    assert [event["step"] for event in events] == list(range(1, 16))
    uids = Counter(uid for event in events for uid in event["uids"])
    assert set(uids.values()) == {1}
    queue = json.loads((checkpoint / "partial_rollout/queue.json").read_text())
    left = [prompt for state in ("pending", "ongoing", "done") for prompt in queue[state]]
    assert not uids.keys() & {prompt["uid"] for prompt in left}
    rows = Counter(index for event in events for index in event["source_index"])
    rows.update(prompt["source_index"] for prompt in left)
    assert (len(rows), set(rows.values())) == (64, {2})


def _check_validation_left_nothing(checkpoint: Path) -> None:
    """Saved after the validations of steps 8 and 12; of "train" there is the queue and the trained batch."""
    partitions = pickle.loads((checkpoint / "transfer_queue/controller_state.pkl").read_bytes())["partitions"]
    left = {name: len(partition.keys_mapping) for name, partition in partitions.items()}
    assert left.pop("train") > 0
    assert left.pop("val") == 0
    assert left == {}


def test_the_flag_alone_computes_no_old_log_probs_also_of_packed_rows(task: Path, tmp_path: Path) -> None:
    """With verl's own agent loop, in a batch that is one optimizer step of several micro-batches."""
    packed = [*WITHOUT_PADDING, "partial_rollout.packing.token_budget=400", "trainer.total_training_steps=3"]
    job = run_job(task, tmp_path, FLAG, *packed, "reward.custom_reward_function.path=pkg://tests.e2e.row_reward")
    _check_ended_cleanly(job, steps=range(1, 4))
    chosen = {event.key: event.after for event in job.stream if isinstance(event, Choice) and event.step == 0}
    correction = "algorithm.rollout_correction"
    assert (chosen[f"{correction}.bypass_mode"], chosen[f"{correction}.loss_type"]) == (True, "reinforce")
    assert all("actor/rollout_corr/rollout_is_mean" in step and "actor/entropy" not in step for step in job.steps)
    assert all(step["packing/padding_share"] == 0 and step["packing/micro_batches"] > 2 for step in job.steps)
    assert any(step["actor/grad_norm"] for step in job.steps)


def test_without_the_flag_verls_sync_trainer_runs(task: Path, tmp_path: Path) -> None:
    """Ours is the attention only, which verl must find by itself."""
    job = run_job(task, tmp_path, *WITHOUT_PADDING, "trainer.total_training_steps=2")
    assert job.code == 0, job.output[-4000:]
    assert [step["training/global_step"] for step in job.steps] == [1, 2]
    assert not any(key.startswith("partial_rollout/") for key in job.steps[0])
    assert job.survivors == []


def test_a_mistake_is_told_before_anything_starts(task: Path, tmp_path: Path) -> None:
    job = run_job(task, tmp_path, FLAG, "data.train_files=/nowhere/train.parquet")
    assert job.code == 2
    assert "data.train_files=/nowhere/train.parquet does not exist" in job.output
    assert "Traceback" not in job.output
    assert "local Ray instance" not in job.output


def test_missing_resources_are_named(task: Path, tmp_path: Path) -> None:
    job = run_job(task, tmp_path, FLAG, "ray_kwargs.ray_init.num_cpus=0", "partial_rollout.timeouts.resources_s=3.0")
    assert job.code == 1
    assert "the Ray cluster lacks CPU" in job.output
    assert job.survivors == []


def test_fewer_rows_than_a_batch_are_told_before_an_engine_starts(task: Path, tmp_path: Path) -> None:
    job = run_job(task, tmp_path, FLAG, "data.train_max_samples=3")
    assert job.code == 2
    assert "data.train_files has 3 rows" in job.output
    assert "EngineCore" not in job.output
    assert job.survivors == []


def test_a_failure_between_the_first_engine_and_the_first_step_leaves_nothing(task: Path, tmp_path: Path) -> None:
    """verl loads the tools in the agent-loop workers; the file is there, its class is not."""
    file = tmp_path / "tools.yaml"
    file.write_text("tools: [{class_name: nowhere.Tool, config: {type: native}}]")
    job = run_job(task, tmp_path, FLAG, f"actor_rollout_ref.rollout.multi_turn.tool_config_path={file}")
    assert job.code == 1
    assert "error: training failed" in job.output
    assert "PartialRolloutAgentLoopWorker.__init__" in job.output
    assert job.survivors == []
