"""Numbers in the documents are those of the stored results."""

from __future__ import annotations

import pytest

from scripts.render_numbers import NumbersError, checked_lines, difference, fill, look_up, pattern

LINES = checked_lines()


@pytest.mark.parametrize("line", LINES, ids=[f"{document}-{text[:40]}" for document, text, _ in LINES])
def test_a_document_says_what_its_file_has(line):
    assert difference(*line) is None, "run: python -m scripts.render_numbers"


def test_a_number_that_was_changed_by_hand_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.render_numbers.ROOT", tmp_path)
    monkeypatch.setattr("scripts.render_numbers.stored", lambda _: {"summary": {"sync": {"gen_s": 2.8147}}})
    (tmp_path / "page.md").write_text("| verl `sync` | 2.91 |")
    said = difference("page.md", "| verl `sync` | {a:summary.sync.gen_s;.2f} |", {"a": "file"})
    assert said is not None
    assert "stored | verl `sync` | 2.81 |" in said


def test_a_line_that_a_document_lost_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.render_numbers.ROOT", tmp_path)
    (tmp_path / "page.md").write_text("nothing")
    assert "0 places" in str(difference("page.md", "| {a:x;.2f} |", {"a": "file"}))


def test_keys_may_hold_dots_and_spaces():
    assert look_up({"abort, prefetch 2": {"0.5": [1, 2]}}, "abort, prefetch 2.0.5.1") == 2
    with pytest.raises(NumbersError, match="there is: known"):
        look_up({"known": 1}, "unknown")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("a:x;.1f", "6.0"),
        ("a:x / b:y * a:x;,.0f", "18"),
        ("a:x;k,.0f", "6,000"),
        ("b:list;list.1f", "1.0, 2.5"),
    ],
)
def test_a_place_is_filled(place, text, monkeypatch):
    files = {"one": {"x": 6.0}, "two": {"y": 2, "list": [1, 2.5]}}
    monkeypatch.setattr("scripts.render_numbers.stored", files.__getitem__)
    assert fill(place, {"a": "one", "b": "two"}) == text


def test_line_breaks_of_the_document_do_not_count():
    assert pattern("it takes {a:x;.2f} of the time").search("it takes\n0.83 of the time")


def test_values_of_a_list_are_counted_one_by_one(monkeypatch):
    files = {"one": {"x": [6.0, 4.0]}, "two": {"y": [2.0, 8.0], "z": 2.0}}
    monkeypatch.setattr("scripts.render_numbers.stored", files.__getitem__)
    alias = {"a": "one", "b": "two"}
    assert (fill("a:x / b:y;least.2f", alias), fill("a:x / b:y;most.2f", alias)) == ("0.50", "3.00")
    assert fill("a:x / b:z;list.1f", alias) == "3.0, 2.0"
    assert fill("b:z;percent.0f", alias) == "200"


def test_steps_from_several_first_ones_are_a_list():
    staleness = {"partial_rollout/staleness_steps/mean": 0.0, "partial_rollout/staleness_steps/max": 0.0}
    steps = [
        {"timing_s/gen": float(n), "timing_s/update_weights": float(n), "perf/total_num_tokens": 10, **staleness}
        for n in range(1, 7)
    ]
    result = {
        "workload": {"batch": 1, "group": 1},
        "engine": {"prompt_tokens": 0},
        "jobs": [{"mode": "sync", "steps": steps}],
    }
    assert look_up(result, "from_3-5.sync.num_steps") == [4, 2, 2]
    assert look_up(result, "from_3.sync.num_steps") == 4
    assert look_up(result, "from_3.sync.update_weights_s") == 4.5
