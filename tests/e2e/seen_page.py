"""The page of a job in a browser, from the job's start to its end, beside what `status` says at the same time."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
from aiohttp.test_utils import TestServer

from partial_rollout.view import RunState, make_app
from tests.unit.observability.browser import open_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TOKEN = "the-token"
LIVE = "document.body.dataset.step == '{}'"
ENDED = "document.getElementById('head').textContent.includes('health ended')"
STATES = ("pending", "ongoing", "deferred", "done", "taken")
WATCH_FLOW = """window.flows = [];
new MutationObserver(() => flows.push([document.getElementById('flow_of').textContent,
  ...[...document.querySelectorAll('#flow span')].map(part => part.textContent.trim())]))
.observe(document.getElementById('flow'), {childList: true})"""
"""Remembers what the flow has shown."""
MANAGER_IS_THERE = (
    "document.getElementById('head').textContent.includes('starting, engines') "
    "|| document.querySelector('#flow span') !== null"
)
"""The prompt manager, which `status` asks, is there once engines start. They take longer to start than `status` to
connect; the few steps of a job may be over before it has."""
STATUS_EVERY_S = "0.5"
END_S = 60.0
"""Within which `status` ends when it is told to, on a busy machine."""
Counts = tuple[int, ...]
"""Prompts in the order of `STATES`."""


@dataclass(frozen=True)
class SeenPage:
    """What the page of a job showed."""

    starting: list[str]
    """The page's head before the first step."""
    live: list[str]
    """The page's head in the job's first step or later."""
    live_flows: set[Counts]
    """Prompts by state that the page showed while the job went on."""
    status: set[Counts]
    """Prompts by state that `python -m partial_rollout.status` told meanwhile."""
    head: list[str]
    """After the job's end, as all that follows."""
    flow: list[str]
    steps: list[list[str]]
    causes: list[list[str]]
    shown: dict[str, Any]
    """What the server knew."""


def see_page(run: Path, profile: Path, timeout_s: float) -> SeenPage:
    """Keep the page of a job that starts now open until the job has ended."""
    return asyncio.run(_see_page(RunState(run), profile, timeout_s))


async def _see_page(state: RunState, profile: Path, timeout_s: float) -> SeenPage:
    async with TestServer(make_app(state, TOKEN)) as server:  # noqa: SIM117 - the address is the server's
        async with open_page(str(server.make_url(f"/?token={TOKEN}")), profile) as tab:
            await tab.until(LIVE.format(0))
            starting = await tab.parts("head")
            await tab.value(WATCH_FLOW)
            await tab.until(MANAGER_IS_THERE, timeout_s=timeout_s)
            async with _status_of(state.run) as said:
                await tab.until("Number(document.body.dataset.step) > 0", timeout_s=timeout_s)
                live = await tab.parts("head")
                await tab.until(ENDED, timeout_s=timeout_s)
            flows = await tab.value("flows")
            return SeenPage(
                starting=starting,
                live=live,
                live_flows={_counts(parts) for what, *parts in flows if what == "Prompts now, as told once a second:"},
                status=said,
                head=await tab.parts("head"),
                flow=await tab.parts("flow"),
                steps=await tab.cells("steps"),
                causes=await tab.cells("causes"),
                shown=dict(state.shown),
            )


def _counts(parts: list[str]) -> Counts:
    told = dict(part.split() for part in parts)
    return tuple(int(told.get(state, 0)) for state in STATES)


@asynccontextmanager
async def _status_of(run: Path) -> AsyncIterator[set[Counts]]:
    """What `status --watch` says, until the block ends; the set is complete then."""
    words = ["--json", "--watch", STATUS_EVERY_S, "--address", _cluster_of(run)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "partial_rollout.status", *words),
        env=os.environ | {"RAY_AUTH_MODE": "token"},  # with an address Ray does not set it
        stdout=asyncio.subprocess.PIPE,
    )
    said = set[Counts]()

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            queue = json.loads(line)["queue"]
            said.add(tuple(queue[state] for state in STATES))

    reading = asyncio.create_task(read(), name="status --watch")
    try:
        yield said
    finally:
        if process.returncode is None:  # it may have met the end of the cluster already
            process.terminate()
        await asyncio.wait_for(asyncio.gather(process.wait(), reading), END_S)


def _cluster_of(run: Path) -> str:
    """Address of the job's own Ray: beside it others may run on this machine."""
    for process in psutil.process_iter(["name"]):
        try:
            if process.info["name"] == "raylet" and str(run) in process.environ().get("VERL_FILE_LOGGER_PATH", ""):
                return next(word.partition("=")[2] for word in process.cmdline() if word.startswith("--gcs-address="))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    raise LookupError(f"no Ray cluster of the job in {run}")
