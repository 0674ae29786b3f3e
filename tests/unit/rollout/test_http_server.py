"""The engine's HTTP server: who may ask it, where its key is, and what is left when it has ended."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from starlette.testclient import TestClient, WebSocketDenialResponse
from verl.workers.rollout.utils import run_uvicorn
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.entrypoints.serve.utils import server_utils
from vllm.utils.argparse_utils import FlexibleArgumentParser

from partial_rollout.rollout import http_server
from partial_rollout.rollout.ends_with_server import VARIABLE
from partial_rollout.rollout.http_server import (
    KEY_FILE,
    KEY_VARIABLE,
    MIDDLEWARE,
    RequireKey,
    require_key,
    run_key,
    stop_http_server,
)
from partial_rollout.rollout.server import PartialRolloutServer
from partial_rollout.settings.block import PartialRolloutConfig
from tests.fake_engine import FakeEngine, FakeServer

if TYPE_CHECKING:
    from pathlib import Path

LONG_S = 20.0


@pytest.fixture(autouse=True)
def no_keys_and_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequireKey, "keys", ())
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv(VARIABLE, "what a server sets here ends with the test")
    monkeypatch.delenv(VARIABLE)


def arguments(*options: str) -> Any:
    return make_arg_parser(FlexibleArgumentParser()).parse_args(list(options))


def client_of(args: Any) -> TestClient:
    return TestClient(build_app(args, supported_tasks=("generate",), model_config=None), raise_server_exceptions=False)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_path_of_vllm_asks_for_the_key_but_health_and_metrics(tmp_path: Path) -> None:
    args = arguments()
    require_key(args, tmp_path)
    app = build_app(args, supported_tasks=("generate",), model_config=None)
    client = TestClient(app, raise_server_exceptions=False)
    paths = {path for route in app.routes if (path := getattr(route, "path", None))}
    assert {"/v1/completions", "/invocations", "/tokenize", "/metrics", "/health"} <= paths
    refused = {
        path for path in paths for how in ("GET", "POST", "OPTIONS") if client.request(how, path).status_code == 401
    }
    assert paths - refused == {"/health", "/metrics"}
    for path in refused:
        assert client.post(path, headers=bearer("another")).status_code == 401
    assert client.get("/metrics").status_code == 200


def test_whoever_has_the_key_of_the_run_may_ask(tmp_path: Path) -> None:
    args = arguments()
    require_key(args, tmp_path)
    path = tmp_path / KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = path.read_text().strip()
    assert len(key) > 40
    client = client_of(args)
    assert client.get("/version", headers=bearer(key)).status_code == 200
    for wrong in (bearer(key[:-1]), bearer(""), bearer("é"), {"Authorization": key}, {"Authorization": f"Basic {key}"}):
        assert client.get("/version", headers={k: v.encode() for k, v in wrong.items()}).status_code == 401
    assert KEY_FILE in client.get("/version").json()["error"]


def test_a_web_socket_asks_for_the_key_as_well(tmp_path: Path) -> None:
    require_key(args := arguments(), tmp_path)
    with pytest.raises(WebSocketDenialResponse) as refused, client_of(args).websocket_connect("/v1/realtime"):
        pass
    assert refused.value.status_code == 401


@pytest.mark.parametrize("options", [(), ("--api-key", "mine", "yours")])
def test_the_users_own_key_is_the_key(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "theirs")
    require_key(args := arguments(*options), tmp_path)
    given = options[1:] or ("theirs",)
    assert not (tmp_path / KEY_FILE).exists()
    client = client_of(args)
    assert {client.get("/version", headers=bearer(key)).status_code for key in given} == {200}
    others = {"mine", "yours", "theirs"} - set(given)
    assert {client.get("/version", headers=bearer(key)).status_code for key in others} == {401}


def test_without_any_key_nobody_may_ask() -> None:
    args = arguments("--middleware", MIDDLEWARE)
    assert client_of(args).get("/version", headers=bearer("")).status_code == 401


def test_all_servers_of_a_run_have_the_same_key_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    with ThreadPoolExecutor(8) as threads:
        keys = set(threads.map(lambda _: run_key(folder), range(32)))
    assert len(keys) == 1
    assert run_key(tmp_path / "another") not in keys
    assert run_key(None) != run_key(None)


def test_a_server_that_comes_while_another_one_writes_the_key_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks, later, lock = threading.Semaphore(0), [], fcntl.flock

    def asks(file: Any, how: int) -> None:
        locks.release()
        lock(file, how)

    def make(_num_bytes: int) -> str:
        later.append(pool.submit(run_key, tmp_path))
        for _ in range(2):  # the one that writes asks, and the one that comes
            assert locks.acquire(timeout=LONG_S)
        return f"key {len(later)}"

    monkeypatch.setattr(http_server.fcntl, "flock", asks)
    monkeypatch.setattr(http_server.secrets, "token_urlsafe", make)
    with ThreadPoolExecutor(2) as pool:
        assert run_key(tmp_path) == "key 1"
        assert later[0].result(LONG_S) == "key 1"


def test_a_key_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / KEY_FILE
    path.write_text("key\n")
    path.chmod(0o644)
    assert run_key(tmp_path) == "key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_run_without_a_place_for_the_key_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / KEY_FILE).symlink_to(elsewhere := tmp_path / "elsewhere")
    key = run_key(tmp_path)
    assert len(key) > 40
    assert f"set {KEY_VARIABLE} to use the port" in caplog.text
    assert key not in caplog.text
    assert not elsewhere.exists()


class Launched(FakeServer):
    """A server with a fake engine, and with verl's HTTP server."""

    run_server = PartialRolloutServer.run_server


