"""An error of another thread is raised in the main thread, wherever that waits, and the run ends in time."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from partial_rollout.core.deadlines import WARN_SHARE
from partial_rollout.errors import (
    ActorLost,
    AgentLoopBroken,
    DataError,
    DrainTimeout,
    EngineDead,
    RunStopped,
    TransferQueueSilent,
    WaitTimeout,
)
from partial_rollout.runtime import processes, run_watch
from partial_rollout.runtime.bounded import Wait
from partial_rollout.runtime.run_watch import EXPLAIN_SHARE, Interruption, RunWatch, manager_limit_s
from partial_rollout.types import Death, Process
from tests.run_watches import make_run_watch

LOST = ActorLost("the controller died")
LIMIT_S = 30.0


def _thread(interruption: Interruption) -> threading.Thread:
    """A thread to be started where the error may be raised: that may be before the start returns."""
    return threading.Thread(target=interruption.end_by, args=(LOST,), daemon=True)


def _made(interruption: Interruption) -> RunWatch:
    manager: Any = None
    return make_run_watch(manager, interruption, LIMIT_S)


def test_a_wait_without_a_bound_is_left() -> None:
    interruption = Interruption(LIMIT_S)
    thread = _thread(interruption)
    with pytest.raises(ActorLost, match="the controller died"):  # noqa: PT012 - see `_thread`
        thread.start()
        threading.Event().wait()
    interruption.ended()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_code_that_swallows_the_error_meets_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_watch, "AGAIN_S", 0.5)
    interruption, swallowed = Interruption(LIMIT_S), list[ActorLost]()
    thread = _thread(interruption)
    with pytest.raises(ActorLost):  # noqa: PT012 - only the second one leaves the block, whenever it comes
        try:
            thread.start()
            threading.Event().wait()
        except ActorLost as error:
            swallowed.append(error)
        threading.Event().wait()
    interruption.ended()
    assert len(swallowed) == 1
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_the_end_itself_is_not_interrupted() -> None:
    interruption = Interruption(LIMIT_S)
    interruption.begin_end()
    thread = _thread(interruption)
    thread.start()
    interruption.ended()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_run_that_a_death_ends_saves_its_last_checkpoint_undisturbed() -> None:
    interruption = Interruption(LIMIT_S)
    thread = _thread(interruption)
    with pytest.raises(ActorLost), _made(interruption).interrupts():  # noqa: PT012 - see `_thread`
        thread.start()
        threading.Event().wait()
    signal.raise_signal(run_watch.SIGNAL)  # as one that was on its way, or comes after `AGAIN_S`
    interruption.ended()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_an_end_that_takes_too_long_is_forced(capfd: pytest.CaptureFixture[str]) -> None:
    forced = threading.Event()
    interruption = Interruption(0.05, force=forced.set)
    interruption.begin_end()
    _thread(interruption).start()
    assert forced.wait(LIMIT_S)
    assert "error: the controller died\nthe run did not end within 0.05 s" in capfd.readouterr().err


def test_an_end_after_an_error_that_is_no_death_is_forced_too(capfd: pytest.CaptureFixture[str]) -> None:
    forced, ended = threading.Event(), Interruption(LIMIT_S)
    late = Interruption(0.05, force=forced.set)
    _made(late).bound_end(DataError("no rows"))
    assert forced.wait(LIMIT_S)
    assert "error: no rows\nthe run did not end within 0.05 s" in capfd.readouterr().err
    _made(ended).bound_end(DataError("no rows"))
    ended.ended()
    for thread in threading.enumerate():
        if thread.name == "bound of the run's end":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_a_complete_run_that_does_not_end_says_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger that uploads may take for ever, and verl does not bound it."""
    told, interruption = list[str](), Interruption(LIMIT_S)
    heard = threading.Event()

    def warn(text: str, *arguments: object) -> None:
        told.append(text % arguments)
        heard.set()

    monkeypatch.setattr(run_watch, "TELL_S", 0.01)
    monkeypatch.setattr(run_watch.logger, "warning", warn)
    _made(interruption).complete()
    assert heard.wait(LIMIT_S)
    assert "the run is complete, but its process has not ended" in told[0]
    assert "does_not_end_says_where_it_stands" in told[0]
    interruption.ended()
    for thread in threading.enumerate():
        if thread.name == "slow end":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_the_first_that_ends_the_run_is_told_and_what_comes_of_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that hangs is killed with those that wait for it, whose deaths are noticed too."""
    interruption, told, killed = Interruption(LIMIT_S), list[str](), list[str]()
    watch = _made(interruption)

    def end_by(error: Exception) -> None:
        told.append(str(error))
        watch._end(Death(Process("training rank", "actor-0"), "killed"))

    monkeypatch.setattr(interruption, "end_by", end_by)
    watch._watched["actor-0"] = ("training rank", "actor-0", None), Process("training rank", "actor-0")  # pyright: ignore[reportArgumentType]
    watch._watched["actor-1"] = ("training rank", "actor-1", None), Process("training rank", "actor-1", "10.0.0.1", 7)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(run_watch, "end_actor", lambda _, process: killed.append(process.name))
    watch.end_stuck(Death(Process("training rank", "actor-1"), "it was killed"), lambda: killed.append("ranks"))
    assert killed == ["ranks", "actor-1"]
    assert [text.splitlines()[0] for text in told] == [
        "training rank actor-1 (pid 7 on node 10.0.0.1) died: it was killed"
    ]
    watch.end_stuck(Death(Process("training rank", "actor-1"), "again"), lambda: killed.append("after the end"))
    assert killed == ["ranks", "actor-1"]


def test_what_comes_of_a_death_is_told_as_the_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_watch, "EXPLAIN_S", 0.0)
    interruption = Interruption(LIMIT_S)
    interruption.ended()
    watch = _made(interruption)
    # The error was seen when a rank died while the trainer waited for a batch.
    in_compiled_code = SystemError("CoreWorker.wait returned a result with an exception set")
    assert watch.explain(in_compiled_code) is in_compiled_code
    watch._end(Death(Process("training rank", "actor-0"), "killed"))
    for error in (in_compiled_code, RayActorError(error_msg="killed")):
        assert str(watch.explain(error)).startswith("training rank actor-0 died: killed")
    other = DataError("no rows")
    assert watch.explain(other) is other


def test_the_main_thread_is_told_of_a_death_whatever_becomes_of_those_that_wait_for_the_dead_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interruption, told = Interruption(LIMIT_S), list[str]()
    monkeypatch.setattr(interruption, "end_by", lambda error: told.append(str(error)))
    watch = _made(interruption)

    def fails() -> None:
        raise ValueError("no such actor")

    watch.release({"TransferQueue controller": fails})
    with pytest.raises(ValueError, match="no such actor"):
        watch._end(Death(Process("TransferQueue controller", "controller"), "killed"))
    assert len(told) == 1
    assert told[0].startswith("TransferQueue controller controller died: killed")


class Answer:
    """A call of the manager that stands in: `get` gives or raises what it is made with."""

    def __init__(self, given: object) -> None:
        self.asked: list[dict[str, Any]] = []
        self.waits_s: list[float] = []
        self.given = given

    def remote(self, *_arguments: Any, **options: Any) -> Answer:
        self.asked.append(options)
        return self


class Manager:
    """The prompt manager stands in."""

    def __init__(self, silent: object) -> None:
        self.end_silent = Answer(silent)


def _watch(manager: Any, monkeypatch: pytest.MonkeyPatch) -> RunWatch:
    def get(answer: Answer, timeout: float) -> object:
        answer.waits_s.append(timeout)
        if isinstance(answer.given, Exception):
            raise answer.given
        return answer.given

    monkeypatch.setattr(run_watch, "EXPLAIN_S", 0.0)
    monkeypatch.setattr(run_watch, "POLL_S", 0.0)
    monkeypatch.setattr(run_watch.ray, "get", get)
    monkeypatch.setattr(run_watch.ray, "wait", lambda refs, timeout: (refs, []))
    interruption = Interruption(LIMIT_S)
    interruption.ended()
    return make_run_watch(manager, interruption, 0.0)


LATE = WaitTimeout("trainer waited 60 s for 1 rollout replicas to report; no answer from replica 0")


def of_worker(error: Exception) -> Exception:
    """`error` as the trainer gets it from a claim loop."""
    wrapped: Any = RayTaskError("AgentLoopWorker.run_claims", "stack", error)
    return wrapped.as_instanceof_cause()


@pytest.mark.parametrize(
    "error",
    [LATE, DrainTimeout("2 requests"), AgentLoopBroken("dropped"), of_worker(LATE), of_worker(EngineDead("late"))],
)
def test_what_comes_of_a_silent_process_is_told_as_its_death(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = _watch(Manager(["engine server replica-0: it was killed"]), monkeypatch)
    named = watch.explain(error)
    assert isinstance(named, ActorLost)
    assert str(named) == "engine server replica-0: it was killed\nThe trainer trained step 3"


def test_a_wait_that_runs_out_while_all_give_signs_of_life_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _watch(Manager([]), monkeypatch).explain(LATE) is LATE
    stopped = RunStopped("Ctrl-C")
    assert _watch(Manager(["nobody is asked"]), monkeypatch).explain(stopped) is stopped


def tell_at_the_end(watch: RunWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `explain` wait until the thread that ends the run has done all that a test looks at."""
    monkeypatch.setattr(watch._is_fatal, "set", lambda: None)
    monkeypatch.setattr(watch._interruption, "end_by", lambda _: threading.Event.set(watch._is_fatal))


