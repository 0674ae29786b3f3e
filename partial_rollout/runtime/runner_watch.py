"""The driver's watch on the task runner, which tells a frozen one from a busy one and ends it.

    task runner: a thread ──sign of life──> witness, an actor on the driver's node <──asks── driver: a thread

The driver waits for the end of the task runner for as long as training takes, and Ray tells nothing of a process that
is alive and does nothing. The task runner's main thread is busy with one thing for minutes, so a thread of its own
sends the signs, from its first line to its last: they say that the process runs, not that training goes on. Ray starts
a witness that has died again; while the witness is silent nobody else is called silent.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import TimeoutError as LateAnswer
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from partial_rollout.core.deadlines import Deadlines
from partial_rollout.errors import ClusterError, TaskRunnerLost
from partial_rollout.runtime.bounded import BLOCKED_S
from partial_rollout.runtime.death_watch import end_actor, how_it_died, kill_pid, last_lines, own_process
from partial_rollout.runtime.heartbeat import ANSWER_S, SILENT, Pulse, describe_silence, interval_s
from partial_rollout.runtime.processes import TASK_RUNNER, WITNESS
from partial_rollout.runtime.run_watch import note_found
from partial_rollout.types import Death, Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.actor import ActorHandle

    from partial_rollout.core.deadlines import Late

logger = logging.getLogger(__name__)

FROZEN_S = 30.0
"""A witness does nothing but answer; one that has not answered for so long is killed, and Ray starts another one."""
WITNESS_OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "enable_task_events": False}


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of life of the task runner."""

    process: Process
    count: int
    doing: str
    """What the task runner did, in the past tense: it is said of one that has died."""
    ends_with: str = ""
    """Error that ends the run, if no death is its cause."""


class Witness:
    """Keeps the last sign of life. A plain class; `RunnerWatch` makes it an actor."""

    def __init__(self) -> None:
        self._sign: Sign | None = None

    def take(self, sign: Sign) -> None:
        """Keep this sign."""
        self._sign = sign

    def latest(self) -> tuple[Process, Sign | None]:
        """Where the witness runs, and the last sign; None: none has come."""
        return own_process(WITNESS.role, WITNESS.role), self._sign


def send_signs(
    witness: ActorHandle, claim_s: float, doing: Callable[[], str], ends_with: Callable[[], str] = str
) -> None:
    """Send signs of life from now on, in a thread; call this in the task runner."""
    process = own_process(TASK_RUNNER.role, TASK_RUNNER.role)

    def send(count: int) -> None:
        # A dead witness is started again by Ray.
        with contextlib.suppress(RayActorError):
            witness.take.remote(Sign(process, count, doing(), ends_with())).future().result(ANSWER_S)

    Pulse(send, claim_s).begin_alone()


class RunnerSilence:
    """How long nothing has been heard of the task runner; no thread and no clock of its own.

    waiting for a sign -> named in a warning, after a tenth of the time -> silent: `look` says so, once
        ^                     |
        +---------------------+ a sign with another count
    """

    def __init__(self, claim_s: float, now_s: float) -> None:
        """The first sign is waited for from `now_s` on."""
        self._deadlines = Deadlines[str]({SILENT: claim_s})
        self._deadlines.begin(SILENT, SILENT, now_s)
        self._looked_s, self._longest_s = now_s, interval_s(claim_s) + BLOCKED_S
        self.sign = Sign(Process(TASK_RUNNER.role, TASK_RUNNER.role), -1, "was starting")
        """The last one; the task runner sends its first one when it begins."""

    def unknown(self, now_s: float) -> None:
        """Nobody could say whether a sign has come: the time since the last look does not count."""
        self._deadlines.put_off(now_s - self._looked_s)
        self._looked_s = now_s

    def look(self, sign: Sign | None, now_s: float) -> Late[str] | None:
        """`sign` is the last one that has come. A warning, or the end of the wait; None: neither."""
        # A driver that was stopped for a while, as by Ctrl-Z, has missed signs.
        self._deadlines.put_off(max(0.0, now_s - self._looked_s - self._longest_s))
        self._looked_s = now_s
        if sign is not None and sign.count != self.sign.count:
            self.sign = sign
            self._deadlines.begin(SILENT, SILENT, now_s)
        return next(iter(self._deadlines.look(now_s)), None)


