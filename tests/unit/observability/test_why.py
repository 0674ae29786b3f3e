"""Why a step was slow, what its interruption cost, and which settings would help, from hand-made streams."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from partial_rollout.observability.advice import next_step, would_help
from partial_rollout.observability.events import (
    Choice,
    CommandEnded,
    GateMoved,
    PhaseBegan,
    SegmentEnded,
    StageBegan,
    StepEnded,
)
from partial_rollout.observability.record import RunRecord
from partial_rollout.observability.report import step_charts
from partial_rollout.observability.suggestions import SUGGESTIONS, suggestion
from partial_rollout.observability.summary import summary_lines
from partial_rollout.observability.why import Interruption, Interruptions, step_rows, step_why

KEEPING = "keeping the KV cache of interrupted responses"
PACKAGE = Path(__file__).resolve().parents[3] / "partial_rollout"
STEP = {
    "timing_s/step": 8.0,
    "timing_s/gen": 5.0,
    "timing_s/old_log_prob": 1.0,
    "actor/entropy": 0.5,
    "timing_s/update_actor": 2.0,
    "perf/total_num_tokens": 1000.0,
    "partial_rollout/slot_utilisation": 0.5,
    "partial_rollout/mean_running": 32.0,
    "partial_rollout/response_tokens": 500.0,
    "partial_rollout/reprefilled_tokens": 10.0,
    "partial_rollout/queue/pending": 0.0,
    "response_length/max": 100.0,
}


def record_of(*changed: dict[str, float]) -> RunRecord:
    record = RunRecord()
    for number, more in enumerate(changed, 1):
        metrics: dict[str, float | None] = {**STEP, **more}
        record.add(StepEnded(step=number, total=len(changed) + 1, metrics=metrics))
    return record


def request(
    uid: str, *, version: int, prompt: int, tokens: int, reused: int = 0, aborted: bool = False
) -> SegmentEnded:
    reason = "aborted" if aborted else "stop"
    return SegmentEnded(
        uid=uid, session=0, server="s", version=version, seconds=1.0, prompt_tokens=prompt, tokens=tokens,
        reused_tokens=reused, reason=reason,
    )  # fmt: skip


def closed(step: int, version: int, *, interrupted: int, seconds: float = 0.5) -> GateMoved:
    return GateMoved(step=step, version=version, is_open=False, seconds=seconds, interrupted=interrupted)


def test_a_step_is_charged_with_what_its_interrupted_trajectories_computed_again():
    found = Interruptions()
    for event in (
        request("a", version=4, prompt=10, tokens=30, aborted=True),
        request("b", version=4, prompt=10, tokens=20, aborted=True),
        request("c", version=4, prompt=10, tokens=0, aborted=True),  # had no token, so nothing is computed again
        closed(5, 4, interrupted=3),
        request("a", version=5, prompt=40, tokens=5, reused=32),  # 8 again
        request("b", version=5, prompt=30, tokens=1, aborted=True),  # 30 again, and interrupted again
        closed(6, 5, interrupted=1, seconds=0.25),
        request("b", version=6, prompt=31, tokens=1, reused=30),
        request("c", version=6, prompt=10, tokens=1),
    ):
        found.add(event)
    assert found.of(5) == Interruption(requests=3, drain_s=0.5, tokens_kept=50, tokens_again=38, resumed=2)
    assert found.of(6) == Interruption(requests=1, drain_s=0.25, tokens_kept=1, tokens_again=1, resumed=1)
    assert found.of(7) is None


def test_an_attempt_that_ended_does_not_go_on():
    found = Interruptions()
    for phase in ("ended", "agent"):
        found.add(request("a", version=4, prompt=10, tokens=30, aborted=True))
        found.add(PhaseBegan(uid="a", session=0, phase=phase))
        found.add(request("a", version=5, prompt=10, tokens=30))
    found.add(closed(5, 4, interrupted=2))
    cost = found.of(5)
    assert cost is not None
    assert (cost.tokens_again, cost.resumed) == (0, 0)


def test_a_slow_step_says_what_took_longer_than_around_it():
    slow = {"timing_s/step": 12.0, "timing_s/gen": 9.0, "response_length/max": 400.0}
    record = record_of({}, {}, slow, {}, {})
    said = step_why(record, Interruptions(), 3)
    parts = "generating 4.5, waiting for the longest 4.5, training 3.0 (log-probs 1.0, update 2.0)"
    assert said[0] == f"step 3 took 12.0 s: {parts}"
    assert said[1].startswith("slow: 4.0 s more than the usual step, 8.0 s; ")
    assert re.findall(r"[a-z -]+ \+[\d.]+ s", said[1]) == [" generating +2.0 s", " waiting for the longest +2.0 s"]
    assert said[2] == "its longest response has 400 tokens; around it 100, in the median"
    usual = "the usual step is 8.0 s, the median of up to 20 around it"
    assert step_why(record, Interruptions(), 2)[1] == f"no slow step: {usual}"
    short = record_of({}, {}, slow | {"response_length/max": 110.0}, {}, {})
    assert not any("longest response" in told for told in step_why(short, Interruptions(), 3))
    assert step_why(record, Interruptions(), 9) == []
    rows = step_rows(record, Interruptions(), 3)
    assert [row[0] for row in rows] == ["5", "4", "3"]
    assert rows[2][1:4] == ("12.0", "1.50 x", "generating +2.0 s")


def test_a_step_says_whether_its_engines_were_slow():
    record, found = record_of({}, {}, {}), Interruptions()
    for step, tokens in ((1, 1000), (2, 250), (3, 1000)):
        for uid in ("a", "b"):
            found.add(request(uid, version=step - 1, prompt=9, tokens=tokens))
        found.add(closed(step, step - 1, interrupted=0))
    said = [[told for told in step_why(record, found, step) if "engines:" in told] for step in (1, 2)]
    assert said[1] == ["slow engines: 3.1 tokens/s for each request; in the steps around it 12.5, in the median"]
    assert said[0] == ["engines: 12.5 tokens/s for each request; in the steps around it 7.8, in the median"]
    assert not any("engines:" in told for told in step_why(record, Interruptions(), 2))


def test_the_cost_of_an_interruption_is_its_drain_and_what_was_computed_again():
    record, found = record_of({}), Interruptions()
    found.add(request("a", version=0, prompt=100, tokens=300, aborted=True))
    found.add(closed(1, 0, interrupted=1))
    assert step_why(record, found, 1)[-1].endswith(
        "0.50 s of drain; what 1 trajectories cost is known when their next requests have ended"
    )
    assert step_rows(record, found)[0][5] == "0.50 s so far"
    found.add(request("a", version=1, prompt=400, tokens=5))
    assert step_why(record, found, 1)[-1] == (
        "its end interrupted 1 requests; their 300 new tokens were kept. Cost: 0.50 s of drain; 400 tokens of context "
        "(prompts and earlier tokens too) computed again when 1 of their trajectories went on, about 0.40 s, mostly in "
        "later steps. In all 11% of a usual step"
    )
    assert step_rows(record, found)[0][4:] == ("1", "0.90 s", "32 of 64", "0", "")
    nothing = Interruptions()
    nothing.add(closed(1, 0, interrupted=0))
    assert step_why(record, nothing, 1)[-1] == "its end interrupted nothing; the drain took 0.50 s"


def test_a_cost_is_one_so_far_until_all_interrupted_trajectories_have_gone_on_or_the_run_has_ended():
    def interrupted() -> Interruptions:
        found = Interruptions()
        for uid in ("a", "b"):
            found.add(request(uid, version=0, prompt=100, tokens=300, aborted=True))
        found.add(closed(1, 0, interrupted=2))
        found.add(request("a", version=1, prompt=400, tokens=5))
        return found

    record, found = record_of({}), interrupted()
    assert step_rows(record, found)[0][5] == "0.90 s so far"
    assert "a usual step so far; what 1 trajectories cost is known when" in step_why(record, found, 1)[-1]
    for last in (
        request("b", version=1, prompt=400, tokens=5),
        PhaseBegan(uid="b", session=0, phase="ended"),
        CommandEnded(code=0),
        StageBegan(number=1, total=5, name="configuration"),
    ):
        found = interrupted()
        found.add(last)
        assert not step_rows(record, found)[0][5].endswith("so far")


def test_a_long_interruption_is_compared_with_a_usual_step_and_not_with_a_short_one():
    record, found = record_of({"timing_s/step": 1.0}, {}, {}), Interruptions()
    found.add(closed(1, 0, interrupted=1, seconds=0.8))
    found.add(request("a", version=0, prompt=100, tokens=300, aborted=True))
    found.add(request("a", version=1, prompt=0, tokens=5))
    assert step_why(record, found, 1)[-1].endswith("In all 10% of a usual step")


def timed(*ends: tuple[float, dict[str, float]]) -> list[StepEnded]:
    return [
        StepEnded(t=at_s, step=number, total=9, metrics={**STEP, **more}) for number, (at_s, more) in enumerate(ends, 1)
    ]


def test_seconds_between_steps_are_told_and_generation_in_them_counts_for_the_speed_of_the_engines():
    """Step 2's gate was open for 5 s, and its timer counts the last of them."""
    record, found = RunRecord(), Interruptions()
    short = {"timing_s/step": 4.0, "timing_s/gen": 1.5, "timing_s/drain": 0.5}
    for event in (
        *timed((10.0, {})),
        GateMoved(t=9.0, step=1, version=1, is_open=True),
        request("a", version=1, prompt=9, tokens=800),
        msgspec.structs.replace(closed(2, 1, interrupted=0), t=14.5),
        GateMoved(t=17.0, step=2, version=2, is_open=True),
        *timed((10.0, {}), (18.0, short))[1:],
        request("b", version=2, prompt=9, tokens=800),
        msgspec.structs.replace(closed(3, 2, interrupted=0), t=22.5),
        *timed((10.0, {}), (18.0, short), (26.0, {}))[2:],
    ):
        record.add(event)
        found.add(event)
    assert step_why(record, found, 2)[1:3] == [
        "4.0 s more passed between the end of the step before and the end of step 2; no step counts them: metrics, "
        "logs, validation",
        "engines generated for 5.0 s with the gate open: 4.0 s of them before step 2 began, and no step counts these",
    ]
    assert "engines: 5.0 tokens/s for each request; in the steps around it 5.0, in the median" in step_why(
        record, found, 2
    )
    assert [row[8] for row in step_rows(record, found)] == ["0.0", "4.0", ""]
    assert not any("more passed" in told for told in step_why(record, found, 3))
    assert "3 in 20 s; 4 s between steps are in none" in summary_lines(record)[0]


