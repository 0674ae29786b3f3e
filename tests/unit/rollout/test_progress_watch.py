"""A stuck engine is warned of, named and ended; in virtual time, with a process that is stopped for real."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from partial_rollout.observability.events import EventReader, EventWriter, Fault, Warned
from partial_rollout.rollout.progress_watch import ProgressWatch
from tests.unit.runtime.virtual_time import run_virtual

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STALL_S = 30.0


@pytest.fixture
def engine() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


def test_a_frozen_engine_is_named_and_ended(
    engine: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.suspend()
    os.waitpid(engine.pid, os.WUNTRACED)  # a busy machine stops it later than the signal is sent

    told_of: list[int] = []

    async def main() -> str:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(time, "monotonic", loop.time)
        tokens = iter([0, 32, 64])
        at = 0

        def look() -> tuple[int, int]:
            nonlocal at
            at = next(tokens, at)
            return 5, at

        watch = ProgressWatch("replica 0", STALL_S, EventWriter(tmp_path, "server-0"), lambda: told_of.append(at))
        watch.start(look, [engine])
        await asyncio.sleep(2 * STALL_S)
        return watch.verdict

    with caplog.at_level(logging.WARNING):
        verdict = run_virtual(main())
    assert told_of == [64]
    assert f"pid {engine.pid} stopped) held 5 requests and generated nothing for 3" in verdict
    told = ["holds 5 requests and has generated nothing for 10 s; after 31 s", "for 20 s; after 31 s"]
    assert all(text in record.message for text, record in zip(told, caplog.records, strict=False))
    engine.wait(60)
    assert not engine.is_running()
    events = EventReader(tmp_path).read()
    assert [event.text for event in events if isinstance(event, Warned)] == [r.message for r in caplog.records[:2]]
    (fault,) = [event for event in events if isinstance(event, Fault)]
    assert (fault.role, fault.name, fault.pid) == ("engine", "replica 0", engine.pid)
    assert (fault.noticed_after_s or 0) >= STALL_S


def test_an_engine_that_does_not_do_what_it_is_asked_to_is_named_and_ended(
    engine: psutil.Process, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.suspend()
    os.waitpid(engine.pid, os.WUNTRACED)

    async def main() -> str:
        watch = ProgressWatch("replica 0", STALL_S, EventWriter(tmp_path, "server-0"))
        watch.start(lambda: (0, 0), [engine])
        with watch.answers_within(20.0, "half of drain_s", "pause"):
            await asyncio.sleep(19.0)
        assert watch.verdict == ""  # it was late, and has answered
        with watch.answers_within(20.0, "half of drain_s", "pause"):
            await asyncio.sleep(21.0)
        return watch.verdict

    with caplog.at_level(logging.WARNING):
        verdict = run_virtual(main())
    did = f"the engine (pid {engine.pid} stopped) was asked to pause and did not answer for 20 s"
    assert verdict == f"{did}, which is half of drain_s: it was ended"
    assert caplog.records[0].message == "replica 0 was asked to pause, and has not answered for 2 s of 20 s"
    engine.wait(60)
    (fault,) = [event for event in EventReader(tmp_path).read() if isinstance(event, Fault)]
    assert (fault.role, fault.pid, fault.noticed_after_s) == ("engine", engine.pid, 20.0)


def test_an_engine_that_is_ended_on_purpose_is_left_alone(engine: psutil.Process, tmp_path: Path) -> None:
    async def main() -> str:
        watch = ProgressWatch("replica 0", STALL_S, EventWriter(tmp_path, "server-0"))
        watch.start(lambda: (5, 0), [engine])
        watch.stop()
        await asyncio.sleep(100 * STALL_S)
        return watch.verdict

    assert run_virtual(main()) == ""
    assert engine.is_running()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_watch_that_fails_is_told_of_and_one_that_is_stopped_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_stopped: bool
) -> None:
    def fail() -> tuple[int, int]:
        raise LookupError("no engine")

    async def main() -> None:
        watch = ProgressWatch("replica 0", STALL_S, EventWriter(tmp_path, "server-0"))
        watch.start(fail, [])
        if is_stopped:
            watch.stop()
        await asyncio.sleep(10.0)

    run_virtual(main())
    told = ["replica 0 is not watched any more"]
    assert [record.getMessage() for record in caplog.records] == ([] if is_stopped else told)


def jump(seconds: float) -> None:
    """Something blocks the event loop, or the machine stands still."""
    asyncio.get_running_loop()._jumping.now_s += seconds  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("seconds", [600.0, 4 * STALL_S])
def test_an_engine_whose_tokens_nobody_could_take_in_is_left_alone(
    engine: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    tokens = 0

    async def main() -> str:
        nonlocal tokens
        monkeypatch.setattr(time, "monotonic", asyncio.get_running_loop().time)
        watch = ProgressWatch("replica 0", STALL_S, EventWriter(tmp_path, "server-0"))
        watch.start(lambda: (5, tokens), [engine])
        for number in range(6):
            tokens += 1
            await asyncio.sleep(5.0)
            if number > 2:
                jump(seconds)
                await asyncio.sleep(1.5)  # the first look comes before the tokens
        return watch.verdict

    assert run_virtual(main()) == ""
    assert engine.is_running()


def test_a_frozen_engine_is_ended_though_the_event_loop_is_blocked_again_and_again(
    engine: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> tuple[str, int]:
        monkeypatch.setattr(time, "monotonic", asyncio.get_running_loop().time)
        watch = ProgressWatch("replica 0", STALL_S, EventWriter(tmp_path, "server-0"))
        watch.start(lambda: (5, 8), [engine])
        for number in range(400):
            await asyncio.sleep(0.5)
            jump(60.0)
            if watch.verdict:
                return watch.verdict, number
        return "", 400

    verdict, number = run_virtual(main())
    assert "held 5 requests and generated nothing" in verdict
    assert number < 4 * STALL_S
    engine.wait(60)


@pytest.mark.parametrize("answer_s", [0.1, None])
def test_an_answer_that_nobody_could_take_in_is_waited_for_a_little_longer(
    engine: psutil.Process, tmp_path: Path, answer_s: float | None
) -> None:
    async def main() -> str:
        watch = ProgressWatch("replica 0", STALL_S, EventWriter(tmp_path, "server-0"))
        watch.start(lambda: (0, 0), [engine])
        with watch.answers_within(20.0, "half of drain_s", "pause"):
            await asyncio.sleep(1.0)
            jump(600.0)
            await asyncio.sleep(answer_s or 60.0)
        return watch.verdict

    verdict = run_virtual(main())
    assert bool(verdict) == (answer_s is None)
    assert ("which is half of drain_s, and 10 s more since the event loop was blocked" in verdict) == bool(verdict)
    if answer_s is None:
        engine.wait(60)
    assert engine.is_running() == (answer_s is not None)
