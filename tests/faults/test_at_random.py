"""Processes die and freeze at random, up to three in a step: the run ends with all its steps, and nothing is lost.

Other tests of this folder choose the moment and strike once a step; here processes also die while others are replaced.
`NUM_SEEDS=20 make faults ARGS="-k at_random"` runs more of them.
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability.events import StepEnded
from partial_rollout.runtime import processes
from tests.e2e.conftest import JOB_TIMEOUT_S, saved_step, times_trained
from tests.faults.conftest import (
    GENERATING,
    MISSED,
    SHUT,
    TRAINING,
    Blow,
    blow_at,
    check_nothing_lost,
    options,
    strike,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

LIMIT_S = 1500.0
NUM_STEPS = 14
NUM_BLOWS = (0, 1, 1, 2, 2, 3)
"""How many blows a step may have: one of these."""
PHASES = (GENERATING, TRAINING, SHUT)
"""In the order of a step."""
LONGEST_DELAY_S = 5.0
FREEZES, STARTS_AGAIN = 0.12, 0.1
"""Shares of the blows that freeze a process, and that kill one without which training starts again."""
FROZEN = (
    processes.AGENT_LOOP_WORKER,
    processes.REWARD_WORKER,
    processes.ENGINE,
    processes.ENGINE_SERVER,
    processes.PROMPT_MANAGER,
)
SHORT_LIMITS = [f"partial_rollout.timeouts.{limit}" for limit in ("claim_s=20", "call_s=15", "stall_s=10")]
"""A frozen process is killed after seconds, not minutes."""


def random_blows(seed: int) -> list[Blow]:
    """To processes of every kind, from the second step to the last but one, in the order in which they are due."""
    dice, blows = random.Random(seed), []
    starts_again = [kind for kind in processes.SURVIVED if kind.then is processes.Then.STARTS_AGAIN]
    goes_on = [kind for kind in processes.SURVIVED if kind not in starts_again]
    for step in range(2, NUM_STEPS):
        for phase in sorted(dice.choices(PHASES, k=dice.choice(NUM_BLOWS)), key=PHASES.index):
            die, frozen = dice.random(), False
            if die < FREEZES:
                kinds, frozen = FROZEN, True
            else:
                kinds = tuple(starts_again if die < FREEZES + STARTS_AGAIN else goes_on)
            delay_s = dice.choice((0.0, dice.random(), LONGEST_DELAY_S * dice.random()))
            number = signal.SIGSTOP if frozen else signal.SIGKILL
            blow = blow_at(dice.choice(kinds), step, phase)
            blows.append(replace(blow, number=number, delay_s=round(delay_s, 2), may_miss=True))
    return blows


@pytest.mark.timeout(LIMIT_S + JOB_TIMEOUT_S + 300)  # the first also waits for the undisturbed job
@pytest.mark.parametrize("seed", range(int(os.environ.get("NUM_SEEDS", "2"))))
def test_a_run_ends_with_all_its_steps_though_processes_die_at_random(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any], seed: int
) -> None:
    blows = random_blows(seed)
    steps = [f"trainer.total_training_steps={NUM_STEPS}", *SHORT_LIMITS]
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows, limit_s=LIMIT_S)
    job = struck.job
    hits = sum(pid != MISSED for pid in struck.pids)
    report |= {"code": job.code, "hits": hits, "faults": [(fault.role, fault.action) for fault in struck.faults]}
    assert job.code == 0, job.output[-4000:]
    assert hits > len(blows) // 2
    assert len(struck.faults) >= hits // 2  # a process that dies with another one, and a witness, may have none
    assert max(event.step for event in job.stream if isinstance(event, StepEnded)) == NUM_STEPS
    assert len(times_trained(job.stream)) == 8 * NUM_STEPS
    assert saved_step(tmp_path) == NUM_STEPS
    check_nothing_lost(job, tmp_path, calm)
