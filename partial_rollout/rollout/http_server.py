"""The HTTP server that verl starts for each engine: it asks for a key, and its port is closed when it ends.

verl starts it on the node's address. Nothing of a run uses it but `/health` and `/metrics`: agent loops ask the
server's actor. vLLM's own `--api-key` leaves paths open that generate (`/invocations`), so the key is asked for by a
class that vLLM's public `--middleware` puts before all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import inspect
import logging
import os
import secrets
from typing import TYPE_CHECKING, Any, ClassVar

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from partial_rollout.errors import WaitTimeout

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's own variable for a key that the user has chosen."""
KEY_FILE = "engine_http_key"
"""Name of the file, in the folder of the run's events, which all servers of a node find."""
UNAUTHORIZED = (
    "Unauthorized: send the header 'Authorization: Bearer KEY' with the engine's key. That is the one of --api-key or "
    f"{KEY_VARIABLE} where one was set, else the one in the file {KEY_FILE} of the run's folder of events"
)
KEY_BYTES = 32
OPEN_PATHS = ("/health", "/metrics")
"""Prometheus and load balancers ask without a key; nothing there changes an engine or tells a prompt."""
SCHEME = "bearer"
STOP_S = 5.0
"""A server that is told to end does so at once, or after `OPEN_REQUESTS_S`, unless the event loop is stuck."""
OPEN_REQUESTS_S = 1
"""Time for requests that are under way, whose engine has gone or is about to; uvicorn takes whole seconds."""


class RequireKey:
    """ASGI middleware: 401 for every request without a key, except to `OPEN_PATHS`.

    vLLM makes it from its import path, without arguments; so the keys are the class's. Without any it refuses all.
    """

    keys: ClassVar[tuple[str, ...]] = ()

    def __init__(self, app: ASGIApp) -> None:
        """`app` answers requests that have a key."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it."""
        is_request = scope["type"] in ("http", "websocket")
        if not is_request or scope["path"] in OPEN_PATHS or self._has_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"error": UNAUTHORIZED}, status_code=401)(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        # All keys are compared, each in constant time: how long an answer takes tells nothing of a key.
        equal = [hmac.compare_digest(given.encode(), key.encode()) for key in self.keys]
        return scheme.lower() == SCHEME and any(equal)


MIDDLEWARE = f"{RequireKey.__module__}.{RequireKey.__qualname__}"


def require_key(args: Any, folder: Path | None) -> None:
    """Let the HTTP server that vLLM makes from `args` ask for a key.

    That is the user's own (`--api-key`, or the environment variable VLLM_API_KEY), else the run's, which is in
    `folder`; without a folder nobody knows it. Doing it again with the same `args` changes nothing.
    """
    chosen = tuple(key for key in (args.api_key or [os.environ.get(KEY_VARIABLE)]) if key)
    RequireKey.keys = chosen or RequireKey.keys or (run_key(folder),)
    if MIDDLEWARE not in args.middleware:
        args.middleware = [*args.middleware, MIDDLEWARE]  # the last one is asked first


def run_key(folder: Path | None) -> str:
    """The key of the run whose events are in this folder; the first process that asks makes it, for its user only."""
    if folder is not None:
        try:
            return _key_in(folder / KEY_FILE)
        except OSError as error:
            logger.warning(
                "%s cannot be kept (%s), so nobody knows the key of the engine's HTTP port; set %s to use the port",
                folder / KEY_FILE,
                error,
                KEY_VARIABLE,
            )
    return secrets.token_urlsafe(KEY_BYTES)


def _key_in(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+") as file:
        os.fchmod(file.fileno(), 0o600)
        with contextlib.suppress(OSError):  # not every network file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)  # another server of the run may be about to write
        key = file.read().strip()
        if not key:
            key = secrets.token_urlsafe(KEY_BYTES)
            file.write(f"{key}\n")
            file.flush()
    return key


async def stop_http_server(task: asyncio.Task[Any], whose: str) -> None:
    """Close the port of the server that runs in this task, and end both.

    verl keeps the task of uvicorn's server and not the server. Cancelling the task leaves the port open for as long as
    the process lives, so the server is taken from the task and told to end, as uvicorn says.

    Raises:
        WaitTimeout: the task has not ended within `STOP_S`, and not within another `STOP_S` after it was cancelled.
    """
    coroutine = task.get_coro()
    server = inspect.getcoroutinelocals(coroutine).get("self") if inspect.iscoroutine(coroutine) else None
    if isinstance(server, uvicorn.Server):
        server.config.timeout_graceful_shutdown = OPEN_REQUESTS_S
        server.should_exit = True
        await asyncio.wait([task], timeout=STOP_S)
    task.cancel()
    if not (await asyncio.wait([task], timeout=STOP_S))[0]:
        raise WaitTimeout(f"{whose}: the HTTP server did not end within {STOP_S:g} s")
