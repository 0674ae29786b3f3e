"""Ends a trainer's wait when a process dies that the run cannot go on without, wherever the trainer waits.

    actor dies ──> prompt manager ──next_death──> thread of the RunWatch ──signal──> main thread: the error is raised

A frozen actor becomes a dead one: the prompt manager kills it when it has given no sign of life for too long, or when
a wait of the trainer has run out meanwhile. A prompt manager that does not answer is killed by the RunWatch. Ray starts
a dead one again, and the RunWatch tells the new process whom to watch; who died in between is told then.

verl's trainer waits without a bound in many places (for TransferQueue's controller, for training ranks), and none of
them offers a hook. A signal whose handler raises gets the main thread out of any wait of Python and ZeroMQ. Ray's `get`
returns with the error when what it waits for is there; so actors that wait for the dead one for ever are ended. Code
that swallows the error meets it again after `AGAIN_S`, until the end of the run has begun. From the first error on the
run has `stop_s` to end, which all steps of its end share; after it the process is ended, and its stacks are in the log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from partial_rollout.core.deadlines import WARN_SHARE
from partial_rollout.errors import (
    ActorLost,
    AgentLoopBroken,
    ClusterError,
    EngineError,
    PartialRolloutError,
    TransferQueueSilent,
    WaitTimeout,
)
from partial_rollout.observability.events import Fault, ProcessFound
from partial_rollout.runtime.bounded import TimeLeft, Wait
from partial_rollout.runtime.death_watch import DESCRIBE_S, end_actor, how_it_died, last_lines, packed
from partial_rollout.runtime.heartbeat import stack_of
from partial_rollout.runtime.processes import PROMPT_MANAGER, REPLACED_S, TRANSFER_QUEUE_CONTROLLER
from partial_rollout.runtime.remote_call import root_cause
from partial_rollout.types import Death, Process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ray.actor import ActorHandle

    from partial_rollout.runtime.processes import Kind

logger = logging.getLogger(__name__)

ASK_S = 10.0
"""The manager answers at once, or is silent itself."""
MAY_COME_OF_SILENCE = (ClusterError, EngineError, AgentLoopBroken)
"""What a trainer meets that waits for a frozen process, or whose agent loops do."""
POLL_S = 30.0
"""Length of one long poll; the manager answers as soon as an actor has died."""
MANAGER_START_S = 60.0
"""Within which Ray starts the manager again: seconds, but for a machine that is short of memory or processors."""
AGAIN_S = 5.0
LOOK_S = 1.0
"""How late a wait for an answer notices that the run ends."""
EXPLAIN_S = 3.0
"""Ray may tell a waiting trainer of a death before it tells the prompt manager."""
EXPLAIN_SHARE = 0.2
"""Share of `timeouts.stop_s` for each question who has died or is silent."""
TELL_S = 60.0
"""Between two warnings of a complete run that does not end."""
SIGNAL = signal.SIGUSR1
ENDED_BY_FORCE = 70
"""Exit code of a process that did not end in time."""


def manager_limit_s(call_s: float) -> float:
    """How long an answer of the prompt manager may take, which may freeze, be killed and be started again meanwhile.

    Whoever gave a call up earlier would not hear of what Ray makes again for it, such as a claim.
    """
    return call_s + POLL_S + call_s + MANAGER_START_S


class Interruption:
    """Raises an error in the main thread, wherever it waits.

    armed -> raised, again and again -> the end has begun -> ended, or the process is ended by force
    """

    def __init__(self, end_s: float, force: Callable[[], None] | None = None) -> None:
        """Call this in the main thread. `end_s`: how long the run's end may take; `force` ends the process.

        All steps of the end share `left`.
        """
        self.left, self._force = TimeLeft(end_s), force or end_by_force
        self._error: PartialRolloutError | None = None
        self._begun, self._ended = threading.Event(), threading.Event()
        self._before = signal.signal(SIGNAL, self._raise)

    @property
    def error(self) -> PartialRolloutError | None:
        """What was raised."""
        return self._error

    def end_by(self, error: PartialRolloutError) -> None:
        """Raise `error` in the main thread and return when the run has ended; for another thread."""
        self._error, main = self._error or error, threading.main_thread()
        while not self._begun.is_set() and (left_s := self.left.share(1.0)):
            if main.ident is not None:
                signal.pthread_kill(main.ident, SIGNAL)
            # Once may not be enough: code that catches any error may have swallowed this one.
            self._begun.wait(min(AGAIN_S, left_s))
        self.bound_end(self._error)

    def bound_end(self, error: BaseException) -> None:
        """Return when the run has ended, which `error` ends, or end the process at the end of the time."""
        if not self._ended.wait(self.left.share(1.0)):
            faulthandler.dump_traceback()
            # Last, since whoever tells of this process' death quotes the last lines of its log.
            text = f"error: {error}\nthe run did not end within {self.left.whole_s:g} s"
            print(text, file=sys.stderr, flush=True)
            self._force()

    def begin_end(self) -> None:
        """The end of the run has begun: from now on nothing is raised."""
        self._begun.set()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the run has ended; False: it has not, within this time."""
        return self._ended.wait(timeout_s)

    def ended(self) -> None:
        """The run has ended."""
        self._begun.set()
        self._ended.set()

    def _raise(self, number: int, frame: Any) -> None:
        # A signal that was sent before the end began may arrive after it.
        if self._error is not None and not self._begun.is_set():
            raise self._error
        if self._error is None and callable(self._before):  # the signal is for an interruption that was made earlier
            self._before(number, frame)


