"""The servers of a job: each request goes to one of them, and comes back for the next when it is interrupted."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partial_rollout.diffusion.contract import channel_name
from partial_rollout.diffusion.sampling import Interrupted, Progress, SampleRequest
from partial_rollout.runtime.remote_call import answer_of
from partial_rollout.weights.sender import WeightSender

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    import torch

    from partial_rollout.diffusion.result import SampleResult
    from partial_rollout.weights.directory import ChannelAddress


@dataclass(frozen=True, slots=True)
class Sampled:
    """A finished image, and what it took."""

    result: SampleResult
    num_interruptions: int


class Replicas:
    """Handles of `DiffusionServer` actors. Requests go where fewest are; so do those that come back."""

    def __init__(
        self, servers: Sequence[Any], *, workers_per_server: int, timeout_s: float, sample_timeout_s: float
    ) -> None:
        """Take running servers; `timeout_s` bounds every control call, `sample_timeout_s` one image."""
        self._servers = list(servers)
        self._load = [0] * len(servers)
        self._workers_per_server = workers_per_server
        self._timeout_s, self._sample_timeout_s = timeout_s, sample_timeout_s
        self._addresses: list[ChannelAddress] | None = None

    async def sample(self, request: SampleRequest) -> Sampled:
        """Generate one image, however often it is interrupted.

        Raises:
            ResumeStalled: it comes back again and again without a step in between.
            WaitTimeout: it is not there in time; names the request, its server and how far it was.
        """
        progress = Progress(request.request_id)
        deadline_s = time.monotonic() + self._sample_timeout_s
        while True:
            outcome = await self._generate(request, deadline_s, progress)
            if not isinstance(outcome, Interrupted):
                return Sampled(outcome, progress.interruptions)
            progress.interrupted(outcome)
            request = request.resumed_from(outcome.snapshot)

    async def hold(self) -> None:
        """Stop all servers between two denoise steps, requests in place."""
        await self._all("hold", lambda server: server.hold.remote())

    async def release(self) -> None:
        """Let them go on."""
        await self._all("release", lambda server: server.release.remote())

    async def drain(self) -> int:
        """Take all requests out of all servers; return how many."""
        return sum(map(len, await self._all("drain", lambda server: server.drain.remote())))

    async def resume(self) -> None:
        """Open all gates."""
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
            WeightUpdateError: one did not get them whole.
            WaitTimeout: a server has not said so in `limit_s` and the time of a control call.
        """
        if self._addresses is None:
            self._addresses = await self._all("weight_channel", lambda server: server.weight_channel.remote())
        channels = [(address, rank) for address in self._addresses for rank in range(self._workers_per_server)]
        loop = asyncio.get_running_loop()
        # A server bounds the update by itself and names what is missing: it gets the time to say so.
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
        self, request: SampleRequest, deadline_s: float, progress: Progress
    ) -> SampleResult | Interrupted:
        index = min(range(len(self._servers)), key=self._load.__getitem__)
        self._load[index] += 1
        who_waits = (
            f"request {request.request_id!r} for its image by server {index}, {progress.interruptions} interruptions "
            f"and rollout.timeout_s={self._sample_timeout_s:g} after it was asked for"
        )
        try:
            call = self._servers[index].generate.remote(request)
            return await answer_of(call, timeout_s=max(0.0, deadline_s - time.monotonic()), who_waits=who_waits)
        finally:
            self._load[index] -= 1

    async def _all(self, what: str, call: Callable[[Any], Awaitable[Any]], limit_s: float | None = None) -> list[Any]:
        """The answers of all servers; without a limit of its own, a call has that of control calls."""
        calls = asyncio.gather(*(call(server) for server in self._servers))
        who_waits = f"the job for {what} of {len(self._servers)} server(s)"
        return await answer_of(calls, timeout_s=limit_s or self._timeout_s, who_waits=who_waits)
