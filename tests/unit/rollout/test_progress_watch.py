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

    async def main() -> str:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(time, "monotonic", loop.time)
        tokens = iter([0, 32, 64])
        at = 0

        def look() -> tuple[int, int]:
            nonlocal at
            at = next(tokens, at)
            return 5, at

        watch = ProgressWatch("replica 0", STALL_S, EventWriter(tmp_path, "server-0"))
        watch.start(look, [engine])
        await asyncio.sleep(2 * STALL_S)
        return watch.verdict

    with caplog.at_level(logging.WARNING):
        verdict = run_virtual(main())
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