def test_a_transfer_queue_that_lives_and_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, ended = _watch(Manager([]), monkeypatch), list[str]()
    monkeypatch.setattr(run_watch, "EXPLAIN_S", LIMIT_S)
    monkeypatch.setattr(run_watch, "end_actor", lambda _, process: ended.append(process.role))
    tell_at_the_end(watch, monkeypatch)
    role = processes.TRANSFER_QUEUE_CONTROLLER.role
    watch.release({role: lambda: ended.append("ranks")})
    watch._watched[role] = (role, role, None), Process(role, role, "10.0.0.1", 7)  # pyright: ignore[reportArgumentType]
    silent = TransferQueueSilent("worker agent_loop_worker_0 waited 60 s for TransferQueue to read prompt 'a'")
    named = watch.explain(of_worker(silent))
    assert isinstance(named, ActorLost)
    assert str(named).startswith(
        f"TransferQueue controller (pid 7 on node 10.0.0.1) died: it was killed, because it does not answer: {silent}"
    )
    assert ended == ["ranks", role]


def test_a_manager_that_does_not_answer_when_a_wait_has_run_out_is_named_with_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else would name the manager, which is started again, and nobody else knows who is silent."""
    watch, ended = _watch(Manager(GetTimeoutError()), monkeypatch), list[Process]()
    watch._manager_process = Process(processes.PROMPT_MANAGER.role, processes.PROMPT_MANAGER.role, "10.0.0.1", 7)
    monkeypatch.setattr(run_watch, "EXPLAIN_S", LIMIT_S)
    monkeypatch.setattr(run_watch, "end_actor", lambda _, process: ended.append(process))
    tell_at_the_end(watch, monkeypatch)
    named = watch.explain(LATE)
    assert isinstance(named, ActorLost)  # so training is started again
    silent = f"it had not answered for {EXPLAIN_SHARE * LIMIT_S:.0f} s when a wait had run out"
    assert str(named).splitlines() == [
        f"prompt manager (pid 7 on node 10.0.0.1) died: it was killed, because {silent}, so nobody knows who else is "
        f"silent: {LATE}",
        "The trainer trained step 3",
    ]
    assert ended == [watch._manager_process]
    assert watch.has_lost(processes.PROMPT_MANAGER)  # no last checkpoint waits for it


def test_a_manager_that_is_slow_to_answer_is_not_taken_for_the_cause_of_what_was_no_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, ended = _watch(Manager(GetTimeoutError()), monkeypatch), list[Process]()
    monkeypatch.setattr(run_watch, "end_actor", lambda _, process: ended.append(process))
    broken = AgentLoopBroken("33 prompts were dropped")
    assert watch.explain(broken) is broken
    assert ended == []


def test_a_transfer_queue_is_named_that_does_not_answer_while_the_manager_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = _watch(Manager(GetTimeoutError()), monkeypatch)
    monkeypatch.setattr(run_watch, "EXPLAIN_S", LIMIT_S)
    assert str(watch.explain(TransferQueueSilent("no rows"))).startswith(processes.TRANSFER_QUEUE_CONTROLLER.role)


def test_a_manager_that_answers_with_an_error_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = _watch(Manager(RayTaskError("end_silent", "stack", ValueError("no entry"))), monkeypatch)
    assert watch.explain(LATE) is LATE
    watch._end(Death(Process("prompt manager", "prompt manager"), "it was given up"))
    assert str(watch.explain(LATE)).startswith("prompt manager died: it was given up")


SERVER = processes.ENGINE_SERVER
CLAIM_S = 300.0
DEAD = Death(Process(SERVER.role, "replica-0"), "killed")


class Later(threading.Condition):
    """The death of a server is told while the trainer waits for it."""

    def __init__(self, watch: RunWatch) -> None:
        super().__init__()
        self._watch = watch

    def wait(self, timeout: float | None = None) -> bool:
        if not self._watch._num_dead[SERVER.role]:
            self._watch._handle(DEAD)
        return super().wait(timeout)


@pytest.mark.parametrize("is_told", ["before the question", "after the question", "after it was killed", "not at all"])
def test_a_call_is_made_again_when_the_server_that_it_waited_for_was_replaced(
    is_told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may have been killed for its silence by others, in the same moment in which the call's time is over."""
    watch = _watch(Manager([str(DEAD)] if is_told == "after it was killed" else []), monkeypatch)
    watch._start_s = LIMIT_S
    watch.react({SERVER.role: lambda death: "it was started again"})
    before = watch.num_replaced(SERVER)
    if is_told == "before the question":
        watch._handle(DEAD)
    elif is_told != "not at all":
        if is_told == "after the question":
            monkeypatch.setattr(run_watch, "EXPLAIN_S", LIMIT_S)
        watch._replacing = Later(watch)
    question: Any = watch._manager.end_silent
    waits_s: list[float] = []

    def wait(who_waits: str, timeout_s: float, sound_s: float) -> Wait:
        waits_s.append(timeout_s)
        return Wait(who_waits, timeout_s, sound_s)

    monkeypatch.setattr(run_watch, "Wait", wait)
    is_replaced = is_told != "not at all"
    assert watch.has_replaced(SERVER, LATE, before, CLAIM_S) == is_replaced
    assert watch.num_replaced(SERVER) == before + is_replaced
    assert question.asked == [{"waits": is_told != "before the question"}]
    assert waits_s[0] > WARN_SHARE * CLAIM_S  # the manager may take so long to know who is silent
    monkeypatch.setattr(run_watch, "EXPLAIN_S", 0.0)
    watch._manager.end_silent = Answer([])  # pyright: ignore[reportAttributeAccessIssue]
    assert not watch.has_replaced(SERVER, LATE, watch.num_replaced(SERVER), CLAIM_S)  # nobody has died since


