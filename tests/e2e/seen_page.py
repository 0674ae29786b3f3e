"""The page of a job in a browser, from the job's start to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp.test_utils import TestServer

from partial_rollout.view import RunState, make_app
from tests.unit.observability.browser import open_page

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "the-token"
LIVE = "document.body.dataset.step == '{}'"
ENDED = "document.getElementById('head').textContent.includes('health ended')"


@dataclass(frozen=True)
class SeenPage:
    """What the page of a job showed."""

    starting: list[str]
    """The page's head before the first step."""
    live: list[str]
    """The page's head in the job's first step or later."""
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
            await tab.until("Number(document.body.dataset.step) > 0", timeout_s=timeout_s)
            live = await tab.parts("head")
            await tab.until(ENDED, timeout_s=timeout_s)
            return SeenPage(
                starting=starting,
                live=live,
                head=await tab.parts("head"),
                flow=await tab.parts("flow"),
                steps=await tab.cells("steps"),
                causes=await tab.cells("causes"),
                shown=dict(state.shown),
            )
