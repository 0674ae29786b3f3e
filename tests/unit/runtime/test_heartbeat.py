"""A frozen worker is told from a slow one, by the signs of life that it gives; time is virtual."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import TimeoutError as LateAnswer
from typing import TYPE_CHECKING, Any

import pytest
from ray.exceptions import RayActorError
from virtual_time import run_virtual, settle

from partial_rollout.core.deadlines import WARN_SHARE
from partial_rollout.core.queue.tail import Partial
from partial_rollout.errors import StaleClaim
from partial_rollout.runtime.death_watch import Watched
from partial_rollout.runtime.heartbeat import BEATS, Pulse, Silence, interval_s, stack_of, stack_of_call
from partial_rollout.runtime.prompt_manager import RolloutPromptManager
from partial_rollout.types import Process, PromptMeta, TrajectorySummary

if TYPE_CHECKING:
    from collections.abc import Callable

CLAIM_S = 300.0
A_WHILE_S = 20.0
LIMIT_S = 10.0


class Ended:
    """Who was ended, and when."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []
        self.silence = Silence(CLAIM_S, asyncio.get_running_loop().time, self._end)

    def _end(self, worker_id: str, why: str) -> None:
        assert "no sign of life for 300 s, longer than partial_rollout.timeouts.claim_s=300" in why
        self.told.append((worker_id, asyncio.get_running_loop().time()))

    async def beat(self, worker_id: str, counts: list[int]) -> None:
        """A sign of life every 20 s, and the last one 20 s ago."""
        for count in counts:
            self.silence.beat(worker_id, count)
            await asyncio.sleep(A_WHILE_S)


def test_a_worker_that_falls_silent_is_ended_once_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        ended = Ended()
        await asyncio.gather(ended.beat("alive", list(range(40))), ended.beat("frozen", [0, 1]))
        assert ended.told == [("frozen", A_WHILE_S + CLAIM_S)]

    run_virtual(main())
    assert "frozen has given no sign of life for 30 s" in caplog.text  # a tenth of the time
    assert "alive" not in caplog.text


def test_a_worker_that_hangs_is_silent_although_its_thread_sends() -> None:
    async def main() -> None:
        ended = Ended()
        await ended.beat("hangs", [1, 2] + [3] * 40)
        assert ended.told == [("hangs", 2 * A_WHILE_S + CLAIM_S)]

    run_virtual(main())


def test_a_worker_that_is_lost_otherwise_or_a_run_that_ends_is_not_waited_for() -> None:
    async def main() -> None:
        ended = Ended()
        ended.silence.beat("lost", 0)
        ended.silence.forget("lost")
        ended.silence.beat("at the end", 0)
        ended.silence.stop()
        await asyncio.sleep(2 * CLAIM_S)
        assert ended.told == []

    run_virtual(main())


def test_who_is_silent_when_a_wait_runs_out_is_told() -> None:
    async def main() -> None:
        ended = Ended()
        ended.silence.beat("frozen", 1)
        ended.silence.beat("dead", 1)
        await asyncio.sleep(A_WHILE_S)
        ended.silence.beat("alive", 1)
        assert ended.silence.late() == {}
        ended.silence.forget("dead")
        await asyncio.sleep(A_WHILE_S)
        assert ended.silence.late() == {"frozen": 2 * A_WHILE_S}

    run_virtual(main())


def test_time_in_which_the_manager_was_blocked_counts_for_nobody() -> None:
    async def main() -> None:
        loop, blocked_s = asyncio.get_running_loop(), 0.0
        told: list[float] = []
        silence = Silence(CLAIM_S, lambda: loop.time() + blocked_s, lambda name, why: told.append(loop.time()))
        silence.beat("alive", 0)
        blocked_s = 10 * CLAIM_S
        await asyncio.sleep(CLAIM_S / 2)  # a sign of life has waited for the manager, and would come now
        assert told == []

    run_virtual(main())


