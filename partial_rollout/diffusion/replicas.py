"""All servers of an image job: sends each request to one of them, and again after each interruption."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from partial_rollout.diffusion.contract import channel_name
from partial_rollout.diffusion.sampling import Interrupted, Progress, SampleRequest
from partial_rollout.errors import ActorLost
from partial_rollout.runtime.remote_call import answer_of
from partial_rollout.weights.sender import WeightSender

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    import torch

    from partial_rollout.diffusion.result import SampleResult
    from partial_rollout.weights.directory import ChannelAddress


@dataclass(frozen=True, slots=True)
class Sampled:
    """A finished image, and how often it was interrupted."""

    result: SampleResult
    num_interruptions: int
    servers: tuple[int, ...]
    """Number of the server that computed each denoise step."""


class Replicas:
    """Handles of `DiffusionServer` actors. Each request, new or interrupted, goes to the server with the fewest."""

    def __init__(
        self, servers: Sequence[Any], *, workers_per_server: int, timeout_s: float, sample_timeout_s: float
    ) -> None:
        """Take servers that run; `timeout_s` bounds each control call, `sample_timeout_s` the time for one image."""
        self._servers = list(servers)
        self._load = [0] * len(servers)
        self._workers_per_server = workers_per_server
        self._timeout_s, self._sample_timeout_s = timeout_s, sample_timeout_s
        self._addresses: list[ChannelAddress] | None = None

    async def sample(self, request: SampleRequest) -> Sampled:
        """Generate one image, however often its request is interrupted.

        Raises:
            ResumeStalled: the request is interrupted again and again without a denoise step in between.
            WaitTimeout: the image is not finished in time; names the request and its server.
            ActorLost: the server has died; names its process.
        """
        progress, servers = Progress(request.request_id), list[int]()
        deadline_s = time.monotonic() + self._sample_timeout_s
        while True:
            index = min(range(len(self._servers)), key=self._load.__getitem__)
            outcome = await self._generate(index, request, deadline_s, progress)
            if not isinstance(outcome, Interrupted):
                servers += [index] * (len(outcome.versions) - len(servers))
                return Sampled(outcome, progress.interruptions, tuple(servers))
            servers += [index] * (outcome.step_index - len(servers))
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
    ) -> None:
        """Send the trained weights to every worker of every server, all at the same time.

        Raises:
            WeightUpdateError: a worker did not receive all weights.
            WaitTimeout: a server did not answer within `limit_s` and the time of a control call.
            ActorLost: a server has died; names its process.
        """
        if self._addresses is None:
            self._addresses = await self._all("weight_channel", lambda server: server.weight_channel.remote())
        channels = [(address, rank) for address in self._addresses for rank in range(self._workers_per_server)]
        loop = asyncio.get_running_loop()
        # A server ends a late update by itself and names what is missing; it gets the time of a control call to say so.
        receiving_s = limit_s + self._timeout_s
        received = asyncio.ensure_future(
            self._all("receive_weights", lambda server: server.receive_weights.remote(version, limit_s), receiving_s)
        )

        def check() -> None:
            if received.done():
                received.result()

        def send(address: ChannelAddress, rank: int) -> None:
            options: dict[str, Any] = {"update_number": version, "timeout_s": limit_s, "check": check, "device": device}
            with WeightSender(address, channel_name(rank), **options) as sender:
                sender.send(weights())

        pool = ThreadPoolExecutor(len(channels), thread_name_prefix="weights")
        try:
            sent = [loop.run_in_executor(pool, send, *channel) for channel in channels]
            await asyncio.gather(received, *sent)
        finally:
            pool.shutdown(wait=False)

    async def _generate(
        self, index: int, request: SampleRequest, deadline_s: float, progress: Progress
    ) -> SampleResult | Interrupted:
        self._load[index] += 1
        who_waits = (
            f"request {request.request_id!r} for its image by server {index}, {progress.interruptions} interruptions "
            f"and rollout.timeout_s={self._sample_timeout_s:g} seconds after it was asked for"
        )
        try:
            call = _named(index, self._servers[index].generate.remote(request))
            return await answer_of(call, timeout_s=max(0.0, deadline_s - time.monotonic()), who_waits=who_waits)
        finally:
            self._load[index] -= 1

    async def _all(self, what: str, call: Callable[[Any], Awaitable[Any]], limit_s: float | None = None) -> list[Any]:
        """The answers of all servers, within `limit_s` or the time of a control call."""
        calls = asyncio.gather(*(_named(index, call(server)) for index, server in enumerate(self._servers)))
        who_waits = f"the job for {what} of {len(self._servers)} server(s)"
        return await answer_of(calls, timeout_s=limit_s or self._timeout_s, who_waits=who_waits)


async def _named(index: int, call: Awaitable[Any]) -> Any:
    """The answer of server `index`. Of a dead server Ray's error has pid and node, but not which server it was."""
    try:
        return await call
    except RayActorError as error:
        raise ActorLost(f"image server {index} has died: {error}") from error
