"""Settings with drafts: engines that have too many slots for their CUDA graphs are told, with what to set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.doctor import diagnose
from partial_rollout.settings.auto import choose
from partial_rollout.settings.drafts import SUFFIX_DRAFTS, seldom_drafts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.settings.support import Composed

ROLLOUT = "actor_rollout_ref.rollout"
SPECULATION = f"{ROLLOUT}.engine_kwargs.vllm.speculative_config"
SIZES = f"{ROLLOUT}.cudagraph_capture_sizes"
VLLMS = f"{ROLLOUT}.engine_kwargs.vllm"
USUAL: dict[str, Any] = {
    "trainer.device": "cuda",
    "trainer.n_gpus_per_node": 1,
    f"{ROLLOUT}.enforce_eager": False,
    f"{ROLLOUT}.max_num_seqs": 1024,
    "partial_rollout.num_slots": 256,
    "partial_rollout.slots.adaptive": False,
    f"{SPECULATION}.method": "custom_class",
    f"{SPECULATION}.model": SUFFIX_DRAFTS,
    f"{SPECULATION}.num_speculative_tokens": 3,
}
"""A batch of 32 prompts x 8 responses in one engine, with three drafts."""


def test_the_numbers_and_the_remedy_are_told(composed: Composed):
    assert seldom_drafts(composed(USUAL)) == (
        "an engine drafts only while it runs at most 128 requests, because its largest CUDA graph has 512 tokens "
        "(vLLM's default, with which GPUs of compute capability 10 have 1024) and a request with 3 drafts takes 4. The "
        "slots let it run 256: it drafts seldom or never, and each step takes longer than in an engine without drafts; "
        f"let the largest value of {SIZES} be at least 1024, or leave out {SPECULATION} "
        "(docs/modes.md#drafts-from-earlier-responses)"
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"partial_rollout.num_slots": 128}, None),
        ({"partial_rollout.num_slots": 129}, "at most 128 requests"),
        ({"trainer.n_gpus_per_node": 2}, None),  # 128 for each of two engines
        ({"trainer.n_gpus_per_node": 2, "partial_rollout.num_slots": 257}, "let it run 129"),
        ({f"{ROLLOUT}.max_num_seqs": 128}, None),
        ({f"{ROLLOUT}.max_num_seqs": None}, "let it run 256"),
        ({f"{VLLMS}.max_num_seqs": 128}, None),
        ({f"{SPECULATION}.num_speculative_tokens": 1}, None),
        ({f"{SPECULATION}.num_speculative_tokens": 4}, "at most 102 requests"),
        ({f"{SPECULATION}.model": "mine.Drafts"}, None),
        ({SPECULATION: None}, None),
        ({SPECULATION: '{"method": "ngram"}'}, None),
        ({SIZES: [1, 1024, 8]}, None),
        ({SIZES: [1, 1023, 8]}, "at most 255 requests, because its largest CUDA graph has 1023 tokens (the largest"),
        ({SIZES: [8, 64]}, "at most 16 requests"),
        # vLLM leaves out a graph above the tokens of a step.
        ({SIZES: [8, 1024], f"{ROLLOUT}.max_num_batched_tokens": 1000}, "at most 2 requests"),
        (
            {f"{ROLLOUT}.max_num_batched_tokens": 256},
            f"has 256 tokens ({ROLLOUT}.max_num_batched_tokens=256) and .* be at least 1024 and "
            f"{ROLLOUT}.max_num_batched_tokens, above which there is no graph, too",
        ),
        ({f"{VLLMS}.max_num_batched_tokens": 256}, f"has 256 tokens ({VLLMS}.max_num_batched_tokens=256) and "),
        ({f"{ROLLOUT}.enforce_eager": True}, None),
        ({f"{VLLMS}.enforce_eager": True}, None),
        ({f"{VLLMS}.compilation_config": {"cudagraph_mode": "NONE"}}, None),
        ({f"{VLLMS}.compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "at most 128 requests"),
        ({f"{VLLMS}.compilation_config": {"cudagraph_capture_sizes": [1, 1024]}}, None),
        ({f"{VLLMS}.compilation_config": {"cudagraph_capture_sizes": [1, 256]}}, "at most 64 requests"),
        ({f"{VLLMS}.cudagraph_capture_sizes": [1, 256]}, "at most 64 requests"),
        # What the largest graph is cannot be told, or not without more of vLLM's rules.
        ({f"{VLLMS}.compilation_config": '{"cudagraph_mode": "PIECEWISE"}'}, None),
        ({f"{VLLMS}.compilation_config": {"max_cudagraph_capture_size": 256}}, None),
        ({f"{VLLMS}.max_cudagraph_capture_size": 256}, None),
    ],
)
def test_engines_that_seldom_draft_are_told(composed: Composed, changes: dict[str, Any], told: str | None):
    said = seldom_drafts(composed(USUAL | changes))
    assert bool(said) == (told is not None), said
    for part in (told or "").split(" .* "):
        assert part in said


@pytest.mark.parametrize("adaptive", [True, "auto"])
@pytest.mark.parametrize(
    ("most", "told"),
    [
        (1024, "be at least 1024 (3072 with partial_rollout.slots.adaptive=true, which may let it run 768), or"),
        (512, "be at least 1024 (2048 with partial_rollout.slots.adaptive=true, which may let it run 512), or"),
        (256, "be at least 1024, or"),
    ],
)
def test_adaptive_slots_need_larger_graphs(composed: Composed, adaptive: bool | str, most: int, told: str):
    changes = {
        "partial_rollout.slots.adaptive": adaptive,
        "partial_rollout.num_slots": None,
        f"{ROLLOUT}.max_num_seqs": most,
        "data.train_batch_size": 32,
        f"{ROLLOUT}.n": 8,
        "partial_rollout.prefetch_factor": 3.0,
    }
    assert told in seldom_drafts(composed(USUAL | changes))


OPEN = {
    "partial_rollout.slots.adaptive": "auto",
    "partial_rollout.slots.least": None,
    "partial_rollout.num_slots": None,
    "partial_rollout.tail.interrupt_mode": "reuse_kv",
    "data.train_batch_size": 32,
    f"{ROLLOUT}.n": 8,
}


@pytest.mark.parametrize(
    ("changes", "drafted"),
    [
        ({SIZES: [1, 1024]}, 256),
        ({SIZES: [1, 1023]}, None),  # drafts end with the slots to start with already
        ({SIZES: [1, 3071]}, 767),
        ({SIZES: [1, 3072]}, None),
        ({SIZES: [1, 1024], "trainer.n_gpus_per_node": 2}, 256),  # of up to 384 in each engine
        ({SIZES: [1, 1536], "trainer.n_gpus_per_node": 2}, None),
        ({SIZES: [1, 1024], SPECULATION: None}, None),
        ({SIZES: [1, 1024], "partial_rollout.slots.least": 256}, None),  # set by hand: slots are to be adaptive
        ({SIZES: [1, 1024], f"{ROLLOUT}.enforce_eager": True}, None),
    ],
)
def test_auto_adds_no_slots_that_would_end_the_drafts(composed: Composed, changes: dict[str, Any], drafted: int | None):
    config = composed(USUAL | OPEN | changes)
    (choice,) = [choice for choice in choose(config) if choice.key == "partial_rollout.slots.adaptive"]
    assert choice.value is (drafted is None), choice
    if drafted is not None:
        assert choice.why == f"an engine drafts for {drafted} requests at most, and slots could become more"


@pytest.mark.slow
def test_doctor_tells_it(tmp_path: Path):
    (tmp_path / "train.parquet").touch()
    paths = [f"{key}={tmp_path / 'train.parquet'}" for key in ("data.train_files", "data.val_files")]
    sizes = ["data.train_batch_size=32", f"{ROLLOUT}.n=8", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    sizes += ["trainer.n_gpus_per_node=1", f"{ROLLOUT}.tensor_model_parallel_size=1"]
    words = [*paths, *sizes, f"actor_rollout_ref.model.path={tmp_path}", f"{ROLLOUT}.name=vllm"]
    words += ["actor_rollout_ref.actor.use_dynamic_bsz=True"]
    words += [f"+{SPECULATION}={{method:custom_class,model:{SUFFIX_DRAFTS},num_speculative_tokens:3}}"]
    report = diagnose(words)
    assert not report.is_blocked, report.blocked
    (found,) = [text for heading, text in report.lines if heading == "look at"]
    assert found.startswith("an engine drafts only while it runs at most 128 requests, ")
    assert "look at" not in [heading for heading, _ in diagnose([*words, f"{SIZES}=[1,8,1024]"]).lines]
