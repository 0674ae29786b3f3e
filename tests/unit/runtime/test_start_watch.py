"""A start that does not go on ends by the name of the process, or after its time; one that goes on is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from ray.exceptions import RayActorError

from partial_rollout.errors import ActorLost, DataError
from partial_rollout.observability import stages
from partial_rollout.runtime import start_watch
from partial_rollout.runtime.run_watch import Interruption
from partial_rollout.runtime.start_watch import Actor, StartWatch, process_of, stopped_here, stopped_of
from partial_rollout.types import Process

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 30.0
START_S, CLAIM_S = 100.0, 20.0
NODE = "10.0.0.1"
RANK = Process("training rank", "WorkerDict_0:0", NODE, 7)
CORE = Process("engine server", "EngineCore of vllm_server_0_0", NODE, 9)
SERVER = Process("engine server", "vllm_server_0_0", NODE, 8)
WAITING = Process("reward worker", "reward_loop_worker_0")
CONTROLLER = Process("TransferQueue controller", "TransferQueueController", NODE, 5)


class Start:
    """What Ray and the kernel tell, a clock, and what was killed."""

    def __init__(self, *actors: Actor, start_s: float = START_S) -> None:
        self.actors, self.now_s, self.killed = list(actors), 1000.0, list[Process]()
        self.interruption = Interruption(LIMIT_S)
        self.watch = StartWatch(
            self.interruption,
            start_s=start_s,
            claim_s=CLAIM_S,
            find=lambda: self.actors,
            clock=lambda: self.now_s,
            kill=self.killed.append,
        )
        self.watch.begin_at(self.now_s)
        self.watch.look()

    def after(self, seconds: float, step_s: float = 5.0) -> None:
        """Look every few seconds, as the thread does."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(self.now_s + step_s, end_s)
            self.watch.look()


@pytest.fixture(autouse=True)
def stage() -> Iterator[None]:
    stages.begin(stages.ENGINES)
    yield
    stages.begin(stages.CONFIGURATION)


def test_a_start_is_named_when_it_takes_longer_than_sound_ones(caplog: pytest.LogCaptureFixture) -> None:
    """A process that is stopped is named early, as ever."""
    start = Start(Actor(RANK), start_s=1800.0)
    start.after(350.0)
    assert caplog.messages == []
    start.after(15.0)
    assert [message.partition(" (")[0] for message in caplog.messages] == ["training has been starting for 360 s"]
    start.actors = [Actor(SERVER, (CORE,))]
    start.after(10.0)
    assert f"{CORE} is stopped for" in caplog.messages[-1]


def test_a_process_that_is_stopped_is_named_and_killed_and_the_start_ends(caplog: pytest.LogCaptureFixture) -> None:
    start = Start(Actor(RANK), Actor(SERVER))
    start.after(30.0)
    start.actors = [Actor(RANK), Actor(SERVER, (CORE,))]
    start.after(10.0)
    assert start.watch.error is None
    assert f"{CORE} is stopped for" in caplog.text
    start.after(15.0)
    assert start.killed == [CORE]
    error = start.watch.error
    assert isinstance(error, ActorLost)
    assert str(error) == (
        f"{CORE} was given up: it was stopped for 20 s, longer than partial_rollout.timeouts.claim_s=20 allows.\n"
        "Training was starting: engines"
    )
    assert start.watch.explain(ValueError("what came of it")) is error


def test_a_process_that_was_stopped_and_goes_on_is_left_alone() -> None:
    start = Start(Actor(RANK, (RANK,)))
    for _ in range(3):
        start.after(15.0)
        start.actors = [Actor(RANK)]
        start.after(5.0)
        start.actors = [Actor(RANK, (RANK,))]
    assert (start.watch.error, start.killed) == (None, [])