@pytest.mark.parametrize("ends_s", [None, 3.0])
def test_a_silent_manager_is_waited_for_until_it_is_replaced_or_the_run_ends(
    ends_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who silences an engine server may silence the manager too, which tells who is silent when it is back."""
    watch, now_s = _watch(Manager([]), monkeypatch), 0.0

    def wait(refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        nonlocal now_s
        now_s += timeout
        if ends_s is not None and now_s >= ends_s:
            watch.stop()
        return [], refs

    monkeypatch.setattr(run_watch.ray, "wait", wait)
    monkeypatch.setattr(run_watch, "Wait", partial(Wait, clock=lambda: now_s))
    limit_s = manager_limit_s(watch._answer_s) + WARN_SHARE * CLAIM_S
    assert not watch.has_replaced(SERVER, LATE, 0, CLAIM_S)
    assert now_s == pytest.approx(limit_s if ends_s is None else ends_s, abs=run_watch.LOOK_S)


KNOWN = Process(SERVER.role, "replica-0", "10.0.0.1", 7)
"""Where the server ran."""


def _watches_server(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> tuple[RunWatch, list[Death]]:
    """A watch of one server, which a new manager is asked to watch, and the deaths that it has handled."""
    manager, handled = Manager([]), list[Death]()
    manager.watch = answer  # pyright: ignore[reportAttributeAccessIssue]
    watch = _watch(manager, monkeypatch)
    monkeypatch.setattr(run_watch, "packed", lambda actors: b"")
    monkeypatch.setattr(watch, "_end", handled.append)
    watch._watched[KNOWN.name] = (KNOWN.role, KNOWN.name, None), KNOWN  # pyright: ignore[reportArgumentType]
    return watch, handled


def test_a_death_that_a_new_manager_finds_is_handled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, handled = _watches_server(monkeypatch, Answer([replace(KNOWN, pid=8)]))
    watch.watch_again()
    (death,) = handled
    assert (death.process, "started it again meanwhile" in death.cause) == (KNOWN, True)
    assert not watch._is_news(DEAD.process)  # its parked call tells it too
    assert watch._is_news(Process(processes.PROMPT_MANAGER.role, processes.PROMPT_MANAGER.role))


def test_a_death_that_is_told_before_a_new_manager_finds_it_is_handled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(Answer):
        def remote(self, *arguments: Any, **options: Any) -> Any:
            assert watch._is_news(DEAD.process)
            watch._handle(DEAD)  # while the new manager asks the dead server's successor where it runs
            return super().remote(*arguments, **options)

    watch, handled = _watches_server(monkeypatch, Told([replace(KNOWN, pid=8)]))
    watch.watch_again()
    (death,) = handled
    assert death == replace(DEAD, process=KNOWN)  # with the place that the new manager does not know


def test_a_call_is_not_made_again_when_a_server_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = _watch(Manager([]), monkeypatch)
    watch._start_s = LIMIT_S

    def fails(death: Death) -> str:
        raise WaitTimeout("it does not start")

    watch.react({SERVER.role: fails})
    watch._handle(DEAD)
    assert not watch.has_replaced(SERVER, LATE, 0, CLAIM_S)
    silent = _watch(Manager(GetTimeoutError()), monkeypatch)
    broken = _watch(Manager(RayTaskError("end_silent", "stack", ValueError("no entry"))), monkeypatch)
    for watch in (silent, broken):
        assert not watch.has_replaced(SERVER, LATE, 0, CLAIM_S)  # the manager does not answer
    ending = _watch(Manager(ValueError("nobody is to be asked")), monkeypatch)
    ending.react({SERVER.role: lambda death: "it was started again"})
    ending._handle(DEAD)
    ending.stop()
    assert not ending.has_replaced(SERVER, LATE, 0, CLAIM_S)


def test_a_server_that_was_killed_and_is_not_replaced_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two is replaced; of the other one nobody hears."""
    monkeypatch.setattr(run_watch, "REPLACED_S", 0.1)
    silent = ["engine server replica-0: it was killed", "engine server replica-1: it was killed"]
    watch = _watch(Manager(silent), monkeypatch)
    watch._start_s = LIMIT_S
    watch.react({SERVER.role: lambda death: "it was started again"})

    watch._replacing = Later(watch)
    with pytest.raises(ActorLost) as told:
        watch.has_replaced(SERVER, LATE, 0, CLAIM_S)
    assert str(told.value).splitlines() == [*silent, "The trainer trained step 3"]


def test_a_manager_that_fails_to_tell_of_deaths_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that hears of deaths would end without a word, and the trainer wait for a dead process for ever."""
    interruption, told = Interruption(LIMIT_S), list[str]()
    watch = _made(interruption)
    monkeypatch.setattr(interruption, "end_by", lambda error: told.append(str(error)))
    monkeypatch.setattr(watch, "_meet_manager", lambda _: None)
    monkeypatch.setattr(watch, "watch", lambda _, is_whole: None)

    def fail() -> None:
        raise RayTaskError("next_death", "traceback", ValueError("no such actor"))

    monkeypatch.setattr(watch, "_next_death", fail)
    watch._run([])
    assert [text.splitlines()[0] for text in told] == [
        "prompt manager died: it was given up, because it does not tell of deaths any more: ValueError('no such actor')"
    ]