async def run_with_http(server: Any, args: Any) -> None:
    server.engine = server.fake = FakeEngine()
    app = build_app(args, supported_tasks=("generate",), model_config=None)
    app.state.log_stats = False  # set by vLLM's `init_app_state`, which asks the engine
    server._server_port, server._server_task = await run_uvicorn(app, args, "127.0.0.1")


async def status(port: int, path: str, key: str = "") -> int:
    url = f"http://127.0.0.1:{port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url, headers=bearer(key)) as answer:
        return answer.status


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(LONG_S)
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_a_relaunched_engine_asks_for_the_same_key_at_another_port_and_the_old_port_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vLLMHttpServer, "run_server", run_with_http)
    monkeypatch.setattr(server_utils, "freeze_gc_heap", lambda: None)  # it would freeze that of all tests
    server = Launched(PartialRolloutConfig(events=str(tmp_path)))
    args = arguments()
    await server.run_server(args)
    old, key = server._server_port, (tmp_path / KEY_FILE).read_text().strip()
    assert await status(old, "/version") == 401
    assert await status(old, "/version", key) == 200
    assert await asyncio.to_thread(listens, old)
    await server.relaunch()
    assert not await asyncio.to_thread(listens, old)
    new = server._server_port
    assert new != old
    assert args.middleware == [MIDDLEWARE]
    assert [await status(new, "/version"), await status(new, "/version", key)] == [401, 200]
    await stop_http_server(server._server_task, "the test")
    assert not await asyncio.to_thread(listens, new)


async def test_a_request_that_never_ends_does_not_keep_the_port_open() -> None:
    asked, ended = asyncio.Event(), asyncio.Event()
    app = FastAPI()

    @app.get("/for-ever")
    async def wait() -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    port, task = await run_uvicorn(app, None, "127.0.0.1")
    request = asyncio.ensure_future(status(port, "/for-ever"))
    await asyncio.wait_for(asked.wait(), LONG_S)
    await stop_http_server(task, "the test")
    assert not await asyncio.to_thread(listens, port)
    await asyncio.wait_for(ended.wait(), LONG_S)
    answers = await asyncio.wait_for(asyncio.gather(request, return_exceptions=True), LONG_S)
    assert isinstance(answers[0], (Exception, int))


async def test_a_server_marks_the_engine_that_it_starts_which_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marked: list[bool] = []

    async def run(server: Any, _: Any) -> None:
        marked.append(VARIABLE in os.environ)
        server.engine = server.fake = FakeEngine()

    monkeypatch.setattr(vLLMHttpServer, "run_server", run)
    await Launched(PartialRolloutConfig(events=str(tmp_path))).run_server(arguments())
    assert marked == [True]