def _killing(killed: list[str]) -> RolloutPromptManager:
    """A manager whose actors stand in, each an Event: one that is killed dies; `killed` takes in its name."""

    class Killing(RolloutPromptManager):
        async def _park(self, handle: asyncio.Event) -> None:
            await handle.wait()
            raise RayActorError(error_msg="The actor is dead because it was killed by `ray.kill`.")

    async def ask(actor: object) -> Process:
        return Process("", "", "10.0.0.7", 4711)

    def kill(handle: asyncio.Event, process: Process) -> None:
        killed.append(process.name)
        handle.set()

    manager = Killing(Partial(4), 2, asyncio.get_running_loop().time, claim_s=CLAIM_S)
    manager._deaths._ask, manager._deaths._end_actor = ask, kill
    return manager


async def _watch(manager: RolloutPromptManager, *actors: tuple[str, str, Any], is_whole: bool = True) -> None:
    """What the manager does with actors that have been unpacked."""
    await manager._deaths.watch([Watched(*actor) for actor in actors], is_whole=is_whole)


@pytest.mark.parametrize("role", ["", "load balancer"])
def test_what_is_silent_when_a_wait_runs_out_is_killed_and_its_death_is_told(role: str) -> None:
    killed: list[str] = []

    async def main() -> None:
        manager = _killing(killed)
        frozen, alive = asyncio.Event(), asyncio.Event()
        await _watch(manager, ("load balancer", "lb", frozen), ("training rank", "rank", alive))
        await manager.beat("lb", 1)
        await asyncio.sleep(2 * A_WHILE_S)
        await manager.beat("rank", 1)
        assert await manager.end_silent("a call to another process", "engine server") == []
        assert killed == []
        (told,) = await manager.end_silent("trainer waits for a batch: no answer within 60 s", role)
        assert told.startswith(
            "load balancer lb (pid 4711 on node 10.0.0.7): it was killed, because it had given no sign"
        )
        assert await manager.end_silent("again") == [told]  # its death is not noticed yet
        death = await manager.next_death(1.0)
        assert death is not None
        assert "for 40 s when a wait ran out: trainer waits for a batch" in str(death)
        assert await manager.end_silent("again") == []
        alive.set()  # dies by itself
        death = await manager.next_death(1.0)
        assert death is not None
        assert death.process.name == "rank"
        await asyncio.sleep(CLAIM_S / 2)
        assert manager._silence.late() == {}  # a dead one is no silent one

    run_virtual(main())
    assert killed == ["lb"]


def test_a_call_that_runs_out_before_anybody_counts_as_silent_waits_until_it_is_known_who_is() -> None:
    killed: list[str] = []

    async def main() -> None:
        manager, clock = _killing(killed), asyncio.get_running_loop().time
        role, alive, frozen, other = "engine server", asyncio.Event(), asyncio.Event(), asyncio.Event()
        actors = [(role, "alive", alive), (role, "frozen", frozen), ("load balancer", "lb", other)]
        await _watch(manager, *actors)
        for name in ("alive", "frozen", "lb"):
            await manager.beat(name, 1)
        await asyncio.sleep(0.01 * CLAIM_S)
        assert await manager.end_silent("a call", role) == []  # nobody counts as silent yet
        waiting = asyncio.create_task(manager.end_silent("a call", role, waits=True))
        await settle()
        assert not waiting.done()
        for count in range(2, 2 + int(WARN_SHARE * BEATS)):
            await manager.beat("alive", count)
            await asyncio.sleep(interval_s(CLAIM_S))
        (told,) = await waiting
        assert told.startswith(f"{role} frozen")
        assert WARN_SHARE * CLAIM_S <= clock() < 2 * WARN_SHARE * CLAIM_S
        assert killed == ["frozen"]
        # Where all go on nobody is waited for any longer.
        now_s, waiting = clock(), asyncio.create_task(manager.end_silent("a call", role, waits=True))
        await asyncio.sleep(interval_s(CLAIM_S) / 2)
        await manager.beat("alive", 1)
        await waiting
        assert clock() - now_s == interval_s(CLAIM_S) / 2
        assert killed == ["frozen"]

    run_virtual(main())


