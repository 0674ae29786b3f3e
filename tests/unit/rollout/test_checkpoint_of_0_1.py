"""A checkpoint that release 0.1 wrote is read, and its tokens are gone on from.

`tests/fixtures/checkpoint_0.1` holds the two files of ours from the third step of two jobs, written by commit 1613340:
`partial` has eight interrupted groups, `reorder` a deferred group and two whole groups that wait for their batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

pytest.importorskip("verl")

from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.tail import Partial
from partial_rollout.train.queue_checkpoint import load_queue, load_tokens, save_queue, save_tokens
from tests.unit.rollout.test_client import Script, answer, make_client

SAVED = Path(__file__).resolve().parents[2] / "fixtures/checkpoint_0.1"
STEP, GROUP = 3, 4
SAMPLING = {
    "logprobs": True,
    "temperature": 1.0,
    "top_p": 1,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "ignore_eos": True,
    "max_tokens": 300,
}
"""The jobs that wrote the fixtures asked with these sampling parameters."""


def config(folder: Path) -> DictConfig:
    return OmegaConf.create({
        "trainer": {"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None},
        "actor_rollout_ref": {"rollout": {"n": GROUP}},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("job", "in_flight", "num_saved", "num_tokens"), [("partial", (8, 0, 0), 32, 4357), ("reorder", (0, 1, 2), 4, 1196)]
)
def test_prompts_and_tokens_are_read(
    job: str, in_flight: tuple[int, int, int], num_saved: int, num_tokens: int, tmp_path: Path
) -> None:
    snapshot = load_queue(config(SAVED / job), STEP)
    assert snapshot is not None
    assert (len(snapshot.ongoing), len(snapshot.deferred), len(snapshot.done)) == in_flight
    saved = load_tokens(snapshot, config(SAVED / job), STEP)
    assert (len(saved), sum(len(call.token_ids) for calls in saved.values() for call in calls)) == (
        num_saved,
        num_tokens,
    )

    restored = PromptQueue.restore(snapshot, Partial(16), 2, lambda: 0.0).statistics()
    assert restored.conserved
    assert (restored.admitted, restored.taken, restored.in_flight) == (snapshot.admitted, 24, sum(in_flight))

    save_queue(snapshot, config(tmp_path), STEP)
    save_tokens(saved, config(tmp_path), STEP)
    assert load_queue(config(tmp_path), STEP) == snapshot
    assert load_tokens(snapshot, config(tmp_path), STEP) == saved


@pytest.mark.parametrize("job", ["partial", "reorder"])
async def test_an_interrupted_response_goes_on_from_its_tokens(job: str) -> None:
    """A question that was asked in 0.1 is recognised when it is asked again."""
    snapshot = load_queue(config(SAVED / job), STEP)
    assert snapshot is not None
    saved = load_tokens(snapshot, config(SAVED / job), STEP)
    call = next(call for calls in saved.values() for call in calls if call.stop_reason is None)
    script = Script(answer([7], "completed", version=STEP))
    client = make_client(script, response_length=300)
    client.on_generation = lambda generation: generation.adopt(call)
    output = await client.generate("q", prompt_ids=list(call.prompt_ids), sampling_params=dict(SAMPLING))
    assert output.token_ids == [*call.token_ids, 7]
    assert script.requests[0]["prompt_ids"] == [*call.prompt_ids, *call.token_ids]
    assert output.extra_fields["version_spans"][:-1] == [[span.version, span.num_tokens] for span in call.spans]
