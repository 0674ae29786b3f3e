"""What a shell shows of a run: on a terminal, in a file, while it starts, trains, fails and ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from partial_rollout import watch
from partial_rollout.errors import DataError
from partial_rollout.observability.advice import next_step
from partial_rollout.observability.events import (
    AnyEvent,
    Choice,
    CommandEnded,
    EventReader,
    EventWriter,
    Fault,
    GateMoved,
    SegmentEnded,
    StageBegan,
    StepEnded,
    TrajectoryEnded,
    Warned,
)
from partial_rollout.observability.foreign import Message
from partial_rollout.observability.live import CLEAR_LINE, LiveView, Screen
from partial_rollout.observability.record import RunRecord, load, metrics_steps
from partial_rollout.observability.stages import usual_seconds
from partial_rollout.observability.step_line import step_line
from partial_rollout.observability.summary import summary_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

OURS: dict[str, float] = {
    "critic/score/mean": 0.25,
    "timing_s/step": 8.0,
    "timing_s/gen": 4.0,
    "timing_s/old_log_prob": 1.0,
    "actor/entropy": 0.5,
    "timing_s/update_actor": 2.0,
    "timing_s/update_weights": 0.5,
    "perf/total_num_tokens": 4000.0,
    "partial_rollout/mean_running": 16.0,
    "partial_rollout/slot_utilisation": 0.5,
    "partial_rollout/staleness_steps/mean": 0.8,
    "partial_rollout/staleness_steps/max": 2.0,
    "partial_rollout/stale_token_share": 0.4,
    "partial_rollout/reprefilled_tokens": 120.0,
    "partial_rollout/response_tokens": 3000.0,
    "partial_rollout/interrupted": 5.0,
    "partial_rollout/resumed_trajectories": 2.0,
    "partial_rollout/queue/pending": 1.0,
    "partial_rollout/queue/ongoing": 16.0,
    "partial_rollout/queue/done": 0.0,
    "partial_rollout/queue/num_dropped": 1.0,
    "partial_rollout/dropped/prompt_too_long": 1.0,
}
USE = ("partial_rollout/mean_running", "partial_rollout/slot_utilisation")
LINE = (
    "step 3/9 | reward 0.250 | 8.0 s: generation 4.0, log-probs 1.0, update 2.0, weights 0.5, rest 0.5 | "
    "500 tokens/s | 16 of 32 slots in use | staleness 0.8 | 120 tokens computed again | interrupted 5, resumed 2 | "
    "queue pending 1 ongoing 16 done 0"
)


class Terminal(io.StringIO):
    """What a terminal is sent."""

    def isatty(self) -> bool:
        return True


def stage(number: int, t: float) -> StageBegan:
    names = ("configuration", "Ray", "model", "engines", "first step")
    return StageBegan(t=t, number=number, total=5, name=names[number - 1])


def steps(count: int, **changed: float) -> list[StepEnded]:
    return [StepEnded(t=100.0 + n, step=n, total=count, metrics={**OURS, **changed}) for n in range(1, count + 1)]


def recorded(*events: AnyEvent) -> RunRecord:
    record = RunRecord("run")
    for event in events:
        record.add(event)
    return record


def shown(events: Sequence[AnyEvent], out: io.StringIO | None = None, now_s: float = 50.0) -> str:
    out = out or io.StringIO()
    view = LiveView(Screen(out), RunRecord(), {"engines": (60.0, 120.0)}, clock=lambda: now_s)
    for event in events:
        view.add(event)
        view.tick()
    return out.getvalue()


def write(folder: Path, role: str, *events: AnyEvent) -> None:
    writer = EventWriter(folder, role)
    for event in events:
        writer.write(event)
    writer.close()


def test_a_step_is_one_line_with_our_modes_parts_and_without_them() -> None:
    assert step_line(3, 9, OURS) == LINE
    assert "| 16 of 48 slots in use |" in step_line(3, 9, OURS | {"partial_rollout/slots/num": 48.0})
    assert "| 0 slots in use |" in step_line(3, 9, OURS | dict.fromkeys(USE, 0.0))
    assert step_line(3, 9, OURS | {"training/filter_groups/evicted_samples": 7.0}) == LINE.replace(
        " | queue", " | 7 groups without spread | queue"
    )
    verls = {name: value for name, value in OURS.items() if not name.startswith("partial_rollout/")}
    assert step_line(3, None, verls) == LINE.replace("/9", "", 1).split(" | 16 of")[0]


def test_in_a_file_each_stage_says_that_it_begins_and_what_it_took() -> None:
    text = shown([stage(3, 10.0), stage(4, 12.0), stage(4, 13.0), stage(3, 14.0), stage(5, 53.0), *steps(1)])
    assert text.splitlines()[:-1] == [
        "[3/5] model ...",
        "[3/5] model, 2 s",
        "[4/5] engines ... (usually 60 to 120)",
        "[4/5] engines, 41 s (usually 60 to 120)",
        "[5/5] first step ...",
        "[5/5] first step, 48 s",
    ]
    assert "\r" not in text
    assert "\x1b" not in text


def test_what_a_stage_took_once_is_one_number() -> None:
    out = io.StringIO()
    view = LiveView(Screen(out), RunRecord(), {"engines": (53.1, 53.1)}, clock=lambda: 50.0)
    view.add(stage(4, 9.0))
    assert out.getvalue() == "[4/5] engines ... (usually 53)\n"


def test_a_terminal_has_a_last_line_that_is_drawn_again_and_lines_that_stay_above_it() -> None:
    out = Terminal()
    text = shown([stage(4, 9.0), Warned(t=10.0, text="no room")], out)
    assert text.startswith(f"{CLEAR_LINE}[4/5] engines, 41 s (usually 60 to 120){CLEAR_LINE}")
    assert text.endswith("warning: no room\x1b[0m\n[4/5] engines, 41 s (usually 60 to 120)")
    gate = GateMoved(t=101.0, step=1, version=1, is_open=True)
    text = shown([steps(3)[0], gate], Terminal(), now_s=104.0)
    assert text.endswith("step 2/3 for 3 s (usually 8), gate open, about 16 s left")
    assert shown([*steps(1), gate], Terminal()).endswith("step 1/1 is done; the run ends")


def test_a_warning_is_shown_once_wherever_and_however_often_it_was_logged() -> None:
    out = io.StringIO()
    view = LiveView(Screen(out), RunRecord(), {})
    for number in range(3):
        view.add(Warned(t=1.0, text=f"prompt {number} is dropped", level="error"))
    view.say(Message("prompt 7 is dropped", is_error=True, source="Worker"))
    view.say(Message("a" * 999, source="Server"))
    view.add(Fault(t=2.0, role="engine core", name="replica 1", text="killed", action="started again"))
    view.add(Choice(t=3.0, step=1, key="slots", before=8, after=16, reason="all were in use"))
    view.add(Choice(t=3.5, step=0, key="memory", before=False, after=False, reason="not set; faster with it"))
    view.add(CommandEnded(t=4.0, code=1, text="training failed"))
    lines = out.getvalue().splitlines()
    assert [line for line in lines if "a" * 99 not in line] == [
        "error: prompt 0 is dropped",
        "error: engine core replica 1: killed (started again)",
        "chosen: slots 8 -> 16: all were in use",
        "left: memory = False: not set; faster with it",
        "error: training failed",
    ]
    assert len(lines[1]) == 400
    assert view.repeated == "4 different ones, 7 in all"


def test_the_summary_has_what_the_run_showed_and_leaves_out_what_it_has_not() -> None:
    segment = SegmentEnded(uid="a", session=0, server="s", version=1, seconds=1, prompt_tokens=1, tokens=30)
    events = [
        *steps(2),
        StepEnded(t=200.0, step=4, total=4, metrics={**OURS, "critic/score/mean": 0.75}),
        StepEnded(t=199.0, step=3, total=4, metrics={**OURS, "critic/score/mean": 0.75}),
        SegmentEnded(
            uid="a", session=0, server="s", version=1, seconds=1, prompt_tokens=1, tokens=70, reason="aborted"
        ),
        segment,
        TrajectoryEnded(uid="a", session=0, seconds=4, engine_seconds=3, tokens=1, interruptions=1, tool_seconds=1),
        Choice(step=1, key="slots", before=8, after=16, reason="all were in use"),
        Fault(role="engine core", name="replica 1", text="killed", action="started again"),
    ]
    lines = dict(line.split(maxsplit=1) for line in summary_lines(recorded(*events)))
    assert lines == {
        "steps": "4 in 32 s; 90 s between steps are in none, 500 tokens/s",
        "reward": "0.250 -> 0.750 (the mean of the first and of the last 2 steps)",
        "time": "generation 50%, log-probs 12%, update 25%, weights 6%, rest 6%",
        "slots": "requests filled 50% of those that the run began with while engines generated, mean of all steps",
        "staleness": "0.8 steps, at most 2; 40% of the trained tokens are of older weights",
        "interrupted": "20 requests; 70 tokens were kept and not generated again; 480 tokens were computed again",
        "waits": "of a trajectory's time: engine and gate 75%, tools and agent loop 25%",
        "dropped": "prompts: 1 prompt_too_long",
        "choices": "slots=16 (all were in use)",
        "faults": "engine core replica 1: started again",
    }
    verls = StepEnded(step=1, total=1, metrics={"timing_s/step": 2.0, "timing_s/gen": 2.0})
    assert summary_lines(recorded(verls)) == ["steps        1 in 2 s", "time         generation 100%"]
    assert summary_lines(recorded()) == []


def test_the_summary_tells_how_even_engines_are_and_where_interrupted_responses_went_on() -> None:
    def segment(session: int, server: str, tokens: int, reason: str = "completed") -> SegmentEnded:
        return SegmentEnded(
            uid="a", session=session, server=server, version=1, seconds=1, prompt_tokens=1, tokens=tokens, reason=reason
        )

    events = [
        *steps(1),
        segment(0, "s", 10, "aborted"),
        segment(1, "s", 10, "aborted"),
        segment(2, "t", 10, "aborted"),
        segment(3, "t", 0, "aborted"),
        segment(0, "s", 10, "aborted"),
        segment(1, "t", 30),
        segment(3, "s", 5),
        segment(0, "s", 25),
    ]
    lines = dict(line.split(maxsplit=1) for line in summary_lines(recorded(*events)))
    assert (
        lines["engines"] == "2, 40% to 60% of the tokens each; 2 of 3 interrupted responses went on in the same engine"
    )
    again = [
        TrajectoryEnded(uid="a", session=2, seconds=4, engine_seconds=3, tokens=1, interruptions=1),
        segment(2, "t", 0),
    ]
    assert "; 2 of 3 interrupted" in "".join(summary_lines(recorded(*events, *again))), "another attempt has begun anew"
    start = StageBegan(number=1, total=5, name="configuration")
    later = [segment(0, "u", 3, "aborted"), segment(0, "v", 1)]
    (told,) = (line for line in summary_lines(recorded(*events, start, *later)) if line.startswith("engines"))
    assert told.endswith(" 2, 25% to 75% of the tokens each; 0 of 1 interrupted responses went on in the same engine")
    alone = summary_lines(recorded(*steps(1), segment(0, "s", 10), segment(1, "t", 10)))
    assert any(line.endswith("2, 50% to 50% of the tokens each") for line in alone)


EMPTY = {"partial_rollout/dropped/prompt_too_long": 0, "partial_rollout/queue/pending": 0}
"""Slots are empty for want of prompts."""


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, "prompt_too_long"),
        ({"partial_rollout/dropped/prompt_too_long": 0, "partial_rollout/reprefilled_tokens": 900}, "reuse_kv"),
        (EMPTY, "a higher partial_rollout.prefetch_factor"),
        ({"partial_rollout/dropped/prompt_too_long": 0, "partial_rollout/slot_utilisation": 0.9}, "without the flag"),
    ],
)
def test_the_next_step_follows_from_what_was_seen(changed: dict[str, float], told: str) -> None:
    assert told in next_step(recorded(*steps(2, **changed)))


AGAIN = {"partial_rollout/dropped/prompt_too_long": 0, "partial_rollout/reprefilled_tokens": 900}


@pytest.mark.parametrize(
    ("changed", "key", "after", "told"),
    [
        (AGAIN, "partial_rollout.tail.interrupt_mode", "abort", "auto took abort (seen: because)"),
        (AGAIN, "partial_rollout.tail.interrupt_mode", "reuse_kv", "auto took reuse_kv, and KV was evicted"),
        (
            EMPTY,
            "partial_rollout.prefetch_factor",
            2.5,
            "auto keeps 2.5 batches in flight (because); more may fill them, for older tokens: "
            "partial_rollout.prefetch_factor=3.5 (docs/modes.md)",
        ),
    ],
)
def test_the_next_step_is_not_what_the_run_chose_already(
    changed: dict[str, float], key: str, after: str | float, told: str
) -> None:
    chosen = Choice(step=0, key=key, before="auto", after=after, reason="because", seen="seen")
    advice = next_step(recorded(*steps(2, **changed), chosen))
    later = next_step(recorded(*steps(2, **changed), msgspec.structs.replace(chosen, step=4)))
    assert told in advice
    assert told in later.replace("since step 4: ", "").replace("; few steps have had them yet", "")
    assert ("since step 4: because" in later) == ("batches" in told)
    assert "a higher partial_rollout.prefetch_factor" not in advice
    assert "interrupt_mode=" not in advice


def test_a_run_of_verls_own_modes_is_read_from_its_metrics_files(tmp_path: Path) -> None:
    rows = [{"step": 0, "data": {"val": 1.0}}, *({"step": n, "data": {**OURS, "note": "x"}} for n in (1, 2))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + '\n{"step": 3, "da')
    (tmp_path / "metrics-2.jsonl").write_text(json.dumps({"step": 2, "data": {**OURS, "timing_s/step": 9.0}}))
    assert load(tmp_path).values("timing_s/step") == [8.0, 9.0]
    assert load(tmp_path / "metrics.jsonl").values("timing_s/step") == [8.0, 8.0]
    (tmp_path / "other.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="line 1"):
        metrics_steps(tmp_path / "other.jsonl")
    with pytest.raises(DataError, match="neither events nor metrics"):
        load(tmp_path / "nowhere")


def test_a_record_has_the_stages_of_the_last_start_and_only_the_metrics_that_are_asked_for() -> None:
    record = recorded(stage(1, 1.0), stage(2, 2.0), CommandEnded(code=1), stage(1, 5.0))
    small = RunRecord(keep=lambda name: name == "timing_s/step")
    small.add(steps(1)[0])
    assert small.series == [{"timing_s/step": 8.0}]
    assert (record.stages, record.ended) == ([stage(1, 5.0)], None)


def test_what_a_stage_usually_takes_is_that_of_earlier_starts_here_and_beside(tmp_path: Path) -> None:
    write(tmp_path / "a/events", "driver", stage(1, 10.0), stage(2, 15.0))
    write(tmp_path / "a/events", "task_runner", stage(3, 21.0))
    write(tmp_path / "b/events", "driver", stage(1, 30.0), stage(2, 37.0), stage(4, 99.0))
    write(tmp_path / "c/events", "driver", stage(1, 60.0), stage(2, 70.0))  # of the start that is watched
    found = usual_seconds(tmp_path / "c/events", before_s=50.0)
    assert found == {"configuration": (5.0, 7.0), "Ray": (6.0, 6.0)}


COMMAND = """
import os, sys, signal
from pathlib import Path
from partial_rollout.observability.events import *
writer = EventWriter(Path(sys.argv[1]) / "events", "driver")
print("Ctrl-C is ignored:", signal.getsignal(signal.SIGINT) is signal.SIG_IGN, flush=True)
signal.signal(signal.SIGINT, lambda *_: (print("WARNING:root:told to end", flush=True), sys.exit(130)))
writer.write(StageBegan(number=1, total=5, name="configuration"))
writer.write(StepEnded(step=1, total=1, metrics={"timing_s/step": 2.0, "critic/score/mean": 0.5}))
print("(X pid=1) WARNING 11-23 05:02:07 [a.py:1] no room", flush=True)
print("a line that nobody sees", flush=True)
print("session of its own:", os.getsid(0) == os.getpid(), flush=True)
if sys.argv[2] == "wait":
    Path(sys.argv[1], "up").write_text("")
    signal.pause()
