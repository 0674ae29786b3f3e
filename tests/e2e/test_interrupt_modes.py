"""Requests that stay in the engine over weight updates, in a real job; a restart goes on from their tokens."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import pytest

from partial_rollout.core.resume import GenerationState
from tests.e2e.conftest import FLAG, Job, is_conserved, run_job, traced

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e
PROMPT_LIMIT = 32
"""The quickstart's `data.max_prompt_length`."""
MODE = "partial_rollout.tail.interrupt_mode"


def _check(job: Job, steps: range) -> None:
    assert job.code == 0, job.output[-4000:]
    assert "Traceback" not in job.output
    assert job.survivors == []
    assert [step["training/global_step"] for step in job.steps] == list(steps)
    assert all(is_conserved(step) for step in job.steps)


def _saved(checkpoint: Path) -> list[GenerationState]:
    """Unfinished generate calls of the checkpoint, which was written while their requests were in the engine."""
    tokens = (checkpoint / "partial_rollout/tokens.msgpack").read_bytes()
    calls = msgspec.msgpack.decode(tokens, type=dict[str, list[GenerationState]])
    return [call for trajectory in calls.values() for call in trajectory if call.stop_reason is None]


def _sum(job: Job, name: str) -> float:
    return sum(step[f"partial_rollout/{name}"] for step in job.steps)


def test_kept_requests_are_saved_and_go_on_with_and_without_their_kv(task: Path, tmp_path: Path) -> None:
    """Five steps with KV kept, then five with it computed again.

    Every third group is long, and so in the engine when steps end; the 64 rows are given out once and a bit.
    """
    options = [FLAG, *traced(task, tmp_path, num_rows=64, every=3), "trainer.save_freq=5", "trainer.test_freq=4"]
    first = run_job(task, tmp_path, *options, f"{MODE}=keep_kv", "trainer.total_training_steps=5")
    _check(first, range(1, 6))
    # Only prompts of requests that had no token yet are read again.
    assert _sum(first, "reprefilled_tokens") < PROMPT_LIMIT * _sum(first, "interruptions")
    assert any(step["partial_rollout/old_kv_token_share"] > 0 for step in first.steps)
    # An unfinished call was interrupted in the first job or sampled no token yet, and all of its tokens are there.
    saved = [call for call in _saved(tmp_path / "checkpoints/global_step_5") if call.token_ids]
    assert saved
    for call in saved:
        assert len(call.log_probs or ()) == len(call.token_ids) == sum(span.num_tokens for span in call.spans)
        assert sum(span.num_tokens for span in call.context_spans) == len(call.token_ids)
        assert {span.origin for span in call.context_spans} <= {"fresh", "keep_kv"}

    second = run_job(task, tmp_path, *options, f"{MODE}=abort", "trainer.total_training_steps=10")
    _check(second, range(6, 11))
    assert _sum(second, "reprefilled_tokens") > 0
    # Only what was generated before the restart had older KV than weights.
    assert second.steps[-1]["partial_rollout/old_kv_token_share"] == 0
    events = second.events
    assert [event["step"] for event in events] == list(range(1, 11))
    uids = Counter(uid for event in events for uid in event["uids"])
    assert set(uids.values()) == {1}
    queue = json.loads((tmp_path / "checkpoints/global_step_10/partial_rollout/queue.json").read_text())
    left = [prompt for state in ("pending", "ongoing", "done") for prompt in queue[state]]
    rows = Counter(index for event in events for index in event["source_index"])
    rows.update(prompt["source_index"] for prompt in left)
    assert len(rows) == 64
    assert max(rows.values()) - min(rows.values()) <= 1
