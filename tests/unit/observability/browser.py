"""A headless Chromium that tests drive through its DevTools port."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TIMEOUT_S = 120.0
HAS_CHROMIUM = shutil.which("chromium") is not None
NEEDS_CHROMIUM = pytest.mark.skipif(
    not HAS_CHROMIUM, reason="needs a browser: make setup-browser, or apt-get install chromium"
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1280,1600"]
FLAGS += ["--no-first-run", "--disable-quic", "--disable-background-networking"]
UNTIL = """new Promise(done => {{ const look = () => {{ const found = ({expression});
  if (found) {{ watcher.disconnect(); done(found); }} }};
  const watcher = new MutationObserver(look);
  watcher.observe(document, {{subtree: true, childList: true, attributes: true, characterData: true}}); look(); }})"""

CELLS = "[...document.querySelectorAll('#{} tr')].map(row => [...row.cells].map(cell => cell.textContent))"
PARTS = "[...document.querySelectorAll('#{} span')].map(part => part.textContent.trim())"


class Tab:
    """A page in the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        self._socket, self._numbers = socket, itertools.count(1)

    async def call(self, method: str, *, timeout_s: float = TIMEOUT_S, **parameters: Any) -> dict[str, Any]:
        """One DevTools call; messages between it and its answer are left out."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json(timeout=timeout_s)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    async def open(self, address: str) -> None:
        """Go to an address, and wait until its page is there."""
        await self.call("Page.enable")
        await self._socket.send_json({"id": 0, "method": "Page.navigate", "params": {"url": address}})
        while (await self._socket.receive_json(timeout=TIMEOUT_S)).get("method") != "Page.loadEventFired":
            pass

    async def value(self, expression: str, *, timeout_s: float = TIMEOUT_S) -> Any:
        """What JavaScript says; a promise is waited for."""
        options = {"awaitPromise": True, "returnByValue": True}
        answer = await self.call("Runtime.evaluate", timeout_s=timeout_s, expression=expression, **options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, *, timeout_s: float = TIMEOUT_S) -> Any:
        """Wait until an expression is true; it is looked at whenever the page has changed."""
        return await self.value(UNTIL.format(expression=expression), timeout_s=timeout_s)

    async def cells(self, table: str) -> list[list[str]]:
        """Texts of a table, row by row."""
        return await self.value(CELLS.format(table))

    async def parts(self, name: str) -> list[str]:
        """Texts of the parts of a line."""
        return await self.value(PARTS.format(name))

    async def memory(self) -> dict[str, float]:
        """What the page holds after its garbage is collected: `Nodes`, `JSHeapUsedSize` in bytes, and others."""
        await self.call("Performance.enable")
        await self.call("HeapProfiler.collectGarbage")
        metrics = (await self.call("Performance.getMetrics"))["metrics"]
        return {metric["name"]: metric["value"] for metric in metrics}

    async def picture(self) -> bytes:
        """A screenshot of the whole page, as PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def open_page(address: str, profile: Path) -> AsyncIterator[Tab]:
    """A browser with one page, which ends with the block."""
    process = await asyncio.create_subprocess_exec(
        "chromium", *FLAGS, f"--user-data-dir={profile}", "about:blank", stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        while b"listening on ws://" not in (line := await asyncio.wait_for(process.stderr.readline(), TIMEOUT_S)):
            assert line, "chromium ended before it listened"
        host = line.decode().split("ws://")[1].split("/")[0]
        drain = asyncio.create_task(process.stderr.read(), name="chromium's messages")
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://{host}/json/new?about:blank") as answer:
                target = (await answer.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(target, max_msg_size=0) as socket:
                tab = Tab(socket)
                await tab.open(address)
                yield tab
        process.terminate()
        await drain
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