sys.exit(int(sys.argv[2]))
"""


def started(run: Path, argument: str, before: Callable[[], object] | None = None) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "partial_rollout.watch", str(run), "--", sys.executable, "-c", COMMAND, str(run)]
    pipe = subprocess.PIPE
    return subprocess.Popen([*words, argument], stdout=pipe, stderr=subprocess.STDOUT, text=True, preexec_fn=before)


def test_a_command_is_shown_and_its_exit_code_is_the_watchs(tmp_path: Path) -> None:
    write(tmp_path / "events", "driver", StepEnded(t=1.0, step=9, total=9, metrics={}))  # of an earlier start
    process = started(tmp_path, "3")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "step 1/1 | reward 0.500 | 2.0 s: rest 2.0" in out.splitlines()
    assert out.count("warning (X): no room") == 1
    assert out.count("nobody sees") == 1  # at the end, since the command failed
    assert "step 9" not in out
    page = f"{sys.executable} -m partial_rollout.view {tmp_path}"
    assert f"to see this run in a browser, from another shell: {page}" in out.splitlines()
    assert f"page         {page}" in out.splitlines()
    assert f"error: the command ended with code 3; the end of {tmp_path / 'run.log'}:" in out.splitlines()
    assert out.splitlines()[-1] == "  session of its own: True"
    assert "a line that nobody sees" in (tmp_path / "run.log").read_text()


def test_steps_of_verls_own_modes_are_shown_from_their_metrics_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.dumps({"step": number, "data": OURS}) for number in (1, 2)]
    path = tmp_path / "other/metrics.jsonl"
    path.parent.mkdir()
    monkeypatch.setenv(watch.METRICS_VARIABLE, str(path))
    out = io.StringIO()
    seen = watch.Watch(tmp_path, Screen(out), since_s=1.0)
    seen.look()
    path.write_text(rows[0] + "\n" + rows[1][:20])
    seen.look()
    path.write_text("\n".join(rows))
    seen.look()
    seen.close(0)
    lines = out.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("step ")] == ["step 1", "step 2"]
    assert "steps        2 in 16 s, 500 tokens/s" in lines
    assert any(line.startswith("files") and str(path) in line for line in lines)


def test_the_command_heeds_ctrl_c_where_a_shell_script_has_started_the_watch_in_the_background(tmp_path: Path) -> None:
    process = started(tmp_path, "0", before=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    process.communicate(timeout=60)
    assert "Ctrl-C is ignored: False" in (tmp_path / "run.log").read_text()


def test_ctrl_c_reaches_the_command_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "up")
    process = started(tmp_path, "wait")
    (tmp_path / "up").read_text()  # until the command is up
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.count("SIGINT: the run is told to end") == 1
    log = (tmp_path / "run.log").read_text()
    assert log.count("told to end") == 1
    assert "session of its own: True" in log  # else the signal of a terminal would reach it a second time
    assert "warning: told to end" in out.splitlines()


def test_an_ended_run_is_shown_afterwards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "events", "driver", stage(1, 1.0), *steps(3), CommandEnded(code=0))
    assert watch.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert LINE.replace("/9", "/3", 1) in out.splitlines()
    assert "steps        3 in 24 s, 500 tokens/s" in out.splitlines()
    assert watch.main([str(tmp_path / "nowhere")]) == 2
    assert "has no events" in capsys.readouterr().err


def test_what_the_log_of_an_ended_run_has_comes_after_its_events_and_has_a_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "events", "driver", stage(1, 1.0), *steps(1), CommandEnded(code=130, text="stopped by Ctrl-C"))
    (tmp_path / "run.log").write_text("WARNING:root:no room\nERROR:root:stopped by Ctrl-C\n")
    assert watch.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = ["error: stopped by Ctrl-C", "from run.log:", "warning: no room"]
    assert [line for line in lines if line in told] == told
    assert lines[0].startswith("[1/5] configuration")
    (tmp_path / "run.log").write_text("ERROR:root:stopped by Ctrl-C\n")
    assert watch.main([str(tmp_path)]) == 0
    assert "from run.log:" not in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("command", [[], ["--", "true"]])
def test_a_file_is_no_run(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    assert watch.main([str(path), *command]) == 2
    assert capsys.readouterr().err == f"error: {path} is a file: give the folder of the run\n"


def piped_to_nobody(module: str, *words: str) -> tuple[int, str]:
    """Exit code and errors of a command whose reader has gone away before it writes."""
    read, write_end = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", f"partial_rollout.{module}", *words]
    with os.fdopen(write_end, "wb") as gone:
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("module", "words"), [("compare", ("{0}", "{0}")), ("status", ("--why", "{0}")), ("watch", ("{0}",))]
)
def test_a_reader_that_goes_away_is_no_fault(module: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """The run has not ended: a watch of it that nobody reads ends by itself."""
    write(tmp_path / "events", "driver", stage(1, 1.0), *steps(12))
    assert piped_to_nobody(module, *(word.format(tmp_path) for word in words)) == (0, "")


def test_a_command_goes_on_where_nobody_reads_its_watch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND, str(tmp_path), "3"]
    assert piped_to_nobody("watch", str(tmp_path), "--", *command) == (3, "")
    assert "session of its own: True" in (tmp_path / "run.log").read_text()


def test_only_files_of_the_asked_roles_are_read(tmp_path: Path) -> None:
    write(tmp_path, "trainer", *steps(1))
    write(tmp_path, "driver", stage(1, 1.0))
    assert len(EventReader(tmp_path, roles=("driver",)).read()) == 2
