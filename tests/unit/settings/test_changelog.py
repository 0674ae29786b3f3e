"""The changelog names every key that came or went since release 0.1."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from partial_rollout.errors import ConfigError
from partial_rollout.settings.block import RETIRED_KEYS, field_keys, refuse_retired

if TYPE_CHECKING:
    from pathlib import Path

KEYS_OF_0_1 = (
    "prefetch_factor num_slots max_attempts stream_interval event_log manager.name manager.namespace "
    "timeouts.start_s timeouts.resources_s timeouts.drain_s timeouts.resume_s timeouts.batch_s timeouts.call_s "
    "packing.planner packing.token_budget packing.per_rank_batch_size packing.cost_model tail.policy "
    "tail.gen_batch_size tail.max_deferred_per_round tail.max_deferrals tail.max_staleness tail.interrupt_mode "
    "tail.offload_gib tail.past_staleness tail.boundary slots.adaptive slots.least slots.most slots.kv_high "
    "slots.interval_s costs.decode_step_ms costs.decode_request_ms costs.prefill_tokens_per_s weights.backend "
    "weights.timeout_s weights.bucket_mb weights.validate weights.relaunches "
)
KEYS = set(field_keys())
OLD = set(KEYS_OF_0_1.split())
GONE = sorted(OLD - KEYS)


@pytest.fixture(scope="module")
def text(repository: Path) -> str:
    """What is written of release 0.2.0."""
    return (repository / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]


def expanded(names: str) -> set[str]:
    """The keys in backticks; `a.{b,c}` stands for two."""
    found: set[str] = set()
    for name in re.findall(r"`([^`]+)`", names):
        inner = re.search(r"\{(.+)\}", name)
        found |= {name.replace(inner[0], part) for part in inner[1].split(",")} if inner else {name}
    return found


def test_the_new_keys_are_named_and_counted(text: str) -> None:
    counts = re.search(r"(\d+) keys remain of (\d+), and (\d+) are new: ([^\n]+(?:\n  [^\n]+)*)", text)
    assert counts is not None
    new = KEYS - OLD
    assert [int(number) for number in counts.groups()[:3]] == [len(KEYS) - len(new), len(OLD), len(new)]
    assert expanded(counts[4]) == new


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_went_is_refused_and_the_changelog_says_what_to_use_instead(key: str, text: str) -> None:
    block = key.partition(".")[0]
    with pytest.raises(ConfigError, match="was retired in release 0.2"):
        refuse_retired(key if key in RETIRED_KEYS else block)
    retired = [line.split("|")[1] for line in text.split("### Changed")[0].splitlines() if line.startswith("| ")]
    assert any({key, key.rpartition(".")[2], block} & _last_parts(row) for row in retired)


def _last_parts(row: str) -> set[str]:
    """Keys of a row, with and without `partial_rollout.`, without values."""
    keys = {name.partition("=")[0].removeprefix("partial_rollout.") for name in expanded(row)}
    return keys | {key.rpartition(".")[2] for key in keys if "." not in key}