class RunnerWatch:
    """Watches one task runner, from `begin` to `stop`; makes the witness."""

    def __init__(self, claim_s: float) -> None:
        """A task runner that gives no sign of life for `claim_s` is killed; Ray must run."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        as_actor: Any = ray.remote(Witness)
        self.witness: ActorHandle = as_actor.options(scheduling_strategy=here, **WITNESS_OPTIONS).remote()
        self._claim_s = claim_s
        self._place = Process(WITNESS.role, WITNESS.role)
        self._silence = RunnerSilence(claim_s, time.monotonic())
        self._cause = ""
        """Why the task runner was killed."""
        self._stopped, self._asking = threading.Event(), threading.Lock()

    def begin(self, runner: ActorHandle) -> None:
        """`runner` has been asked to train."""
        self._silence = RunnerSilence(self._claim_s, time.monotonic())
        threading.Thread(target=self._run, args=(runner,), daemon=True, name="runner-watch").start()

    def stop(self) -> None:
        """The task runner has ended, and Ray may be shut down."""
        with self._asking:
            self._stopped.set()

    def explain(self, error: RayError) -> RayError | ClusterError:
        """The error that names the task runner, where `error` says that it has died; otherwise `error`.

        Where an error had ended the run before the task runner died, that error is told.
        """
        if isinstance(error, RayTaskError) or not isinstance(error, RayActorError):
            return error
        sign = self._silence.sign
        if sign.ends_with:
            how = how_it_died(error)
            return ClusterError(f"{sign.ends_with}\n{sign.process} died while the run ended with this error ({how})")
        log = sign.process.log
        lines = last_lines(log) if log else ""
        return TaskRunnerLost(Death(sign.process, self._cause or how_it_died(error), sign.doing, lines))

    def _run(self, runner: ActorHandle) -> None:
        while not self._stopped.wait(interval_s(self._claim_s)):
            try:
                self._look(runner)
            except Exception:  # one look that failed must not leave the driver without a bound
                logger.exception("looking at the task runner failed; the next look comes")

    def _look(self, runner: ActorHandle) -> None:
        with self._asking:
            if self._stopped.is_set():
                return
            if self._cause:  # its silence is told once, and killing it may have failed
                end_actor(runner, self._silence.sign.process)
                return
            latest = self.witness.latest.remote().future()
        try:
            place, sign = latest.result(FROZEN_S)
        except (RayActorError, LateAnswer) as error:
            self._silence.unknown(time.monotonic())
            self._without_witness(error)
            return
        if place != self._place:
            self._place = place
            note_found(place)
        late = self._silence.look(sign, time.monotonic())
        if late is not None:
            self._tell(late, runner)

    def _without_witness(self, error: Exception) -> None:
        if self._place.pid and not self._stopped.is_set():
            logger.warning("%s does not answer (%s); it is started again", self._place, type(error).__name__)
            kill_pid(self._place.pid)  # Ray starts another one
            self._place = Process(WITNESS.role, WITNESS.role)

    def _tell(self, late: Late[str], runner: ActorHandle) -> None:
        sign = self._silence.sign
        if late.is_over:
            with self._asking:
                if not self._stopped.is_set():
                    self._cause = describe_silence(late)
                    end_actor(runner, sign.process)
        else:
            logger.warning(
                "%s has given no sign of life for %.0f s; it %s. After %g s (partial_rollout.timeouts.claim_s) it is "
                "killed, and training is started again from its last checkpoint",
                sign.process,
                late.waited_s,
                sign.doing,
                late.limit_s,
            )
