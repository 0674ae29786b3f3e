"""Tells of the death of an actor as soon as Ray knows of it, with its role, name, node, pid and last words.

Ray has no event for the death of an actor, but it fails every call to a dead one. So each watched actor has one call
parked at it, whose argument is an object that does not exist before the end of the run: the call waits with its caller,
and takes neither a thread nor a turn of the actor. Later calls of the same process to the actor would wait behind it,
so the calls are made by a process that asks these actors nothing else: the prompt manager's. Ray keeps such a call for
the next process of an actor that it starts again, so an engine server has a method that never returns (`until_killed`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray import cloudpickle
from ray._private import state as ray_state
from ray.exceptions import RayActorError

from partial_rollout.types import Death, Process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from ray.actor import ActorHandle

STDOUT, STDERR = 1, 2
NUM_LAST_LINES = 5
LAST_BYTES = 8192
"""Bytes read at the end of a log file: more than `NUM_LAST_LINES` lines of usual length."""
RAYS_MARKS = (":job_id:", ":actor_name:", ":task_name:")
"""Lines that Ray writes for itself."""
DESCRIBE_S = 60.0
"""How long an actor may take to say where it runs. A training rank that is loading its model answers after it."""


class Watched(NamedTuple):
    """An actor, by the name that an error gives it."""

    role: str
    name: str
    handle: ActorHandle


def packed(actors: Sequence[tuple[str, str, ActorHandle]]) -> bytes:
    """Actors, given as (role, name, handle), for another process, which need not unpack them in its event loop.

    Ray imports an actor's class where its handle arrives: for an engine server vLLM, which takes many seconds. What is
    packed here keeps its actor alive as long as this process lives, also where nobody holds its handle any more.
    """
    return cloudpickle.dumps(list(actors))


async def unpacked(actors: bytes) -> list[Watched]:
    """What `packed` has made of them; the event loop goes on meanwhile."""
    return [Watched(*actor) for actor in await asyncio.to_thread(cloudpickle.loads, actors)]


def describe(_actor: object) -> Process:
    """Run inside an actor: where it runs, and where its log is."""
    return own_process("", "")


def own_process(role: str, name: str) -> Process:
    """The process that calls this."""
    return Process(role, name, ray.util.get_node_ip_address(), os.getpid(), own_log())


def own_log() -> str:
    """Path of the file that this process writes its errors to; empty where they go elsewhere."""
    return log_of(os.getpid(), STDERR)


def log_of(pid: int, fd: int) -> str:
    """Path of the file that a process of this node writes to at `fd`; empty where that is no file."""
    try:
        log = os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:  # it has ended, or another operating system than Linux
        return ""
    return log if Path(log).is_file() else ""


def nothing(_actor: object, _token: object) -> None:
    """Run inside an actor, when its watch ends with the run."""


class Parking:
    """Where the one call to an actor waits whose end tells of the actor's death.

    A manager that was started again parks another one; the one before, whose caller is dead, goes.
    """

    def __init__(self) -> None:
        self._last: asyncio.Event | None = None

    async def until_killed(self) -> None:
        """Return when another call has come."""
        if self._last is not None:
            self._last.set()
        own = self._last = asyncio.Event()
        await own.wait()


async def ask_where(actor: Watched) -> Process:
    """Ask an actor where it runs."""
    return await actor.handle.__ray_call__.remote(describe)


def rays_process(actor: Mapping[str, Any], role: str, name: str) -> Process:
    """Where an actor runs, which need not answer: `actor` is its row in Ray's table of actors."""
    return Process(role, name, actor["Address"]["IPAddress"], actor["Pid"])


def node_of(handle: ActorHandle) -> str:
    """Address of the node on which an actor runs or ran, by Ray's table; empty: it never started."""
    told = ray_state.actors(handle._actor_id.hex())
    return rays_process(told, "", "").node if told else ""


def end_actor(handle: Any, process: Process) -> None:
    """Kill an actor that may be frozen.

    Ray forgets it at once, but first asks its process to end by itself, and kills a deaf one after five seconds.
    """
    if not process.pid and (told := ray_state.actors(handle._actor_id.hex())):
        process = rays_process(told, process.role, process.name)  # it froze before it could say where it runs
    ray.kill(handle, no_restart=False)  # an actor that Ray may start again is started again
    if process.pid and process.node == ray.util.get_node_ip_address():
        kill_pid(process.pid)


def kill_pid(pid: int) -> None:
    """Kill a process of this node, which may have ended; 0: its id is not known."""
    if pid:  # the kernel would take 0 for all processes of this one's group
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def last_lines(log: str) -> str:
    """The last lines of a log file; empty where there is none, as on another node."""
    try:
        with Path(log).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    told = [line for line in lines if line.strip() and not line.startswith(RAYS_MARKS)]
    return "\n".join(told[-NUM_LAST_LINES:])


def how_it_died(error: RayActorError) -> str:
    """Ray's reason, without its advice and without a full stop."""
    text = str(error)
    for mark in ("Worker exit detail: ", "The actor is dead because "):
        if mark in text:
            text = text.partition(mark)[2].split(". Some common causes")[0]
            break
    return text.strip().splitlines()[0].rstrip(".")