def test_the_pause_before_a_new_start_is_none_between_steps():
    record = RunRecord()
    first, second = timed((10.0, {}), (500.0, {}))
    for event in (first, StageBegan(t=400.0, number=1, total=5, name="configuration"), second):
        record.add(event)
    assert record.between_s == {}


@pytest.mark.parametrize(
    ("changed", "answer"),
    [
        ({}, "perhaps: in step 3 requests filled 50% of the 64 slots that the run began with (empty ones took 31% of"),
        ({"partial_rollout/slot_utilisation": 0.9}, "no: in step 3 requests filled 90% of the 36 slots"),
        ({"partial_rollout/queue/pending": 4.0}, "no: in step 3 requests filled 50% of the 64 slots"),
        ({"partial_rollout/slots_taken": 0.6}, "perhaps: in step 3 requests filled 50% of the 64 slots"),
        ({"partial_rollout/slots_taken": 0.9}, "no: in step 3 requests filled 50% of the 64 slots"),
        ({"partial_rollout/waited": 0.5}, "perhaps: in step 3 requests filled 50% of the 64 slots"),
        ({"partial_rollout/waited": 0.01}, "no: in step 3 requests filled 50% of the 64 slots"),
    ],
)
def test_a_deeper_queue_helps_where_slots_are_empty_for_want_of_prompts(changed: dict[str, float], answer: str):
    """The first two steps, in which the queue fills, do not count."""
    assert dict(would_help(record_of({}, {}, changed)))["a deeper queue"].startswith(answer)


