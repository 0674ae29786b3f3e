from __future__ import annotations

import pytest

from partial_rollout.diffusion.sampling import Interrupted, Progress, SampleRequest, SamplingLimits
from partial_rollout.diffusion.sde_window import SdeWindow
from partial_rollout.errors import DataError, ResumeStalled

LIMITS = SamplingLimits(sizes=((64, 64), (60, 64)), multiple=8, max_steps=20)


def request(**changes):
    given = {"request_id": "r", "prompt_ids": (1,), "seed": 0, "height": 64, "width": 64, "num_steps": 10}
    return SampleRequest(**(given | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"negative_ids": (2,), "true_cfg_scale": 4.0},
        {"num_steps": 1, "window": SdeWindow(0, 1)},
        {"window": SdeWindow(0, 10)},
        {"window": SdeWindow(8, 9), "sde_type": "cps"},
        {"window": SdeWindow(12, 12)},
    ],
)
def test_what_is_taken(changes):
    LIMITS.check(request(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"height": 128}, "128x64 is not allowed: rollout.height and width here are 64x64, 60x64"),
        ({"height": 60}, "must be multiples of 8"),
        ({"num_steps": 0}, "must be 1 to 20"),
        ({"num_steps": 21}, "must be 1 to 20"),
        ({"prompt_ids": ()}, "no tokens"),
        ({"true_cfg_scale": 4.0}, "no negative prompt"),
        ({"negative_ids": (2,)}, "a negative prompt"),
        ({"window": SdeWindow(5, 11)}, "must stop at step 10"),
        ({"window": SdeWindow(8, 10), "sde_type": "cps"}, "adds no noise"),
    ],
)
def test_what_is_refused_and_why(changes, reason):
    with pytest.raises(DataError, match=reason):
        LIMITS.check(request(**changes))


def test_going_on_changes_the_snapshot_only():
    assert request().resumed_from(b"x") == request(snapshot=b"x")


def test_steps_and_openings_of_the_gate_are_progress():
    progress = Progress("r")
    for step, openings in [(0, 0), (1, 0), (1, 1), (1, 2), (4, 2), (4, 2)]:
        progress.interrupted(Interrupted(b"", step, openings))
    assert progress.interruptions == 6


def test_without_either_it_is_stuck():
    progress = Progress("r")
    for _ in range(2):
        progress.interrupted(Interrupted(None, 3, 1))
    with pytest.raises(
        ResumeStalled, match="'r' was interrupted 3 times and is still at step 3 after opening 1 of the gate"
    ):
        progress.interrupted(Interrupted(None, 3, 1))
