"""Ends a start of training that does not go on: by name, and within a bound.

    start: main thread, which waits in verl for one process after the other <──signal── thread of the StartWatch
                                                                                          |  asks Ray: which actors?
                                                                                          v  asks the kernel: stopped?
    a process is stopped for `claim_s`: it is killed      ──> whoever waits for it gets an error, and the start ends
    the start takes longer than `start_s`: all are killed ──> the same

While training goes on, processes give signs of life (heartbeat.py). A process that starts is busy with one thing for
minutes and can be asked nothing, so here the kernel is asked, which tells of processes of this node only. What is
wrong in another way, as when two processes wait for each other, ends with `start_s`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray import JobID
from ray._private import state as ray_state
from ray.exceptions import RayActorError, RayError

from partial_rollout.core.deadlines import Deadlines, Late
from partial_rollout.errors import ActorLost, WaitTimeout
from partial_rollout.observability import stages
from partial_rollout.observability.events import Fault
from partial_rollout.runtime import processes
from partial_rollout.runtime.bounded import BLOCKED_S, call_bounded
from partial_rollout.runtime.death_watch import how_it_died, kill_pid, rays_process
from partial_rollout.runtime.heartbeat import interval_s
from partial_rollout.runtime.remote_call import root_cause
from partial_rollout.runtime.run_watch import note_found
from partial_rollout.types import Death, Process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from partial_rollout.runtime.run_watch import Interruption

logger = logging.getLogger(__name__)

SOUND_S = 330.0
"""Sound starts on a GPU took up to 319 s, where all libraries came from the disk; a warning before says nothing."""
ASK_S = 10.0
"""Ray answers at once; where it does not, the last answer counts."""
START = "start"
STOPPED = "stopped"
GONE = ("DEAD",)
"""Ray's word for the state of an actor that is no more."""
ROLES = {
    "WorkerDict": processes.TRAINING_RANK.role,
    "EnginePlace": processes.ENGINE_PLACE.role,
    "PartialRolloutServer": processes.ENGINE_SERVER.role,
    "GlobalRequestLoadBalancer": processes.LOAD_BALANCER.role,
    "RewardLoopWorker": processes.REWARD_WORKER.role,
    "PartialRolloutAgentLoopWorker": processes.AGENT_LOOP_WORKER.role,
    "TransferQueueController": processes.TRANSFER_QUEUE_CONTROLLER.role,
    "SimpleStorageUnit": processes.TRANSFER_QUEUE_STORAGE.role,
    "RolloutPromptManager": processes.PROMPT_MANAGER.role,
    "Witness": processes.WITNESS.role,
}
"""Roles by the class of an actor; an actor of another class is called by its class."""
WATCHED_BY_OTHERS = (
    processes.PROMPT_MANAGER.role,
    processes.TRANSFER_QUEUE_CONTROLLER.role,
    processes.TRANSFER_QUEUE_STORAGE.role,
)
"""Roles whose death others tell as the reason why the start has ended."""


@dataclass(frozen=True, slots=True)
class Actor:
    """An actor of the run, as Ray knows it."""

    process: Process
    """Without a process id as long as its process has not started."""
    stopped: tuple[Process, ...] = ()
    """Which of it and of the processes that it has started are stopped."""


def actors_of_run() -> list[Actor]:
    """The actors of this job that are starting or alive, but for the caller, and for the witness of its own life."""
    context = ray.get_runtime_context()
    told: Any = ray_state.actors(job_id=JobID.from_hex(context.get_job_id()))
    here = ray.util.get_node_ip_address()
    found = [told[key] for key in sorted(told) if told[key]["State"] not in GONE and key != context.get_actor_id()]
    # One look for all actors: each walks over the processes of the node.
    run, stopped = [process_of(each) for each in found], stopped_here()
    return [Actor(each, stopped_of(each, here, stopped)) for each in run if each.role != processes.WITNESS.role]


