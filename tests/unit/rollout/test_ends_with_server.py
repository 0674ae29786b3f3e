"""Processes of an engine whose server is killed, with stand-ins for both."""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING

import psutil
import pytest

from partial_rollout.rollout import ends_with_server
from partial_rollout.rollout.ends_with_server import VARIABLE, end_with_parent, mark_engine

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LIMIT_S, LIVES_S = 60.0, 1.0
SPAWN = multiprocessing.get_context("spawn")


def core(to_test: Connection, until_told: Connection) -> None:
    """Engine core of the test: it calls what vLLM's plugin calls, and then only ever waits for requests."""
    ends_with_server.GRACE_S = 0.0
    end_with_parent()
    to_test.send(os.getpid())
    until_told.recv()
    to_test.send("ended by itself")


def server(to_test: Connection, until_told: Connection, *, is_ours: bool) -> None:
    if is_ours:
        mark_engine()
    process = SPAWN.Process(target=core, args=(to_test, until_told))
    process.start()
    process.join()


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_engine_core_ends_with_its_server_and_that_of_another_program_lives_on(is_ours, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    from_core, to_test = SPAWN.Pipe(duplex=False)
    until_told, tell = SPAWN.Pipe(duplex=False)
    started = SPAWN.Process(target=server, args=(to_test, until_told), kwargs={"is_ours": is_ours})
    started.start()
    assert from_core.poll(LIMIT_S)
    found = psutil.Process(from_core.recv())
    assert found.ppid() == started.pid
    started.kill()
    started.join(LIMIT_S)
    if not is_ours:
        with pytest.raises(psutil.TimeoutExpired):
            found.wait(LIVES_S)
        tell.send("end")
        assert from_core.poll(LIMIT_S)
        assert from_core.recv() == "ended by itself"
    found.wait(LIMIT_S)