def test_a_manager_that_was_started_again_waits_for_whom_to_watch_before_it_tells_who_is_silent() -> None:
    killed: list[str] = []

    async def main() -> None:
        manager, role, clock = _killing(killed), "engine server", asyncio.get_running_loop().time

        async def ask(actor: Watched) -> Process:
            manager._silence.beat(actor.name, 0)  # as the manager's own does
            return Process("", "", "10.0.0.7", 4711)

        manager._deaths._ask = ask
        waiting = asyncio.create_task(manager.end_silent("a call", role, waits=True))
        # A watch of a further process, which the manager before had not answered, comes first.
        await _watch(manager, ("agent-loop worker", "w0", asyncio.Event()), is_whole=False)
        await asyncio.sleep(CLAIM_S / 100)
        assert not waiting.done()
        watched_s = clock()
        await _watch(manager, ("load balancer", "lb", asyncio.Event()), (role, "frozen", asyncio.Event()))
        (told,) = await waiting
        assert told.startswith(f"{role} frozen")
        assert clock() - watched_s == pytest.approx(WARN_SHARE * CLAIM_S)

    run_virtual(main())
    assert killed == ["frozen"]


def test_a_silent_worker_is_killed_and_what_it_still_reports_is_refused() -> None:
    killed: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        manager, end = _killing(killed), asyncio.Event()
        await manager.admit([PromptMeta("a", 1, 1)])
        await _watch(manager, ("agent-loop worker", "w0", end))
        (claim,) = await manager.claim("w0", 1, timeout_s=0.0)
        await manager.beat("w0", 1)
        death = await manager.next_death(2 * CLAIM_S)
        assert loop.time() == CLAIM_S
        assert death is not None
        assert str(death).startswith(
            "agent-loop worker w0 (pid 4711 on node 10.0.0.7) died: it was killed, because it had given no sign of life"
        )
        assert death.doing == "generated 1 prompts, a among them"
        late = TrajectorySummary("a_0_0", prompt_len=3, response_len=5, min_version=0, max_version=0)
        assert (await manager.finish_many([(claim, [late])])).stale == ("a",)
        with pytest.raises(StaleClaim):
            await manager.give_back(claim)
        assert (await manager.release_worker("w0")).given_back == ("a",)
        assert (await manager.statistics()).pending == 1

    run_virtual(main())
    assert killed == ["w0"]


def _pulse(answer: Callable[[int, int], None]) -> list[int]:
    """What a pulse sends until `answer` says that the manager has died."""
    sent: list[int] = []
    over = threading.Event()

    def send(count: int) -> None:
        sent.append(count)
        try:
            answer(len(sent), count)
        except RayActorError:
            over.set()
            raise

    async def main() -> None:
        Pulse(send, claim_s=0.01).begin()
        assert await asyncio.to_thread(over.wait, LIMIT_S)

    asyncio.run(main())
    return sent


def test_a_pulse_counts_the_turns_of_its_event_loop_until_the_manager_has_died() -> None:
    def answer(num: int, count: int) -> None:
        if num == 1:
            raise LateAnswer
        if count >= 5:
            raise RayActorError

    sent = _pulse(answer)
    assert len(sent) > 1
    assert sent == sorted(sent)
    # The first sign, whose answer was late, may come after more turns than that.
    assert [count for count in sent[1:] if count >= 5] == sent[-1:]


def test_each_sign_of_a_process_without_an_event_loop_counts() -> None:
    sent: list[int] = []
    over = threading.Event()

    def send(count: int) -> None:
        sent.append(count)
        if count == 3:
            over.set()
            raise RayActorError

    Pulse(send, claim_s=0.01).begin_alone()
    assert over.wait(LIMIT_S)
    assert sent == [1, 2, 3]


