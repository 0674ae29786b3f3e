"""All servers of an image job: sends each request to one of them, and again after each interruption.

A server that dies, or is silent for too long, is started again, and gets the trained weights before any request:

    up ──dies, or silent for stall_s──> killed, named ──> starts ──> waits for `still` ──> gets the weights ──> up
                                                             dies again before the next update of weights: the run ends

Requests that it had go on in another server from their last snapshot, or begin again with the same noise.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ray.exceptions import RayActorError

from partial_rollout.diffusion.contract import channel_name
from partial_rollout.diffusion.sampling import Interrupted, Progress, SampleRequest
from partial_rollout.errors import ActorLost, PartialRolloutError, WaitTimeout, WeightUpdateError
from partial_rollout.observability.events import Fault, ProcessFound
from partial_rollout.rollout.admission import Broadcast
from partial_rollout.runtime.death_watch import end_actor, how_it_died, last_lines
from partial_rollout.runtime.remote_call import answer_of
from partial_rollout.types import Death, Process
from partial_rollout.weights.sender import WeightSender

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence

    import torch

    from partial_rollout.diffusion.result import SampleResult
    from partial_rollout.weights.directory import ChannelAddress

logger = logging.getLogger(__name__)

ROLE = "image server"
SOUND_SHARE = 0.5
"""Share of `stall_s` for which an engine may be silent without a warning."""
BEATS = 10
"""Signs of life that are asked for within the time after which a silent engine is given up."""
MAX_LOST = 2
"""Servers that may die with the same request; with one more, the request is their death."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A finished image, and how often it was interrupted."""

    result: SampleResult
    num_interruptions: int
    servers: tuple[int, ...]
    """Number of the server that computed each denoise step."""


class Update(NamedTuple):
    """One update of weights."""

    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    version: int
    device: torch.device
    limit_s: float
    is_part: bool


@dataclass(slots=True)
class _Server:
    index: int
    handle: Any
    process: Process
    """Where the server runs, as far as that is known."""
    load: int = 0
    """Requests that it has."""
    is_up: bool = True
    deaths: int = 0
    """Since the last update of weights."""
    address: ChannelAddress | None = None
    starting: asyncio.Task[None] | None = None