def test_a_deeper_queue_hardly_helps_where_prompts_were_pending_in_half_of_the_steps():
    pending = {"partial_rollout/queue/pending": 4.0}
    answer = dict(would_help(record_of({}, {}, {}, pending, {}, pending)))["a deeper queue"]
    assert answer.startswith("hardly: in steps 3 to 6 requests filled 50% of the 64 slots")
    assert answer.endswith(
        "pending at the end of 2 of 4 steps; in the other steps slots were empty though prompts were pending"
    )


def chosen(record: RunRecord, key: str, value: object) -> RunRecord:
    record.add(Choice(step=0, key=key, before="auto", after=value, reason="because"))
    return record


def test_after_the_last_step_all_that_workers_had_begun_is_pending_again_which_says_nothing():
    """Neither the table, nor the curve, nor the advice has it."""
    record = RunRecord()
    for number in range(1, 6):
        metrics: dict[str, float | None] = {**STEP, "partial_rollout/queue/pending": 23.0 if number == 5 else 0.0}
        record.add(StepEnded(step=number, total=5, metrics=metrics))
    assert [row[7] for row in step_rows(record, Interruptions())] == ["", "0", "0", "0", "0"]
    assert (
        "at the end of 2 of 2 steps (the last step of a run does not tell)"
        in dict(would_help(record))["a deeper queue"]
    )
    assert not any("last step: 23" in chart for chart in step_charts([record]))
    only = RunRecord(steps={5: record.steps[5]})
    assert dict(would_help(only))["a deeper queue"].startswith("not known: ")


