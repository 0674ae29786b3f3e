"""What one may change after a warning, an error or a fault: one suggestion for each kind that has one."""

from __future__ import annotations

import re

SUGGESTIONS: dict[str, str] = {
    r"has generated nothing for": "a pause of that length that is no fault: a higher partial_rollout.timeouts.stall_s",
    r"timeouts\.train_s": "docs/troubleshooting.md#a-training-step-that-does-not-go-on",
    r"this wait ends with an error": "docs/troubleshooting.md#a-wait-that-takes-long",
    r"is ongoing at worker|keep their slots": (
        "python -m partial_rollout.status --why says what it waits for; a tool or reward that never answers: "
        "partial_rollout.timeouts.tool_s, reward_s"
    ),
    r"trainer has waited .* for a batch": "python -m partial_rollout.status --why says what the oldest prompts lack",
    r"partial_rollout\.timeouts\.(tool_s|reward_s)": "look at the tool or reward that it names, or set more",
    r"without a correction": "algorithm.rollout_correction.rollout_is=token",
    r"filter_groups\.max_num_gen_batches": "leave algorithm.filter_groups.max_num_gen_batches out",
    r"attempt \d+ of .* failed|dropped": "docs/troubleshooting.md#a-prompt-was-dropped-why-and-which",
    r"using verl's cost model": "nothing: rows are balanced by verl's formula",
    r"engines are relaunched|is started again|was killed|died|ActorDied|EngineDead|EnginesLost|stood still": (
        "docs/troubleshooting.md#something-was-killed-or-stands-still"
    ),
    r"the event stream of .* ends here": "free space on that disk, or a local folder in partial_rollout.events",
    r"checkpoint has no tokens|without a last checkpoint": "the run goes on from an earlier state: nothing to set",
    r"this run goes on from step|this run begins afresh": "trainer.resume_mode=resume_path, for another checkpoint",
    r"could not be removed": "remove that folder by hand",
    r"is called .* since release": "write the new name",
    r"RotaryEmbedding: Failed to load weights": "nothing: harmless (docs/troubleshooting.md)",
    r"the nodes' memory is not known": "set partial_rollout.tail.interrupt_mode and tail.offload_gib by hand",
}
"""By a pattern in the message; the first that is found counts."""


def suggestion(text: str) -> str:
    """What to change; empty where nothing is known.

    >>> suggestion("step 3 trains tokens of older weights without a correction: 40 % of its tokens")
    'algorithm.rollout_correction.rollout_is=token'
    """
    return next((change for pattern, change in SUGGESTIONS.items() if re.search(pattern, text)), "")