def test_a_start_that_takes_too_long_says_who_has_not_started_and_ends_all() -> None:
    start = Start(Actor(CONTROLLER), Actor(RANK), Actor(WAITING))
    start.after(START_S)
    assert start.killed == [RANK, WAITING]  # others watch the controller: its death would be told as the reason
    assert str(start.watch.error) == (
        "task runner was given up: the start has taken 100 s, longer than partial_rollout.timeouts.start_s=100 allows; "
        "not started yet: reward worker reward_loop_worker_0.\nTraining was starting: engines"
    )


def test_a_start_that_is_over_is_not_ended() -> None:
    start = Start(Actor(RANK, (RANK,)))
    start.watch.end()
    start.after(2 * START_S)
    assert (start.watch.error, start.killed) == (None, [])


def test_a_look_that_fails_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    """The thread looks again, and ends the start."""
    answers = [OSError("too many open files"), [Actor(RANK, (RANK,))]]

    def find() -> list[Actor]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    killed: list[Process] = []
    interruption = Interruption(LIMIT_S)
    watch = StartWatch(interruption, start_s=START_S, claim_s=0.01, find=find, kill=killed.append)
    with pytest.raises(ActorLost, match="was stopped for"):  # noqa: PT012 - it may be raised before `begin` returns
        watch.begin()
        threading.Event().wait(LIMIT_S)
    interruption.ended()  # else it ends this process
    assert killed == [RANK]
    assert "too many open files" in caplog.text


def test_time_in_which_nobody_could_look_does_not_count() -> None:
    start = Start(Actor(RANK, (RANK,)))
    start.after(1000.0, step_s=1000.0)  # as with Ctrl-Z
    assert (start.watch.error, start.killed) == (None, [])
    start.after(START_S)
    assert start.killed[0] == RANK


def test_the_error_gets_the_main_thread_out_of_its_wait_also_where_a_later_interruption_is_there() -> None:
    start = Start(Actor(RANK, (RANK,)))
    later = Interruption(LIMIT_S)  # the trainer's
    start.after(CLAIM_S)
    thread = threading.Thread(target=start.watch.raise_error, daemon=True)
    with pytest.raises(ActorLost, match="was stopped for"):  # noqa: PT012 - it may be raised before `start` returns
        thread.start()
        threading.Event().wait()
    start.interruption.ended()
    later.ended()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_an_actor_that_dies_in_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(Actor(RANK))
    monkeypatch.setattr(start_watch.ray_state, "actors", {"ab": _told("f.<locals>.WorkerDict", "rank_0", 7)}.get)
    named = start.watch.explain(RayActorError("ab", "The actor is dead because its process was killed."))
    assert str(named).startswith(f"training rank rank_0 (pid 7 on node {NODE}) died: ")
    assert str(named).endswith("Training was starting: engines")
    other = DataError("no rows")
    assert start.watch.explain(other) is other
    start.watch.end()
    later = RayActorError("ab", "killed")
    assert start.watch.explain(later) is later


def _told(kind: str, name: str, pid: int) -> dict[str, Any]:
    """An actor as Ray's table of actors has it."""
    return {"ActorClassName": kind, "Name": name, "ActorID": "0123456789ab", "Address": {"IPAddress": NODE}, "Pid": pid}


def test_an_actor_that_nobody_has_named_is_called_by_its_class() -> None:
    process = process_of(_told("GlobalRequestLoadBalancer", "", 7))
    assert (process.role, process.name) == ("load balancer", "GlobalRequestLoadBalancer-456789ab")
    assert process_of(_told("Other", "", 7)).role == "Other"


def test_the_kernel_tells_which_process_of_an_actor_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        server = Process("engine server", "vllm_server_0_0", NODE, os.getpid())
        core = Process("engine server", "core", NODE, child.pid)
        assert stopped_of(server, NODE, stopped_here()) == ()
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = stopped_here()
        (found,) = stopped_of(server, NODE, stopped)
        assert (found.pid, found.role) == (child.pid, "engine server")
        assert found.name == f"{psutil.Process(child.pid).name()} of vllm_server_0_0"
        assert stopped_of(core, NODE, stopped) == (core,)
        assert stopped_of(server, "10.0.0.2", stopped) == ()  # another node's kernel tells nothing here
        child.kill()