class Replicas:
    """Handles of `DiffusionServer` actors. Each request, new or interrupted, goes to the server with the fewest."""

    def __init__(
        self,
        servers: Sequence[Any],
        *,
        workers_per_server: int,
        timeout_s: float,
        sample_timeout_s: float,
        stall_s: float = 300.0,
        start: Callable[[int], Any] | None = None,
        start_s: float = 3600.0,
        kill: Callable[[Any, Process], None] = end_actor,
    ) -> None:
        """Take servers that run.

        Args:
            servers: their handles.
            workers_per_server: receivers of weights in each.
            timeout_s: bounds each control call.
            sample_timeout_s: bounds the time for one image.
            stall_s: an engine that gives no sign of life for so long is taken for dead.
            start: creates server `index` again and returns its handle, while it is starting; None: the death of a
                server ends the run.
            start_s: bounds the start.
            kill: ends a server that may be frozen, by its handle and its process.
        """
        self._servers = [_Server(index, handle, _unknown(index)) for index, handle in enumerate(servers)]
        self._workers_per_server = workers_per_server
        self._timeout_s, self._sample_timeout_s = timeout_s, sample_timeout_s
        self._stall_s, self._start, self._start_s, self._kill = stall_s, start, start_s, kill
        self.still = asyncio.Lock()
        """Held by whoever changes or sends weights, or needs them not to change: the job, and a server that starts."""
        self._last: Update | None = None
        self._num_updates = 0
        self._failure: BaseException | None = None
        """Why the run must end."""
        self._moved = Broadcast()
        """Told when a server is up again, or `_failure` is set."""
        self._watches: list[asyncio.Task[None]] = []

    async def begin(self, *, watched: bool) -> None:
        """Ask all servers where they run. `watched`: from now on, also ask their engines for signs of life."""
        for server in self._servers:
            await self._find(server)
        if watched:
            self._watches = [
                self._supervised(self._watch(each), f"watch of {ROLE} {each.index}") for each in self._servers
            ]

    async def end(self) -> None:
        """Watch and start servers no more."""
        tasks = self._watches + [server.starting for server in self._servers if server.starting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self, handle: Any) -> None:
        """Kill a server, which may be frozen, and its engine."""
        for server in self._servers:
            if server.handle is handle:
                self._kill(handle, server.process)

    async def sample(self, request: SampleRequest) -> Sampled:
        """Generate one image, however often its request is interrupted.

        Raises:
            ResumeStalled: the request is interrupted again and again without a denoise step in between.
            WaitTimeout: the image is not finished in time; names the request and its server.
            ActorLost: a server has died and is not started again, or several have died with this request.
        """
        progress, servers, lost = Progress(request.request_id), list[int](), 0
        deadline_s = time.monotonic() + self._sample_timeout_s
        while True:
            server = await self._least_busy(request, deadline_s)
            try:
                outcome = await self._generate(server, request, deadline_s, progress)
            except _Died as died:
                lost += 1
                if lost > MAX_LOST:
                    raise ActorLost(f"{lost} servers died with request {request.request_id!r}: {died}") from died
                continue
            if not isinstance(outcome, Interrupted):
                # Steps before are another server's, whose snapshot this one has gone on from.
                servers += [server.index] * (len(outcome.versions) - len(servers))
                return Sampled(outcome, progress.interruptions, tuple(servers))
            servers += [server.index] * (outcome.step_index - len(servers))
            progress.interrupted(outcome)
            request = request.resumed_from(outcome.snapshot)

    async def hold(self) -> None:
        """Stop all engines between two denoise steps; their requests stay where they are."""
        await self._all("hold", lambda server: server.hold.remote())

    async def release(self) -> None:
        """Let all engines go on after `hold`."""
        await self._all("release", lambda server: server.release.remote())

    async def drain(self) -> int:
        """Interrupt all requests on all servers; return how many."""
        return sum(map(len, await self._all("drain", lambda server: server.drain.remote())))

    async def resume(self) -> None:
        """Open the gates of all servers after `drain`."""
        await self._all("resume", lambda server: server.resume.remote())

    async def update(
        self,
        weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        version: int,
        device: torch.device,
        limit_s: float,
        *,
        is_part: bool = False,
    ) -> None:
        """Send the trained weights to every worker of every server, all at the same time; whoever calls has `still`.

        A server that dies meanwhile gets them when it has started again. `is_part`: the weights of the model's files
        stay as they are where none comes.

        Raises:
            WeightUpdateError: a worker did not receive all weights.
            WaitTimeout: a server did not answer within `limit_s` and the time of a control call.
            ActorLost: a server has died, and is not started again.
        """
        self._raise_failure()
        # Kept for a server that is started again later: it has the weights of the model's files.
        self._last = Update(weights, version, device, limit_s, is_part)
        await self._each(self._send)
        # Only servers that have taken this update: one that is starting has not shown yet that it lives with it.
        for server in self._servers:
            server.deaths = 0 if server.is_up else server.deaths

    async def _send(self, server: _Server) -> None:
        """Send the last update to one server."""
        update = self._last
        if update is None:
            return
        address = server.address
        if address is None:
            address = await self._call(server, "weight_channel", lambda each: each.weight_channel.remote())
            server.address = address
        # At the beginning and at the end: silence that an update has overlapped counts for nothing.
        self._num_updates += 1
        # A server ends a late update by itself and names what is missing; it gets the time of a control call to say so.
        receiving_s = update.limit_s + self._timeout_s
        received = asyncio.ensure_future(
            self._call(
                server,
                "receive_weights",
                lambda each: each.receive_weights.remote(update.version, update.limit_s, is_part=update.is_part),
                receiving_s,
            )
        )

        def check() -> None:
            if received.done():
                received.result()

        def send(rank: int) -> None:
            options: dict[str, Any] = {"timeout_s": update.limit_s, "check": check, "device": update.device}
            with WeightSender(address, channel_name(rank), update_number=update.version, **options) as sender:
                sender.send(update.weights())

        loop, pool = asyncio.get_running_loop(), ThreadPoolExecutor(self._workers_per_server, "weights")
        try:
            sent = [loop.run_in_executor(pool, send, rank) for rank in range(self._workers_per_server)]
            await asyncio.gather(received, *sent)
        except PartialRolloutError as error:
            # A sender may have seen the death of its peer before Ray tells of it.
            await asyncio.wait([received], timeout=self._timeout_s)
            if received.done() and isinstance(received.exception(), _Died):
                raise _Died(str(received.exception())) from received.exception()
            # Only a failed update leaves half of the weights in a server; it must not go on with them.
            if self._start is None or not server.is_up or not isinstance(error, WeightUpdateError):
                raise
            self._give_up(server, f"it has half an update of weights and was killed: {error}")
            self._raise_failure()
            raise _Died(str(error)) from error
        finally:
            self._num_updates += 1
            # Without waiting: a sender that hangs ends by its own limit, and the job must not stand still for it.
            pool.shutdown(wait=False)

    async def _least_busy(self, request: SampleRequest, deadline_s: float) -> _Server:
        """The server that has the fewest requests; waits while none is up."""
        if not any(server.is_up for server in self._servers):
            who_waits = f"request {request.request_id!r} for an image server to start again (rollout.timeout_s)"
            turn = self._moved.wait_for(self._is_up_or_failed)
            await answer_of(turn, timeout_s=max(0.0, deadline_s - time.monotonic()), who_waits=who_waits)
            self._raise_failure()
        return min((server for server in self._servers if server.is_up), key=lambda server: server.load)

    async def _generate(
        self, server: _Server, request: SampleRequest, deadline_s: float, progress: Progress
    ) -> SampleResult | Interrupted:
        server.load += 1
        who_waits = (
            f"request {request.request_id!r} for its image by server {server.index}, {progress.interruptions} "
            f"interruptions and rollout.timeout_s={self._sample_timeout_s:g} seconds after it was asked for"
        )
        try:
            call = self._named(server, lambda each: each.generate.remote(request))
            return await answer_of(call, timeout_s=max(0.0, deadline_s - time.monotonic()), who_waits=who_waits)
        finally:
            server.load -= 1

    async def _all(self, what: str, call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """The answers of all servers that are up, within the time of a control call."""
        self._raise_failure()
        return await self._each(lambda server: self._call(server, what, call))

    async def _each(self, call: Callable[[_Server], Awaitable[Any]]) -> list[Any]:
        """The answers of all servers that are up; those that die meanwhile have none."""
        # A server that is starting has no requests, and gets the weights from `_start_again`.
        up = [server for server in self._servers if server.is_up]
        answers = await asyncio.gather(*(call(server) for server in up), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, _Died):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _call(
        self, server: _Server, what: str, call: Callable[[Any], Awaitable[Any]], limit_s: float | None = None
    ) -> Any:
        """The answer of one server, within `limit_s` or the time of a control call; one that is late is killed."""
        handle, who_waits = server.handle, f"the job for {what} of {server.process}"
        try:
            return await answer_of(self._named(server, call), timeout_s=limit_s or self._timeout_s, who_waits=who_waits)
        except WaitTimeout as error:
            # Another call has seen the death already, and a new server may have its place.
            if self._start is None or not server.is_up or server.handle is not handle:
                raise
            self._give_up(server, f"it was late and was killed: {error}")
            self._raise_failure()
            raise _Died(str(error)) from error

    async def _named(self, server: _Server, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """The answer of a server.

        Raises:
            _Died: the server has died, and is started again.
            ActorLost: it has died, and is not started again.
        """
        handle = server.handle
        try:
            return await call(handle)
        except RayActorError as error:
            # One death is met by all calls at this server; the first one names it.
            if server.handle is handle and server.is_up:
                self._lost(server, how_it_died(error))
            self._raise_failure()
            raise _Died(f"{server.process} died: {how_it_died(error)}") from error

    def _give_up(self, server: _Server, cause: str, *, noticed_after_s: float | None = None) -> None:
        """Kill a server that is silent."""
        self._kill(server.handle, server.process)
        self._lost(server, cause, noticed_after_s=noticed_after_s)

    def _lost(self, server: _Server, cause: str, *, noticed_after_s: float | None = None) -> None:
        """A server has died: name it, and begin to start it again."""
        process, server.is_up, server.deaths = server.process, False, server.deaths + 1
        death = Death(process, cause, f"had {server.load} requests", last_lines(process.log) if process.log else "")
        # What has killed it twice since an update is likely to do so again.
        again = self._start is not None and server.deaths == 1
        action = "it is started again and gets the trained weights; its images are generated again"
        if not again:
            action = (
                "the run ends"
                if self._start is None
                else "it has died twice since the last update of weights: the run ends"
            )
        fault = Fault.of(process, text=str(death), action=action, noticed_after_s=noticed_after_s)
        logger.error("%s; %s", death, action, extra={"event": fault})
        if again:
            server.starting = self._supervised(self._start_again(server), f"start of {ROLE} {server.index}")
        else:
            self._fail(ActorLost(f"{death}; {action}"))

    async def _start_again(self, server: _Server) -> None:
        try:
            if self._start is None:
                return
            server.handle, server.process, server.address = self._start(server.index), _unknown(server.index), None
            who_waits = f"the job for image server {server.index} to start again"
            call = self._named(server, lambda each: each.statistics.remote())
            await answer_of(call, timeout_s=self._start_s, who_waits=who_waits)
            await self._find(server)
            # Not during training or another update: the weights must not change while they are sent.
            async with self.still:
                await self._send(server)
                server.is_up = True
        except (PartialRolloutError, RayActorError) as error:
            self._fail(error)
        self._moved.notify()

    def _supervised(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task whose failure ends the run."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(error)

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(ended)
        return task

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._moved.notify()

    def _is_up_or_failed(self) -> bool:
        return self._failure is not None or any(server.is_up for server in self._servers)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _find(self, server: _Server) -> None:
        """Ask a server where it runs, and say so."""
        place = await self._call(server, "its place", lambda each: each.place.remote())
        process = server.process = dataclasses.replace(place, role=ROLE, name=str(server.index))
        logger.info("%s runs", process, extra={"event": ProcessFound.of(process)})

    async def _watch(self, server: _Server) -> None:
        """Ask the engine of one server for signs of life, which it gives between two denoise steps."""
        while True:
            await asyncio.sleep(self._stall_s / BEATS)
            handle, updates, asked_s = server.handle, self._num_updates, time.monotonic()
            if (
                not server.is_up or self.still.locked()
            ):  # an update has a limit of its own, and the engine is silent in it
                continue
            try:
                call = self._named(server, lambda each: each.count_steps.remote(self._stall_s))
                who_waits = f"the job for a sign of life of {server.process}"
                # A denoise step of a large picture takes long.
                await answer_of(call, timeout_s=self._stall_s, who_waits=who_waits, sound_s=SOUND_SHARE * self._stall_s)
            except WaitTimeout:
                # The engine is silent in an update, which may have begun after the question.
                if server.handle is handle and server.is_up and updates == self._num_updates:
                    silent_s = time.monotonic() - asked_s
                    cause = f"its engine gave no sign of life for {silent_s:.0f} s (rollout.stall_s), and was killed"
                    self._give_up(server, cause, noticed_after_s=silent_s)
            except PartialRolloutError as error:
                if not isinstance(error, _Died):
                    self._fail(error)
                    return


class _Died(ActorLost):
    """A server has died, and is started again."""


def _unknown(index: int) -> Process:
    return Process(ROLE, str(index))