class DeathWatch:
    """Watches actors, and tells of each death once.

    watch -> watched -> dead, by itself or by `kill` -> told by `next_death`
                     -> forgotten by `forget`: its death is told nobody

    Lives in an event loop. `park` waits until an actor dies, which it tells by a RayActorError, or until the run ends;
    `ask` says where an actor runs.
    """

    def __init__(
        self,
        park: Callable[[Any], Awaitable[Any]],
        doing: Callable[[str], str],
        ask: Callable[[Watched], Awaitable[Process]] = ask_where,
        end: Callable[[Any, Process], None] = end_actor,
        on_death: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`doing` says of a name what the process was occupied with; empty where nothing is known. `end` kills.

        `on_death` is called with the name of each dead actor, before its death is told.
        """
        self._park, self._ask, self._doing, self._end_actor = park, ask, doing, end
        self._on_death = on_death
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._places: dict[str, tuple[Any, Process]] = {}
        """Handle and place of each watched actor."""
        self._verdicts: dict[str, str] = {}
        """Why actors were killed by `kill`."""
        self._deaths: deque[Death] = deque()
        self._told = asyncio.Condition()
        self.begun = asyncio.Event()
        """Whether a whole list is watched, and all of it have been asked where they run; or the watch has ended."""

    async def watch(self, actors: Sequence[Watched], *, is_whole: bool = False) -> list[Process]:
        """Watch actors from now on, and return where they run; one that is dead already is told of as well.

        `is_whole` says that nobody else is to be watched at this time.
        """
        if is_whole and not actors:
            self.begun.set()
        return list(await asyncio.gather(*(self._begin(actor, is_whole=is_whole) for actor in actors)))

    def forget(self, name: str) -> None:
        """The end of this actor is no death: somebody has asked for it."""
        watch = self._watches.pop(name, None)
        self._places.pop(name, None)
        self._verdicts.pop(name, None)
        if watch is not None:
            watch.cancel()

    def kill(self, name: str, why: str) -> bool:
        """Kill a watched actor, whose death is told of with `why` as its cause. False: nobody of this name is watched.

        What the actor was asked and has not answered raises RayActorError at whoever waits for it.
        """
        if name not in self._watches:
            return False
        self._verdicts[name] = why
        self._end_actor(*self._places[name])
        return True

    @property
    def dying(self) -> dict[str, str]:
        """Why each actor was killed by `kill` whose death is not noticed yet: on another node that takes seconds."""
        return {name: why for name, why in self._verdicts.items() if name in self._watches}

    def process(self, name: str) -> Process | None:
        """Where a watched actor runs; None: nobody of this name is watched."""
        return self._places[name][1] if name in self._places else None

    async def next_death(self, timeout_s: float) -> Death | None:
        """Wait for a death that was not told yet; None if there is none in time, or if the watch ends."""
        async with self._told:
            if not self._deaths:
                try:
                    await asyncio.wait_for(self._told.wait(), timeout_s)
                except asyncio.TimeoutError:  # noqa: UP041 - not the built-in one on Python 3.10
                    return None
            return self._deaths.popleft() if self._deaths else None

    async def end(self) -> None:
        """Tell of no more deaths, and wake whoever waits for one, or for whom to watch."""
        self.begun.set()
        for name in list(self._watches):
            self.forget(name)
        async with self._told:
            self._told.notify_all()

    async def _begin(self, actor: Watched, *, is_whole: bool) -> Process:
        # An actor that was started again has the name of the dead one, whose watch may not have ended yet.
        self.forget(actor.name)
        process = Process(actor.role, actor.name)
        # Asked before it is parked at, and watched before it has answered: it may be busy, or freeze meanwhile.
        asking = asyncio.ensure_future(self._ask(actor))
        self._places[actor.name] = actor.handle, process
        self._watches[actor.name] = asyncio.create_task(self._until_dead(actor.handle, process), name=actor.name)
        try:
            found = await asyncio.wait_for(asking, DESCRIBE_S)
        except (RayActorError, asyncio.TimeoutError):
            return process  # a dead one is told of by its watch; one that is busy is watched without its place
        finally:
            if is_whole:
                self.begun.set()  # all are asked before the first one can have answered
        process = Process(actor.role, actor.name, found.node, found.pid, found.log)
        if actor.name in self._places:
            self._places[actor.name] = actor.handle, process
        return process

    async def _until_dead(self, handle: Any, process: Process) -> None:
        try:
            await self._park(handle)
        except RayActorError as error:
            self._watches.pop(process.name, None)
            _, process = self._places.pop(process.name, (handle, process))
            self._on_death(process.name)
            cause = self._verdicts.pop(process.name, "") or how_it_died(error)
            # In a thread: the disk may be slow, and this event loop serves all workers.
            lines = await asyncio.to_thread(last_lines, process.log) if process.log else ""
            doing = self._doing(process.name)
            async with self._told:
                self._deaths.append(Death(process, cause, doing, lines))
                self._told.notify_all()
