"""An engine core that freezes in the moment in which it is asked for something behind a closed gate.

vLLM's workers ignore a release of memory on a CPU, but its engine core takes the call and answers it as on a GPU.
"""

from __future__ import annotations

import signal
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.rollout.progress_watch import ROLE as ENGINE
from tests.faults.conftest import CORE, check_all_trained_once, check_same_texts, options, strike
from tests.faults.freezes_in import AFTER_TRAINING, FREEZES, frozen
from tests.faults.measured import NEVER_S, cost_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

DRAIN_S, RESUME_S = 20.0, 200.0
BOUNDS_S = {
    "pause": DRAIN_S / 2,
    "release its memory": RESUME_S / 10,
    "take its memory back": RESUME_S / 40,
    "go on": RESUME_S / 10,
}
MARGIN_S = 10.0
"""Killing it, and saying so, beside other jobs."""
NUM_STEPS = 9
LIMIT_S = 900.0
"""Limit of a job that starts four engines again."""


@pytest.mark.timeout(LIMIT_S + 300)
def test_an_engine_that_freezes_when_it_is_asked_for_something_is_named_and_started_again(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    rollout = "actor_rollout_ref.rollout"
    steps = [
        f"trainer.total_training_steps={NUM_STEPS}",
        f"partial_rollout.timeouts.drain_s={DRAIN_S}", f"partial_rollout.timeouts.resume_s={RESUME_S}",
        f"{rollout}.free_cache_engine=True", "partial_rollout.tail.interrupt_mode=abort",
        f"+{rollout}.engine_kwargs.vllm.scheduler_cls=tests.faults.freezing_scheduler.FreezingScheduler",
    ]  # fmt: skip
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=[], limit_s=LIMIT_S)
    job, faults = struck.job, struck.faults
    report["faults"] = [(fault.role, fault.text) for fault in faults]
    assert job.code == 0, job.output[-4000:]
    at_s = [frozen(tmp_path, asked).stat().st_mtime for asked in FREEZES]
    known_s = [round(fault.t - blow_s, 1) for fault, blow_s in zip(faults, at_s, strict=False)]
    report["known_s"] = known_s
    report["blows"] = [
        {"role": ENGINE, "while": f"asked to {asked}", "step": step, "signal": signal.SIGSTOP.name, "name": CORE}
        | asdict(cost_of(job.stream, blow_s, until_s, trained=step if asked in AFTER_TRAINING else None))
        for (asked, step), blow_s, until_s in zip(FREEZES.items(), at_s, [*at_s[1:], NEVER_S], strict=True)
    ]
    assert [fault.role for fault in faults] == [ENGINE] * len(FREEZES)
    assert all("replica 0" in fault.text and fault.pid for fault in faults)
    assert all(seconds < bound_s + MARGIN_S for seconds, bound_s in zip(known_s, BOUNDS_S.values(), strict=True))
    assert "was asked to pause and did not answer" in faults[0].text
    assert "was asked to release its memory and did not answer" in faults[1].text
    assert "did not wake up (['kv_cache']): no answer within 5 s" in faults[2].text
    assert "was asked to go on and did not answer" in faults[3].text
    check_all_trained_once(job, NUM_STEPS)
    check_same_texts(tmp_path, calm)
    assert sum(step["partial_rollout/engine_relaunches"] for step in job.steps) == len(FREEZES)