def test_a_depth_that_auto_chose_a_few_steps_ago_is_told_as_such():
    said = []
    for step in (8, 1):
        record = record_of(*[{}] * 12)
        record.add(Choice(step=step, key="partial_rollout.prefetch_factor", before=2, after=3, reason="because"))
        said.append(dict(would_help(record))["a deeper queue"])
    assert ["few steps have had them yet" in told for told in said] == [True, False]


def test_with_abort_a_deeper_queue_hardly_helps():
    aborting = chosen(record_of({}), "partial_rollout.tail.interrupt_mode", "abort")
    assert dict(would_help(aborting))["a deeper queue"].startswith("hardly: ")


def test_kept_kv_helps_where_much_is_computed_again():
    assert dict(would_help(record_of({})))[KEEPING] == (
        "no: for 100 tokens of trained responses 2 of context were computed again in step 1 (this took 0% of the GPU "
        "seconds)"
    )
    much = {"partial_rollout/reprefilled_tokens": 400.0, "partial_rollout/kv_usage": 0.02}
    assert "interrupt_mode=auto" in dict(would_help(record_of(much)))[KEEPING]
    reusing = chosen(record_of(much), "partial_rollout.tail.interrupt_mode", "reuse_kv")
    assert "never more than 2% full, so nothing was evicted" in dict(would_help(reusing))[KEEPING]
    full = chosen(
        record_of(much | {"partial_rollout/kv_usage": 0.99}), "partial_rollout.tail.interrupt_mode", "reuse_kv"
    )
    assert "KV was evicted" in dict(would_help(full))[KEEPING]


def test_the_one_thing_to_try_is_none_that_would_not_help():
    """The first steps, in which the queue filled and much was computed again, do not count for either of the two."""
    late = {"partial_rollout/slot_utilisation": 0.9}
    early = {"partial_rollout/slot_utilisation": 0.1, "partial_rollout/reprefilled_tokens": 9000.0}
    record = record_of(early, early, late, late)
    assert [said.partition(":")[0] for _, said in would_help(record)] == ["no", "no"]
    assert next_step(record).startswith("compare with the same command")
    empty = record_of({}, {}, {}, {})
    assert next_step(empty) in dict(would_help(empty))["a deeper queue"].replace("; a higher", ": a higher")
    aborting = chosen(record_of({}), "partial_rollout.tail.interrupt_mode", "abort")
    assert next_step(aborting).startswith("compare with the same command")


def test_what_has_cost_most_is_tried_first():
    both = {"partial_rollout/reprefilled_tokens": 400.0, "partial_rollout/kv_usage": 0.02}
    assert next_step(record_of(both)).startswith("perhaps: in step 1 requests filled 50% of the 64 slots")
    again = both | {"partial_rollout/slot_utilisation": 0.84, "partial_rollout/reprefilled_tokens": 2000.0}
    assert next_step(record_of(again)).startswith(
        "perhaps: for 100 tokens of trained responses 400 of context were computed again"
    )


def test_verls_own_modes_have_no_such_settings():
    record = RunRecord()
    record.add(StepEnded(step=1, total=1, metrics={"timing_s/step": 3.0, "timing_s/gen": 2.0}))
    assert would_help(record) == []
    assert step_why(record, Interruptions(), 1) == ["step 1 took 3.0 s: generating, waiting included 2.0, idle 1.0"]


def test_each_suggestion_is_for_a_message_that_some_code_writes():
    """The code is ours, or that of verl, vLLM or Ray, whose names are in the message."""
    others = {"RotaryEmbedding: Failed to load weights"}
    texts = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "suggestions.py")
    joined = re.sub(r'"\s+f?"', "", texts)
    for pattern in SUGGESTIONS.keys() - others:
        words = re.split(r"\\d\+|\.\*|\|", pattern.replace("\\", ""))
        assert any(word.strip(" ()") in joined for word in words), pattern


def test_a_suggestion_is_that_of_the_first_pattern():
    assert suggestion("engine 3 holds 4 requests and has generated nothing for 31 s").endswith("timeouts.stall_s")
    assert suggestion("something that nobody knows") == ""