def test_a_pulse_of_a_blocked_event_loop_counts_only_trajectories_that_go_on() -> None:
    sent: list[int] = []
    heard, over, ended = threading.Condition(), threading.Event(), threading.Event()

    def send(count: int) -> None:
        if over.is_set():
            ended.set()
            raise RayActorError
        with heard:
            sent.append(count)
            heard.notify_all()

    def wait_for(num: int) -> None:
        with heard:
            assert heard.wait_for(lambda: len(sent) >= num, LIMIT_S)

    async def main() -> None:
        pulse = Pulse(send, claim_s=0.01)
        pulse.begin()
        wait_for(3)  # blocks the event loop, as a tool may
        before = set(sent)
        pulse.goes_on()
        wait_for(len(sent) + 2)
        assert len(before) == 1
        assert set(sent) - before == {before.pop() + 1}

    try:
        asyncio.run(main())
    finally:  # else it sends four thousand signs a second while all later tests run
        over.set()
    assert ended.wait(LIMIT_S)


def test_an_actor_that_is_busy_tells_where_it_stands_with_its_next_sign_of_life() -> None:
    async def main() -> None:
        manager = RolloutPromptManager(Partial(capacity=8), max_attempts=2, clock=asyncio.get_running_loop().time)
        assert not await manager.beat("actor-0", 1)
        asked = asyncio.create_task(manager.stacks(["actor-0", "actor-1"], A_WHILE_S))
        again = asyncio.create_task(manager.stacks(["actor-0"], A_WHILE_S))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await manager.beat("actor-0", 2)
        assert not await manager.beat("actor-2", 1)
        await manager.tell_stack("actor-0", "update_actor (a.py:3)")
        assert not await manager.beat("actor-0", 3)
        assert await again == {"actor-0": "update_actor (a.py:3)"}
        assert await asked == {"actor-0": "update_actor (a.py:3)"}  # actor-1 has not told in time
        await manager.tell_stack("actor-1", "too late")
        assert not await manager.beat("actor-1", 1)
        assert await manager.stacks(["actor-0"], A_WHILE_S) == {}  # what it told before is not told again

    run_virtual(main())


def test_where_a_thread_stands_is_told_innermost_first() -> None:
    begun, gate = threading.Event(), threading.Event()

    def hang() -> None:
        _ = begun.set(), gate.wait(LIMIT_S)  # in one line: `hang` stands there from `begun` on

    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    begun.wait(LIMIT_S)
    stack = stack_of(thread.ident or 0)
    assert stack[stack.find("hang (") :] in stack_of_call()  # all threads, since Ray runs no call here
    assert stack_of(threading.get_ident()) not in stack_of_call()
    gate.set()
    thread.join(LIMIT_S)
    assert 0 <= stack.find("hang (") < stack.find("_bootstrap (")
    assert stack_of(thread.ident or 0) == ""


def test_of_an_actor_the_thread_is_told_that_runs_a_call() -> None:
    """A thread below the code of Ray that runs an actor's methods."""
    begun, gate, found = threading.Event(), threading.Event(), dict[str, Any]()
    code = "def actor_method_executor(begun, gate):\n    begun.set()\n    gate.wait(30.0)"
    exec(compile(code, "/site-packages/ray/_private/function_manager.py", "exec"), found)
    threads = [
        threading.Thread(target=found["actor_method_executor"], args=(begun, gate), daemon=True),
        threading.Thread(target=gate.wait, args=(LIMIT_S,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    begun.wait(LIMIT_S)
    call = stack_of(threads[0].ident or 0)
    assert "actor_method_executor (" in call
    assert stack_of_call().splitlines()[-3:] == call.splitlines()[-3:]
    assert "\n\n" not in stack_of_call()
    gate.set()
    for thread in threads:
        thread.join(LIMIT_S)
