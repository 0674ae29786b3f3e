"""What the replay of recorded responses says of drafts, on texts whose answer is known."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from partial_rollout.advise.acceptance import (
    CONFIGS,
    Config,
    Group,
    Index,
    Response,
    acceptance,
    carried,
    draft,
    main,
    predicted,
    read_prompts,
    replay_prompt,
    tail,
)
from partial_rollout.advise.result import read_result
from partial_rollout.core import rollout_log
from partial_rollout.core.rollout_log import Admitted, Finished, Opened, Output, Taken, encode, frame, pack_ids
from partial_rollout.types import TrajectorySummary
from tests.unit.advise.test_drafts import CURVE, prices

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [1, 2, 3]


def group(epoch: int, *responses: list[int], step: int | None = None) -> Group:
    recorded = [Response(tokens, [-0.1] * len(tokens), epoch) for tokens in responses]
    return Group(epoch + 1 if step is None else step, epoch, PROMPT, recorded)


def random_tokens(seed: int, number: int = 60) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10**6) for _ in range(number)]


def row(rows: list[dict], name: str) -> dict:
    (found,) = (each for each in rows if each["slice"] == name)
    return found


@pytest.mark.parametrize("config", CONFIGS)
def test_every_recorded_token_is_emitted_once_and_a_draft_changes_none(config: Config):
    words = [[7, 8, 9], [4], [5, 5]]
    rng = random.Random(1)
    texts = [[token for _ in range(n) for token in rng.choice(words)] for n in (1, 20, 40)]
    prompt = [group(0, *texts), group(1, *reversed(texts)), group(2, texts[0], [6], texts[2])]
    for each, responses in zip(prompt, replay_prompt(prompt, config), strict=True):
        for response, ticks in zip(each.responses, responses, strict=True):
            assert sum(ticks.emitted) == len(response.tokens) - 1
            assert ticks.positions == [1 + sum(ticks.emitted[:tick]) for tick in range(len(ticks.emitted))]
            assert all(
                right <= checked <= config.drafts for right, checked in zip(ticks.right, ticks.checked, strict=True)
            )


@pytest.mark.parametrize("drafts", [3, 5])
def test_a_response_repeated_in_the_next_epoch_is_drafted_whole(drafts: int):
    text = random_tokens(0)
    for source in ("epoch-1", "earlier", "all"):
        _, (ticks,) = replay_prompt([group(0, text), group(1, text)], Config(source, drafts))
        assert ticks.emitted == [drafts + 1] * (59 // (drafts + 1)) + [59 % (drafts + 1)] * bool(59 % (drafts + 1))


def test_random_tokens_bring_one_token_a_step():
    prompt = [group(epoch, *(random_tokens(10 * epoch + n) for n in range(3))) for epoch in range(2)]
    assert row(acceptance([prompt], Config("all")), "all")["tokens_a_step"] == 1.0


def test_each_source_has_only_its_own_text():
    text, other = random_tokens(0), random_tokens(1)
    prompt = [group(0, text), group(1, other), group(2, text)]

    def late(source: str) -> float:
        return row(acceptance([prompt], Config(source)), "epoch 3")["tokens_a_step"]

    assert (late("epoch-2"), late("earlier")) == (3.933, 3.933)
    assert (late("epoch-1"), late("own"), late("siblings"), late("whole")) == (1.0,) * 4
    assert row(acceptance([prompt], Config("earlier")), "epoch 1")["drafted"] == 0.0


def test_siblings_are_seen_as_far_as_they_were_and_whole_ones_to_their_end():
    """Equal siblings run side by side, so none is ahead; a whole one is."""
    text = random_tokens(0)
    assert [row(acceptance([[group(0, text, text)]], Config(source)), "all")["tokens_a_step"] for source in
            ("siblings", "whole")] == [1.0, 3.933]  # fmt: skip


def test_a_response_that_repeats_itself_is_its_own_source():
    ((ticks,),) = replay_prompt([group(0, [7, 8, 9] * 10)], Config("own"))
    assert ticks.emitted[:4] == [1, 1, 1, 1]
    assert set(ticks.emitted[4:-1]) == {4}


def test_a_token_is_counted_once():
    """At the third 7, 8 the newest of two continuations that were seen once each is the right one."""
    ((ticks,),) = replay_prompt([group(0, [7, 8, 3, 7, 8, 4, 7, 8, 4])], Config("own"))
    assert ticks.right == [0, 0, 0, 1, 0, 0, 1]


def test_a_draft_follows_the_most_frequent_token_the_newest_of_equals_and_a_share():
    texts = [[1, 2, 5, 6], [1, 2, 5, 7], [1, 2, 4]]
    index = Index.of(texts, least=2)
    assert draft([index], [0, 1, 2], Config("all")) == [5, 7]
    assert draft([index], [0, 2], Config("all")) == []
    assert draft([Index.of([[1, 2, token] for token in range(3, 7)], least=2)], [1, 2], Config("all")) == []
    assert draft([Index.of([[1, 2, 3, 4, 5, 6]], least=1)], [2], Config("all", 3, least=1)) == [3, 4, 5]


def test_the_tail_has_only_ticks_with_few_unfinished_responses_of_the_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("partial_rollout.advise.acceptance.TAILS", (1, 2))
    short, long = random_tokens(0, 11), random_tokens(1, 41)
    prompts = [[group(0, short, step=1)], [group(0, long, step=1)]]
    rows = acceptance(prompts, Config("own"))
    assert (row(rows, "all")["steps"], row(rows, tail(1))["steps"], row(rows, tail(2))["steps"]) == (50, 30, 50)
    apart = [[group(0, short, step=1)], [group(0, long, step=2)]]
    assert row(acceptance(apart, Config("own")), tail(1))["steps"] == 50


def finished(uid: str, session: int, tokens: list[int]) -> Finished:
    key = f"{uid}_{session}"
    output = Output(pack_ids(PROMPT), pack_ids(tokens), b"", rollout_log.pack_log_probs([-0.5] * len(tokens)), b"")
    summary = TrajectorySummary(f"{key}_0", len(PROMPT), len(tokens), min_version=4, max_version=4)
    return Finished(key=key, claim_id=0, outputs=[output], summaries=[summary])


def write_log(folder: Path, *more: Taken) -> None:
    opened = Opened(format=1, number=1, role="any", base_step=0)
    admitted = [
        Admitted(first=2, uids=["c"], prompts=["0:p"]),
        Admitted(first=0, uids=["a", "b"], prompts=["0:p", "1:q"]),
    ]
    taken = [Taken(step=1, groups=[rollout_log.Group("a", [])]), Taken(step=2, groups=[rollout_log.Group("c", [])])]
    worker = [finished(uid, session, [5, 6, 7]) for uid in "abc" for session in (1, 0)]
    for name, records in (
        ("0001-trainer.log", [opened, *admitted, *taken, *more]),
        ("0001-worker.log", [opened, *worker]),
    ):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"".join(frame(encode(each)) for each in records))


def test_a_log_is_read_by_prompt_and_epoch(tmp_path: Path):
    """Prompts are counted in the order of admission, not of the records; what was not trained is left out."""
    write_log(tmp_path)
    ((first, second),) = read_prompts(tmp_path)
    assert [(each.step, each.epoch, each.prompt, len(each.responses)) for each in (first, second)] == [
        (1, 0, PROMPT, 2),
        (2, 1, PROMPT, 2),
    ]
    assert second.responses[0] == ([5, 6, 7], pytest.approx([-0.5] * 3), 4)
    with pytest.raises(SystemExit, match="has no trained group"):
        read_prompts(tmp_path / "empty")


def test_the_command_stores_rows_and_says_what_drafts_gain(tmp_path: Path):
    write_log(tmp_path / "log")
    main([str(tmp_path / "log"), "--quick", "--processes", "1", "--json", str(tmp_path / "found.json")])
    found = read_result(tmp_path / "found.json")
    assert found["log"]["tokens"] == 12
    assert row([each for each in found["rows"] if each["source"] == "all"], "all")["tokens_a_step"] == 2.0
    assert found["tokens_a_step"]["all 3 2"]["epoch 1"] == 1.0
    assert "rows" not in json.loads((tmp_path / "found.json").read_text())


def test_a_part_of_the_prompts_is_the_log_of_all_that_is_stored(tmp_path: Path):
    write_log(tmp_path / "log", Taken(step=3, groups=[rollout_log.Group("b", [])]))
    logs = []
    for words in ([], ["--prompts", "1"]):
        main([str(tmp_path / "log"), "--quick", "--processes", "1", "--json", str(tmp_path / "found.json"), *words])
        logs.append(read_result(tmp_path / "found.json")["log"])
    assert [(log["prompts"], log["groups"], log["tokens"]) for log in logs] == [(2, 3, 18), (1, 2, 12)]


def test_slices_by_entropy_and_by_versions_apart():
    """The second epoch's group is three versions after the first's and has more entropy; the first does not count."""
    text = random_tokens(0)
    first = Group(1, 0, PROMPT, [Response(text, [-0.01] * 60, 0)])
    second = Group(2, 1, PROMPT, [Response(text, [-0.12] * 60, 3)])
    rows = acceptance([[first, second]], Config("earlier"))
    by_name = {each["slice"]: each["steps"] for each in rows}
    assert {name: steps for name, steps in by_name.items() if name.startswith(("nats", "apart"))} == {
        "nats 0.1 to 0.15": 15,
        "apart 1 to 9": 15,
    }


def test_more_entropy_moves_tokens_out_of_the_highest_bin():
    """Drafts are right half of the time where a token was unsure, and always where it was sure."""
    log_probs = np.log([0.3, 0.7, 0.95] + [1.0] * 97)
    prompt = [Group(1, 0, PROMPT, [Response([0] * 100, list(log_probs), 0)])]
    names = ("0 to 0.5", "0.5 to 0.9", "0.9 to 0.99", "0.99 to inf")
    rows = [
        {"source": "all", "drafts": 1, "least": 2, "slice": f"probability {name}", "drafted": 1.0, "first_right": share}
        for name, share in zip(names, (0.5, 0.5, 0.5, 1.0), strict=True)
    ]
    found = carried([prompt], rows, Config("all", 1))["tokens_a_step"]
    assert found["0.016"] == {"all_bins": pytest.approx(1.985, abs=0.01), "lowest_bin": pytest.approx(1.985, abs=0.01)}
    assert found["0.4"]["all_bins"] == pytest.approx(2 - 0.5 * 0.03 * 0.4 / 0.0161, abs=0.01)
    assert found["0.4"]["lowest_bin"] == pytest.approx(2 - 0.5 * (0.03 + (0.4 - 0.0161) / 1.204), abs=0.01)
    assert found["0.6"]["all_bins"] is None
    assert carried([prompt], rows[1:], Config("all", 1)) == {}


def test_prices_are_paid_for_the_tokens_of_the_ticks_that_the_gate_lets_draft():
    rows = [
        {"source": source, "drafts": 3, "least": least, "slice": name, "tokens_a_step": tokens}
        for source, least, name, tokens in (
            ("all", 2, "all", 1.0),
            ("all", 2, tail(64), 2.0),
            ("all", 4, "all", 3.0),
            ("own", 2, tail(64), 4.0),
        )
    ]
    curve = {**CURVE, "engine": {**CURVE["engine"], "shape": "tiny"}}
    found = [
        each for each in predicted(rows, prices(0.0), curve) if each["variant"] == "three" and each["mode"] == "sync"
    ]
    assert {(each["gate"], each["tokens_a_step"]) for each in found} == {(16, 1.0), (64, 2.0), (256, 1.0)}
    assert all((each["time_ratio"] < 0.9) == (each["gate"] == 64) for each in found)
    assert np.isclose(found[0]["time_ratio"], 1.0)