def process_of(actor: Mapping[str, Any]) -> Process:
    """The process of an actor, given as Ray's table has it."""
    kind: str = actor["ActorClassName"].rpartition(".")[2]
    name = actor["Name"] or f"{kind}-{actor['ActorID'][-8:]}"
    return rays_process(actor, ROLES.get(kind, kind), name)


def stopped_here() -> list[psutil.Process]:
    """All processes of this node that are stopped; of a sound node none is."""
    return [each for each in psutil.process_iter(["status"]) if each.info["status"] == psutil.STATUS_STOPPED]


def stopped_of(process: Process, here: str, stopped: Sequence[psutil.Process]) -> tuple[Process, ...]:
    """Which of `stopped` are an actor's; none where it runs on another node than `here`."""
    if not process.pid or process.node != here:
        return ()
    found: list[Process] = []
    for each in stopped:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if each.pid == process.pid:
                found.append(process)
            # An engine's own processes are children of its server, and Ray does not know them.
            elif any(parent.pid == process.pid for parent in each.parents()):
                name = f"{each.name()} of {process.name}"
                found.append(Process(process.role, name, process.node, each.pid))
    return tuple(found)


class StartWatch:
    """Watches the start of training in the task runner, from `begin` to `end`.

    begin -> watching -> end: the start is over
                      -> a process is frozen, or the start takes too long: `error` is raised in the main thread
    """

    def __init__(
        self,
        interruption: Interruption,
        *,
        start_s: float,
        claim_s: float,
        find: Callable[[], Sequence[Actor]] = actors_of_run,
        clock: Callable[[], float] = time.monotonic,
        kill: Callable[[Process], None] | None = None,
    ) -> None:
        """The start may take `start_s`; a process that is stopped for `claim_s` is frozen."""
        self._interruption, self._find, self._clock = interruption, find, clock
        self._kill = kill or end_process
        self._deadlines = Deadlines[str]({START: start_s, STOPPED: claim_s})
        self._interval_s = interval_s(min(start_s, claim_s))
        self._actors: Sequence[Actor] = ()
        self._stopped: dict[str, Process] = {}
        self._looked_s = 0.0
        self._over, self._deciding = threading.Event(), threading.Lock()
        self.error: ActorLost | None = None
        """Why the start was ended."""

    @property
    def is_over(self) -> bool:
        """Whether the run has started, or ends."""
        return self._over.is_set()

    def begin(self) -> None:
        """The start begins: look from now on, in a thread."""
        self.begin_at(self._clock())
        threading.Thread(target=self._run, daemon=True, name="start-watch").start()

    def begin_at(self, now_s: float) -> None:
        """The start begins; without a thread."""
        self._looked_s = now_s
        self._deadlines.begin(START, START, now_s)

    def end(self) -> None:
        """All processes have started, and others watch them; or the run ends."""
        with self._deciding:  # not between a look and what follows of it
            self._over.set()

    def look(self) -> None:
        """Look once, and warn of what is late, or end the start."""
        self._actors = self._ask()
        now_s = self._clock()
        # Whoever was stopped as a whole, as by Ctrl-Z, has missed looks.
        self._deadlines.put_off(max(0.0, now_s - self._looked_s - self._interval_s - ASK_S - BLOCKED_S))
        self._looked_s = now_s
        # By pid: a process that is started again has a deadline of its own.
        stopped = {str(process.pid): process for actor in self._actors for process in actor.stopped}
        for pid in self._stopped.keys() - stopped.keys():
            self._deadlines.end(pid)
        for pid in stopped.keys() - self._stopped.keys():
            self._deadlines.begin(pid, STOPPED, now_s)
        self._stopped = stopped
        for late in self._deadlines.look(now_s):
            if late.is_over:
                # `end` may have come since the look: a run that has started must not lose a process to its start.
                with self._deciding:
                    if self._over.is_set():
                        return
                    self._end(late)
                return
            # Where `start_s` is set low, a tenth of it is the time of the warning, as for all other waits.
            if late.phase == STOPPED or not late.waited_s < SOUND_S <= late.limit_s / 2:
                self._warn(late)

    def explain(self, error: BaseException) -> BaseException:
        """The error that names the process, where `error` comes of one that has died in the start; else `error`."""
        if self.error is not None:
            return self.error
        cause = root_cause(error)
        # Later deaths are explained by those who watch the actors then.
        if self.is_over or not isinstance(cause, RayActorError) or cause.actor_id is None:
            return error
        told = self._bounded(lambda: ray_state.actors(cause.actor_id), "tell of an actor that has died")
        if not told:
            return error
        process = process_of(told)
        named = ActorLost(f"{Death(process, how_it_died(cause))}\nTraining was starting: {stages.latest()}")
        self._note(process, str(named))
        return named

    def raise_error(self) -> None:
        """In the main thread: raise the error of a start that was ended, until the end of the run begins."""
        if self.error is not None:
            self._interruption.end_by(self.error)

    def _run(self) -> None:
        while not self._over.wait(self._interval_s) and self.error is None:
            try:
                self.look()
            except Exception:  # one look that failed must not leave the start without a bound
                logger.exception("looking at the processes of the start failed; the next look comes")
        self.raise_error()

    def _ask(self) -> Sequence[Actor]:
        found: Sequence[Actor] | None = self._bounded(self._find, "say which actors there are")
        # What was known before is better than nobody: a stopped process would lose its deadline.
        if found is None:
            return self._actors
        known = {actor.process for actor in self._actors}
        for actor in found:
            if actor.process.pid and actor.process not in known:
                note_found(actor.process)
        return found

    def _bounded(self, call: Callable[[], Any], what: str) -> Any:
        who = f"the start waits for Ray to {what}"
        try:
            return call_bounded(call, timeout_s=ASK_S, who_waits=who, check_interval_s=ASK_S)
        except (RayError, WaitTimeout) as error:
            logger.warning("%s: %s", who, error)
            return None

    def _end(self, late: Late[str]) -> None:
        process = self._stopped.get(late.key) if late.phase == STOPPED else None
        if process is not None:
            doomed = [process]
            why = f"it was stopped for {late.waited_s:.0f} s, longer than {_limit(late)} allows"
        else:
            # Nobody knows which of them is the reason, and a trainer that waits for one inside Ray hears of no error.
            doomed = [actor.process for actor in self._actors if actor.process.role not in WATCHED_BY_OTHERS]
            why = f"the start has taken {late.waited_s:.0f} s, longer than {_limit(late)} allows; {self._who()}"
            process = Process(processes.TASK_RUNNER.role, processes.TASK_RUNNER.role)
        self.error = ActorLost(f"{process} was given up: {why}.\nTraining was starting: {stages.latest()}")
        self._note(process, str(self.error))
        for each in doomed:
            self._kill(each)

    def _warn(self, late: Late[str]) -> None:
        process = self._stopped.get(late.key) if late.phase == STOPPED else None
        logger.warning(
            "%s for %.0f s (%s); after %s the start ends. %s",
            f"{process} is stopped" if process else "training has been starting",
            late.waited_s,
            stages.latest(),
            _limit(late),
            self._who(),
        )

    def _who(self) -> str:
        """Who may be the reason."""
        if self._stopped:
            return f"stopped: {', '.join(str(process) for process in self._stopped.values())}"
        waiting = [str(actor.process) for actor in self._actors if not actor.process.pid]
        if waiting:
            return f"not started yet: {', '.join(waiting)}"
        return f"none of its processes is stopped on this node: {', '.join(str(each.process) for each in self._actors)}"

    def _note(self, process: Process, text: str) -> None:
        logger.warning("%s", text, extra={"event": Fault.of(process, text=text, action="the start ends")})


def end_process(process: Process) -> None:
    """Kill a process of the run that may be frozen."""
    if process.node == ray.util.get_node_ip_address() and process.pid:
        kill_pid(process.pid)
        return
    with contextlib.suppress(ValueError):  # an actor without a name ends with its maker
        ray.kill(ray.get_actor(process.name))


def _limit(late: Late[str]) -> str:
    key = "claim_s" if late.phase == STOPPED else "start_s"
    return f"partial_rollout.timeouts.{key}={late.limit_s:g}"
