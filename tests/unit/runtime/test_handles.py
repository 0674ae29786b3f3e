"""Handles of actors import their classes, which takes long; the prompt manager answers meanwhile."""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from ray.exceptions import RayActorError

from partial_rollout.core.queue.tail import Partial
from partial_rollout.runtime.prompt_manager import RolloutPromptManager
from partial_rollout.types import Process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from partial_rollout.runtime.death_watch import Watched

LIMIT_S = 10.0


class Gate:
    """What takes long: an import goes on when `opened` is set, and then knows how long it was waited for."""

    opened = threading.Event()
    entered = threading.Event()


def _import(name: str) -> list[tuple[str, str, None]]:
    Gate.entered.set()
    return [("engine server", name, None)] if Gate.opened.wait(LIMIT_S) else []


class SlowHandles:
    """Handles whose class is imported only when the gate has been opened."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return _import, (self.name,)


@pytest.fixture(autouse=True)
def gate() -> None:
    Gate.opened.clear()
    Gate.entered.clear()


class Manager(RolloutPromptManager):
    """A manager whose actors live for ever."""

    async def _park(self, handle: Any) -> None:
        await asyncio.Event().wait()

    async def _ask(self, actor: Watched) -> Process:
        return Process(actor.role, actor.name, "10.0.0.7", 4711)


def make_manager() -> Manager:
    return Manager(Partial(4), 2, asyncio.get_running_loop().time)


async def _entered() -> None:
    assert await asyncio.to_thread(Gate.entered.wait, LIMIT_S)


def test_the_manager_answers_while_handles_import_their_classes() -> None:
    async def main() -> list[str]:
        manager = make_manager()
        watching = asyncio.ensure_future(manager.watch(pickle.dumps(SlowHandles("first"))))
        await _entered()
        await manager.statistics()
        Gate.opened.set()
        return [process.name for process in await watching]

    assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) == ["first"]


def test_a_watch_that_was_asked_for_later_does_not_come_first() -> None:
    async def main() -> list[str]:
        manager, told = make_manager(), list[str]()

        async def watch(packed: bytes) -> None:
            told.extend(process.name for process in await manager.watch(packed))

        first = asyncio.ensure_future(watch(pickle.dumps(SlowHandles("first"))))
        await _entered()
        second = asyncio.ensure_future(watch(pickle.dumps([("engine server", "second", None)])))
        await asyncio.wait({second}, timeout=0.05)
        Gate.opened.set()
        await asyncio.gather(first, second)
        return told

    assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) == ["first", "second"]


def test_an_actor_that_does_not_say_where_it_runs_keeps_no_death_of_others_back() -> None:
    class OneIsStuck(Manager):
        async def _park(self, handle: Any) -> None:
            if handle == "dead":
                raise RayActorError(error_msg="SIGKILL")
            await super()._park(handle)

        async def _ask(self, actor: Watched) -> Process:
            await asyncio.sleep(0 if actor.handle == "dead" else LIMIT_S)
            return await super()._ask(actor)

    async def main() -> str:
        manager = OneIsStuck(Partial(4), 2, asyncio.get_running_loop().time)
        stuck = asyncio.ensure_future(manager.watch(pickle.dumps([("training rank", "stuck", "alive")])))
        watching = asyncio.ensure_future(manager.watch(pickle.dumps([("engine server", "replica-0", "dead")])))
        death = await manager.next_death(LIMIT_S / 2)
        assert death is not None
        assert not stuck.done()
        await watching
        stuck.cancel()
        return death.process.name

    assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) == "replica-0"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes a module with this text; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(text: str) -> str:
        (tmp_path / "needed_by_handles.py").write_text(text)
        monkeypatch.delitem(sys.modules, "needed_by_handles", raising=False)
        return "needed_by_handles"

    return make


def test_what_handles_need_is_imported_before_they_come_and_nobody_waits_for_it(module: Callable[[str], str]) -> None:
    name = module(f"from {__name__} import _import\nfound = _import('module')\n")

    async def main() -> None:
        manager = make_manager()
        await manager.meet(name)
        await _entered()
        await manager.statistics()
        Gate.opened.set()
        await manager._importing

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert sys.modules[name].found


def test_an_import_that_fails_is_told_and_ends_nothing(
    module: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    name = module("raise RuntimeError('no vLLM here')")

    async def main() -> None:
        manager = make_manager()
        await manager.meet(name)
        await asyncio.wait({manager._importing})
        await manager.statistics()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert "no vLLM here" in said[0]
