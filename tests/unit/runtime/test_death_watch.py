"""A watched actor's death is told once, with what is known of the process; the actors are stand-ins."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest
from ray.exceptions import RayActorError
from virtual_time import run_virtual, settle, woken

from partial_rollout.runtime.death_watch import DeathWatch, Parking, Watched, how_it_died, last_lines
from partial_rollout.types import Death, Process

if TYPE_CHECKING:
    from pathlib import Path

HOUR_S = 3600.0


class StandIn:
    """An actor that dies when it is told to."""

    def __init__(self, where: Process | None = None) -> None:
        self.where = where or Process("", "", "10.0.0.7", 4711)
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def die(self) -> None:
        self.end.set_exception(RayActorError(error_msg="The actor is dead because of X"))


async def _park(actor: StandIn) -> None:
    await asyncio.shield(actor.end)


async def _ask(actor: Watched) -> Process:
    where: Process = cast("StandIn", actor.handle).where
    return where


def _watch(doing: str = "") -> DeathWatch:
    return DeathWatch(_park, lambda name: doing, _ask)


def _watched(actor: Any, name: str = "actor-0") -> Watched:
    return Watched("training rank", name, actor)


def test_a_death_wakes_whoever_waits_and_names_the_process(tmp_path: Path) -> None:
    async def main() -> Death | None:
        log = tmp_path / "worker.err"
        log.write_text("first\n" * 30 + "CUDA error: out of memory\n")
        actor, watch = StandIn(Process("", "", "10.0.0.7", 4711, str(log))), _watch("held 3 prompts")
        assert await watch.watch([_watched(actor)]) == [Process("training rank", "actor-0", "10.0.0.7", 4711, str(log))]
        waiting = asyncio.create_task(watch.next_death(HOUR_S))
        await settle()
        actor.die()
        while not waiting.done():  # the log is read by a thread
            await asyncio.wait({waiting}, timeout=0.01)
        assert await watch.next_death(0.0) is None
        return waiting.result()

    text = str(asyncio.run(main()))
    assert text.startswith(
        "training rank actor-0 (pid 4711 on node 10.0.0.7) died: of X; it held 3 prompts. Its log is"
    )

    assert text.endswith("CUDA error: out of memory")


def test_the_death_of_an_actor_that_was_dead_before_is_told_too() -> None:
    async def main() -> None:
        actor, watch = StandIn(), _watch()
        actor.die()
        await watch.watch([_watched(actor)])
        death = await watch.next_death(HOUR_S)
        assert death is not None
        assert death.process.name == "actor-0"

    run_virtual(main())


def test_the_end_of_an_actor_that_was_asked_for_is_told_nobody() -> None:
    async def main() -> None:
        actor, watch = StandIn(), _watch()
        await watch.watch([_watched(actor)])
        watch.forget("actor-0")
        actor.die()
        assert await watch.next_death(HOUR_S) is None

    run_virtual(main())


def test_whoever_waits_is_woken_at_the_end() -> None:
    async def main() -> None:
        watch = _watch()
        await watch.watch([_watched(StandIn())])
        waiting = asyncio.create_task(watch.next_death(HOUR_S))
        await settle()
        await watch.end()
        assert await woken(waiting) is None

    run_virtual(main())


def test_an_actor_that_does_not_say_where_it_runs_is_watched() -> None:
    async def never(_actor: object) -> Process:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        actor, watch = StandIn(), DeathWatch(_park, lambda name: "", never)
        await watch.watch([_watched(actor)])
        actor.die()
        death = await watch.next_death(HOUR_S)
        assert death is not None
        assert str(death).startswith("training rank actor-0 died")

    run_virtual(main())


def test_an_actor_that_freezes_before_it_says_where_it_runs_can_be_killed() -> None:
    async def main() -> None:
        order: list[str] = []

        async def never(_actor: object) -> Process:
            order.append("asked")
            await asyncio.Event().wait()
            raise AssertionError

        async def park(actor: StandIn) -> None:
            order.append("parked at")
            await _park(actor)

        actor = StandIn()
        watch = DeathWatch(park, lambda name: "", never, end=lambda handle, _process: handle.die())
        watching = asyncio.create_task(watch.watch([_watched(actor)]))
        await settle()
        assert order == ["asked", "parked at"]  # a call that is parked holds up later ones of the same process
        assert watch.kill("actor-0", "it was silent")
        death = await watch.next_death(HOUR_S)
        assert death is not None
        assert str(death) == "training rank actor-0 died: it was silent"
        watching.cancel()
        await asyncio.wait([watching])

    run_virtual(main())


def test_last_lines_of_a_log_on_another_node_are_empty() -> None:
    assert last_lines("/nowhere/worker.err") == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "The actor died unexpectedly\n\tpid: 1\nThe actor is dead because its node has died. x\ny",
            "its node has died. x",
        ),
        ("a\nb. Worker exit detail: End of file. Some common causes include: (1)", "End of file"),
        ("The actor is dead because it was killed by `ray.kill`.", "it was killed by `ray.kill`"),
        ("only this", "only this"),
    ],
)
def test_rays_reason_is_told_without_its_advice(text: str, reason: str) -> None:
    assert how_it_died(RayActorError(error_msg=text)) == reason


def test_a_later_call_of_a_watcher_lets_the_earlier_one_go() -> None:
    """Else each manager that was started again would leave one at the actor for ever."""

    async def main() -> None:
        parking = Parking()
        first, second = (asyncio.create_task(parking.until_killed()) for _ in range(2))
        await settle()
        assert (first.done(), second.done()) == (True, False)
        second.cancel()

    run_virtual(main())