def end_by_force() -> None:
    """End this process."""
    os._exit(ENDED_BY_FORCE)


class RunWatch:
    """Hears of deaths from the prompt manager, and lets the run go on or ends it."""

    def __init__(
        self,
        manager: ActorHandle,
        interruption: Interruption,
        *,
        doing: Callable[[], str],
        step: Callable[[], int | None],
        start_s: float,
        answer_s: float,
        handles_need: str,
    ) -> None:
        """`doing` and `step` say what the trainer does.

        The manager must have started after `start_s`, and must answer within `answer_s` from then on. `handles_need` is
        a module that it imports before the handles come that need it.
        """
        self._manager, self._interruption = manager, interruption
        self._manager_process = Process(PROMPT_MANAGER.role, PROMPT_MANAGER.role)
        self._doing, self._step, self._start_s, self._answer_s = doing, step, start_s, answer_s
        self._handles_need = handles_need
        self._watched: dict[str, tuple[tuple[str, str, ActorHandle], Process]] = {}
        """The living actors that the manager watches, by name; where each was found."""
        self._verdict = ""
        """Why the manager was killed here."""
        self._reactions: dict[str, Callable[[Death], str]] = {}
        self._releases: dict[str, Callable[[], None]] = {}
        self._stopped, self._is_fatal, self._ending = threading.Event(), threading.Event(), threading.Lock()
        self._fatal: PartialRolloutError | None = None
        self._lost = ""
        """The role of the process whose death ends the run."""
        self._replacing = threading.Condition()
        self._num_dead: Counter[str] = Counter()
        """Deaths that the run goes on without, by role."""
        self._num_replaced: Counter[str] = Counter()
        """Reactions to them that have ended."""

    def start(self, first: Sequence[tuple[str, str, ActorHandle]]) -> None:
        """Listen from now on, and watch `first`, given as (role, name, handle); returns at once."""
        threading.Thread(target=self._run, args=(first,), daemon=True, name="run-watch").start()

    def watch(self, actors: Sequence[tuple[str, str, ActorHandle]], *, is_whole: bool = False) -> None:
        """Watch further actors; returns when they are watched. `is_whole`: they are all of the run at this time."""
        self._watched |= {actor[1]: (actor, Process(*actor[:2])) for actor in actors}
        for process in self._ask_to_watch(actors, is_whole=is_whole):
            if process.name in self._watched:
                self._watched[process.name] = self._watched[process.name][0], process
            note_found(process)

    def watch_again(self) -> None:
        """Tell a new process of the manager whom to watch; whoever has died meanwhile is told as dead."""
        before = dict(self._watched)
        actors = [actor for actor, _ in before.values()]
        for process in self._ask_to_watch(actors, is_whole=True):
            if self._watched.get(process.name) is not before[process.name]:
                continue  # the manager has told its death meanwhile
            # Ray starts some actors again by itself: the new process lives, so nobody else would tell of the old death.
            known = before[process.name][1]
            if known.pid and process.pid and known.pid != process.pid:
                lines = last_lines(known.log) if known.log else ""
                self._handle(Death(known, "Ray has started it again meanwhile, without the prompt manager", "", lines))

    def _ask_to_watch(self, actors: Sequence[tuple[str, str, ActorHandle]], *, is_whole: bool) -> list[Process]:
        told = self._manager.watch.remote(packed(actors), is_whole=is_whole)
        return ray.get(told, timeout=DESCRIBE_S + self._start_s)

    def react(self, reactions: Mapping[str, Callable[[Death], str]]) -> None:
        """What lets the run go on, by role, in a thread of its own; a reaction that raises ends the run.

        A reaction returns in words what was done.
        """
        self._reactions |= reactions

    def release(self, releases: Mapping[str, Callable[[], None]]) -> None:
        """What ends others, by the role of the dead process that they wait for without a bound.

        A trainer that waits in `ray.get` for one of them gets no signal's error out of it.
        """
        self._releases |= releases

    @property
    def manager_pid(self) -> int:
        """Pid of the manager's process that answers now."""
        return self._manager_process.pid

    def stop(self) -> None:
        """The end of the run has begun: actors that end now are no deaths."""
        self._stopped.set()
        with self._replacing:
            self._replacing.notify_all()
        self._interruption.begin_end()

    def wait_stopped(self, timeout_s: float) -> bool:
        """Wait until the end of the run has begun; False: it has not, within this time."""
        return self._stopped.wait(timeout_s)

    def end_stuck(self, death: Death, release: Callable[[], None]) -> None:
        """End the run, because a process that is alive keeps it waiting; for a thread of its own.

        `death` says which process, by its role and, where there are several, its name; it is killed, and `release`
        kills whoever else the trainer may wait for.
        """
        wanted = death.process
        found = [each for each in self._watched.copy().values() if each[1].role == wanted.role]
        found.sort(key=lambda each: each[1].name != wanted.name)

        def kill() -> None:
            release()
            for (_, _, handle), process in found[:1]:
                end_actor(handle, process)

        self._end(replace(death, process=found[0][1] if found else wanted), kill)

    @contextlib.contextmanager
    def stops_at_an_error(self) -> Iterator[None]:
        """The end of the run begins with an error of this block: what verl closes next does not die."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """A death's error may be raised in this block, and not after it, however it ends; deaths are heard of further.

        Put the `except` outside of it: a signal may come before the block's end is noted, and not again for `AGAIN_S`.
        """
        try:
            yield
        finally:
            self._interruption.begin_end()

    def complete(self) -> None:
        """The run is complete: deaths count no more, and a warning tells each minute that its process has not ended.

        Nothing bounds what verl closes then, such as a logger that uploads: the run has succeeded.
        """
        self.stop()
        threading.Thread(target=self._tell_of_slow_end, daemon=True, name="slow end").start()

    def _tell_of_slow_end(self) -> None:
        minutes = 0.0
        while not self._interruption.wait_ended(TELL_S):
            minutes += TELL_S / 60
            logger.warning(
                "the run is complete, but its process has not ended for %.0f min: it closes verl's loggers and "
                "TransferQueue. Where it stands:\n%s",
                minutes,
                stack_of(threading.main_thread().ident or 0),
            )

    @property
    def left(self) -> TimeLeft:
        """What the end of the run has."""
        return self._interruption.left

    def bound_end(self, error: BaseException) -> None:
        """The run ends with `error`: from now on its end has `stop_s`, after which the process is ended by force."""
        self.left.begin()
        name = "bound of the run's end"
        threading.Thread(target=self._interruption.bound_end, args=(error,), daemon=True, name=name).start()

    def ended(self) -> None:
        """The run has ended."""
        self.stop()
        self._interruption.ended()

    def has_lost(self, *kinds: Kind) -> bool:
        """Whether the run ends because a process of one of these kinds has died."""
        return self._lost in {kind.role for kind in kinds}

    def has_replaced(self, kind: Kind, error: PartialRolloutError, before: int, claim_s: float) -> bool:
        """Whether a call that has run out may be made again, because the processes that it waited for were replaced.

        Silent processes of this kind are killed first: those that give no sign of life for a tenth of `claim_s`, for
        which this waits. A manager that is silent too is killed and started again meanwhile; Ray then puts the question
        to its new process, whose answer is waited for. `error` ended the call; `before` is what `num_replaced` was when
        the call began.

        Raises:
            ActorLost: a process was killed, and nobody has replaced it in time; names the process.
        """
        role, num_dead = kind.role, self._num_dead[kind.role]
        if self._stopped.is_set():
            return False  # the run ends, and nobody is replaced
        # Where one has died since then, nobody else needs to be silent.
        question = self._manager.end_silent.remote(str(error), role, waits=num_dead <= before)

        def is_over() -> bool:
            return self._is_fatal.is_set() or self._stopped.is_set()

        who_waits = f"trainer waits for the prompt manager to tell which {role} is silent"
        waiting = Wait(who_waits, manager_limit_s(self._answer_s) + WARN_SHARE * claim_s, ASK_S + WARN_SHARE * claim_s)
        # No signal's error comes out of a long wait of Ray's.
        while not ray.wait([question], timeout=waiting.step_s(LOOK_S))[0]:
            if waiting.is_over or is_over():
                return False  # the manager's own watch tells of it
            waiting.look()
        try:
            killed = ray.get(question, timeout=ASK_S)
        except RayError:
            return False

        # A death is told a moment later, and on another node when Ray has noticed that the process does not end.
        expected, told_s = max(num_dead + len(killed), before + 1), REPLACED_S if killed else EXPLAIN_S
        with self._replacing:
            self._replacing.wait_for(lambda: self._num_dead[role] >= expected or is_over(), told_s)
            self._replacing.wait_for(
                lambda: self._num_replaced[role] >= self._num_dead[role] or is_over(), self._start_s
            )
            is_replaced = expected <= self._num_replaced[role] == self._num_dead[role]
        if killed and not is_replaced and not is_over():
            raise ActorLost("\n".join([*killed, f"The trainer {self._doing()}"]))
        return is_replaced

    def num_replaced(self, kind: Kind) -> int:
        """Dead processes of this kind that others have replaced."""
        return self._num_replaced[kind.role]

    def explain(self, error: Exception) -> Exception:
        """The error that names the dead or silent process, where `error` comes of one; otherwise `error`.

        An error that a signal raises inside of Ray's compiled code comes out of it as a SystemError.
        """
        # Ray has told this trainer of something; the prompt manager may hear of the death a moment later.
        if is_of_ray := isinstance(error, RayError | SystemError):
            self._is_fatal.wait(EXPLAIN_S)
        # What a wait of a worker or a server was ended by comes in Ray's wrappers.
        cause = root_cause(error)
        if isinstance(cause, MAY_COME_OF_SILENCE) and not isinstance(cause, ActorLost):
            return self._fatal or self._end_silent(cause) or self._end_transfer_queue(cause) or error
        return (self._fatal if is_of_ray else None) or error

    def _end_silent(self, error: BaseException) -> PartialRolloutError | None:
        """Kill what is silent, since something has waited for it in vain; returns the error that names it."""
        ended, asked_s = list[str](), min(ASK_S, self.left.share(EXPLAIN_SHARE))
        try:
            ended = ray.get(self._manager.end_silent.remote(str(error)), timeout=asked_s)
        except GetTimeoutError:
            if isinstance(error, WaitTimeout):  # any other error may be right, and the manager only slow
                return self._end_transfer_queue(error) or self._end_manager(error, asked_s)
        except RayError:
            # Within the first time the manager is given up, if it has died for good.
            self._is_fatal.wait(min(POLL_S + self._answer_s, self.left.share(EXPLAIN_SHARE)))
        if ended:
            self._is_fatal.wait(EXPLAIN_S)
        if self._fatal is None and ended:  # others are to replace it, but the training has ended already
            return ActorLost("\n".join([*ended, f"The trainer {self._doing()}"]))
        return self._fatal

    def _end_transfer_queue(self, error: BaseException) -> PartialRolloutError | None:
        """Give up a TransferQueue that does not answer, though its processes live; returns the error that says so."""
        role = TRANSFER_QUEUE_CONTROLLER.role
        if not isinstance(error, TransferQueueSilent):
            return None
        death = Death(Process(role, role), f"it was killed, because it does not answer: {error}")
        release = self._releases.get(role, lambda: None)
        return self._given_up(death, lambda: self.end_stuck(death, release))

    def _end_manager(self, error: BaseException, asked_s: float) -> PartialRolloutError | None:
        """Give up a manager that is silent itself; returns the error that says so.

        Its replacement would come too late: the training has ended already, and its end has little time.
        """
        silent = f"it had not answered for {asked_s:.0f} s when a wait had run out"
        cause = f"it was killed, because {silent}, so nobody knows who else is silent: {error}"
        process = self._manager_process
        death = Death(process, cause, "", last_lines(process.log) if process.log else "")
        return self._given_up(death, lambda: self._end(death, lambda: end_actor(self._manager, process)))

    def _given_up(self, death: Death, end: Callable[[], None]) -> PartialRolloutError | None:
        """Call `end` in a thread of its own, since it lasts as long as the run; returns the error that it ends with."""
        threading.Thread(target=end, daemon=True, name=f"end of the {death.process.role}").start()
        self._is_fatal.wait(EXPLAIN_S)
        return self._fatal

    def _run(self, first: Sequence[tuple[str, str, ActorHandle]]) -> None:
        def begin() -> None:
            self._meet_manager(self._start_s)
            self.watch(first, is_whole=True)

        self._unless_lost(begin)
        while not self._stopped.is_set() and not self._is_fatal.is_set():
            death = self._unless_lost(self._next_death)
            if death is not None and not self._stopped.is_set() and self._is_news(death.process):
                self._handle(death)

    def _is_news(self, process: Process) -> bool:
        """Whether nobody has told this death yet: a new manager's process finds some of them too (`watch_again`)."""
        return process.role == PROMPT_MANAGER.role or process.name in self._watched

    def _meet_manager(self, limit_s: float = MANAGER_START_S) -> None:
        """Find the manager's process."""
        found: Process = ray.get(self._manager.meet.remote(self._handles_need), timeout=limit_s)
        role = PROMPT_MANAGER.role
        self._manager_process = Process(role, role, found.node, found.pid, found.log)
        note_found(self._manager_process)

    def _next_death(self) -> Death | None:
        """The next one, if there is one in time; that of the manager when Ray has started it again."""
        # The process that is known goes along: another one that answers says by that that the known one has died.
        poll = self._manager.next_death.remote(POLL_S, self._manager_process)
        warn_s = WARN_SHARE * self._answer_s
        if not ray.wait([poll], timeout=POLL_S + warn_s)[0] and not self._stopped.is_set():
            logger.warning(
                "%s has not answered for %.0f s; after %g s (partial_rollout.timeouts.call_s) it is killed",
                self._manager_process,
                warn_s,
                self._answer_s,
            )
        if not ray.wait([poll], timeout=self._answer_s - warn_s)[0] and not self._stopped.is_set():
            self._verdict = "it was killed, because it has not answered in time"
            end_actor(self._manager, self._manager_process)
        death: Death | None = ray.get(poll, timeout=MANAGER_START_S)
        if death is not None and death.process.role == PROMPT_MANAGER.role:
            death, self._verdict = replace(death, cause=self._verdict or death.cause), ""
            self._meet_manager()
        return death

    def _unless_lost(self, call: Callable[[], Death | None]) -> Death | None:
        """`call` of the manager; one that Ray does not start again, or that answers with an error, ends the run."""
        try:
            return call()
        except RayActorError as error:
            cause = how_it_died(error)
        except GetTimeoutError:
            cause = "it was given up, because it has not answered in time"
        except RayError as error:  # this thread would end without a word, and no death would be heard of any more
            cause = f"it was given up, because it does not tell of deaths any more: {root_cause(error)!r}"
        process = self._manager_process
        self._end(Death(process, self._verdict or cause, "", last_lines(process.log) if process.log else ""))
        return None

    def _handle(self, death: Death) -> None:
        # Nobody to watch again until a reaction has started another process, and watches that one.
        _, known = self._watched.pop(death.process.name, (None, death.process))
        if not death.process.pid:  # a new manager's process does not know where a dead one ran
            death = replace(death, process=known)
        reaction = self._reactions.get(death.process.role)
        if reaction is None:
            self._end(death)
        else:
            with self._replacing:
                self._num_dead[death.process.role] += 1
                self._replacing.notify_all()
            # A process that is started again takes seconds, in which others may die.
            name = f"go on without {death.process.name}"
            threading.Thread(target=self._react, args=(reaction, death), daemon=True, name=name).start()

    def _react(self, reaction: Callable[[Death], str], death: Death) -> None:
        try:
            self._note(death, reaction(death))
            with self._replacing:
                self._num_replaced[death.process.role] += 1
                self._replacing.notify_all()
        except Exception:  # whatever a reaction raises, the run must end by the name of the dead process
            if self._stopped.is_set():
                return
            logger.exception("could not go on without %s", death.process)
            self._end(death)

    def _end(self, death: Death, release: Callable[[], None] | None = None) -> None:
        with self._ending:
            if self._fatal is not None or self._stopped.is_set():
                return  # it comes of the first one, whose `release` kills others, or of the run's end
            self._lost = death.process.role
            self._fatal = ActorLost(f"{death}\nThe trainer {self._doing()}")
        self._is_fatal.set()
        with self._replacing:
            self._replacing.notify_all()
        self._note(death, "training ends")
        try:
            (release or self._releases.get(self._lost, lambda: None))()
        finally:  # whatever became of it, the main thread is told
            self._interruption.end_by(self._fatal)
            self._stopped.set()

    def _note(self, death: Death, action: str) -> None:
        fault = Fault.of(death.process, text=str(death), action=action, step=self._step())
        logger.warning("%s. %s", death, action, extra={"event": fault})


def note_found(process: Process) -> None:
    """Say in log and event stream where a process of the run is."""
    logger.info("%s is watched", process, extra={"event": ProcessFound.of(process)})
