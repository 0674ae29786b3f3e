"""The manager's waits and wakes, on a plain object in virtual time: no Ray, no sleeping."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest
from virtual_time import run_virtual, settle, woken

from partial_rollout.core.queue.ledger import WORKER_LOST
from partial_rollout.core.queue.lifecycle import MAX_LOSSES
from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.tail import Partial, Reorder
from partial_rollout.errors import ActorLost, DuplicateUid, InternalError, RunStopped, StaleClaim, WaitTimeout
from partial_rollout.observability.events import EventReader, PromptDropped, QueueMoved
from partial_rollout.runtime.journal import Place
from partial_rollout.runtime.prompt_manager import METRICS_INTERVAL_S, RolloutPromptManager, queue_event
from partial_rollout.types import (
    FinishResult,
    PromptMeta,
    QueueStatistics,
    ReleaseResult,
    TakeResult,
    TrajectorySummary,
    WorkerStatus,
)

if TYPE_CHECKING:
    from pathlib import Path

    from partial_rollout.types import Claim, ManagerStatus

GROUP = 2
HOUR_S = 3600.0


def prompts(*uids: str) -> list[PromptMeta]:
    return [PromptMeta(uid, GROUP, global_step=1) for uid in uids]


def trajectories(uid: str) -> list[TrajectorySummary]:
    return [TrajectorySummary(f"{uid}_{i}_0", 3, 5, min_version=0, max_version=0) for i in range(GROUP)]


class RecordingSink:
    def __init__(self) -> None:
        self.seen: list[tuple[float, ManagerStatus]] = []

    def update(self, status: ManagerStatus) -> None:
        self.seen.append((asyncio.get_running_loop().time(), status))


async def make_manager(*uids: str, sink: RecordingSink | None = None) -> RolloutPromptManager:
    clock = asyncio.get_running_loop().time
    manager = RolloutPromptManager(Partial(16), 2, clock, metrics=(lambda: sink) if sink else None)
    if uids:
        await manager.admit(prompts(*uids))
    return manager


async def finish(manager: RolloutPromptManager, claims: list[Claim]) -> None:
    assert await manager.finish_many([(claim, trajectories(claim.uid)) for claim in claims]) == FinishResult()


# ---- capacity ----


def test_another_capacity_holds_from_the_next_round_on_and_over_a_restart() -> None:
    async def main() -> None:
        manager = await make_manager(*map(str, range(16)))
        assert (await manager.begin_round()).num_fresh == 0
        await manager.set_capacity(20)
        assert (await manager.begin_round()).num_fresh == 4
        await manager.admit(prompts("a", "b", "c", "d"))
        await manager.set_capacity(16)
        assert (await manager.begin_round()).num_fresh == 0
        assert (await manager.status()).capacity == 16
        restored = await make_manager()
        await restored.restore(await manager.snapshot())
        assert (await restored.begin_round()).num_fresh == 0
        assert (await restored.statistics()).pending == 20

    run_virtual(main())


def test_a_policy_with_rounds_has_its_own_capacity() -> None:
    async def main() -> None:
        manager = RolloutPromptManager(Reorder(4, 6, 8), 2, asyncio.get_running_loop().time)
        with pytest.raises(InternalError, match="decides by itself how many prompts are in flight"):
            await manager.set_capacity(16)

    run_virtual(main())


# ---- claim ----


def test_claim_waits_for_an_admission() -> None:
    async def main() -> None:
        manager = await make_manager()
        waiting = asyncio.create_task(manager.claim("w0", 4, HOUR_S))
        await settle()
        assert not waiting.done()
        await manager.admit(prompts("a", "b", "c"))
        assert [claim.uid for claim in await woken(waiting)] == ["a", "b"]

    run_virtual(main())


@pytest.mark.parametrize("event", ["give_back", "fail", "release_worker"])
def test_claim_is_woken_by_whatever_makes_a_prompt_pending(event: str) -> None:
    async def main() -> None:
        manager = await make_manager("a")
        (claim,) = await manager.claim("w0", GROUP, 0)
        waiting = asyncio.create_task(manager.claim("w1", GROUP, HOUR_S))
        await settle()
        if event == "give_back":
            await manager.give_back(claim)
        elif event == "fail":
            assert await manager.fail(claim, "ValueError: no") is True
        else:
            assert await manager.release_worker("w0") == ReleaseResult(given_back=("a",))
        assert [again.worker_id for again in await woken(waiting)] == ["w1"]

    run_virtual(main())


def test_claim_returns_nothing_at_its_deadline() -> None:
    async def main() -> None:
        manager = await make_manager("a")
        assert await manager.claim("w0", GROUP - 1, 30.0) == []
        assert asyncio.get_running_loop().time() == pytest.approx(30.0)
        assert (await manager.statistics()).pending == 1

    run_virtual(main())


def test_one_prompt_goes_to_one_of_many_waiting_workers() -> None:
    async def main() -> None:
        manager = await make_manager()
        waiting = [asyncio.create_task(manager.claim(f"w{i}", 1000, 60.0)) for i in range(8)]
        await settle()
        await manager.admit(prompts("a"))
        claims = [claim for answer in await asyncio.gather(*waiting) for claim in answer]
        assert [claim.uid for claim in claims] == ["a"]

    run_virtual(main())


def test_long_poll_of_a_released_worker_claims_nothing() -> None:
    async def main() -> None:
        manager = await make_manager()
        lost = asyncio.create_task(manager.claim("lost", GROUP, HOUR_S))
        await settle()
        await manager.release_worker("lost")
        assert await woken(lost) == []
        assert (await manager.status()).workers == {}
        early = asyncio.create_task(manager.claim("lost", GROUP, HOUR_S))
        await settle()
        await manager.release_worker("lost")
        await manager.admit(prompts("a"))
        assert await woken(early) == []
        assert (await manager.statistics()).pending == 1
        assert len(await manager.claim("lost", GROUP, 0)) == 1

    run_virtual(main())


def test_cancelled_claim_takes_nothing_and_leaves_the_lock_free() -> None:
    async def main() -> None:
        manager = await make_manager()
        waiting = asyncio.create_task(manager.claim("w0", GROUP, HOUR_S))
        await settle()
        waiting.cancel()
        await asyncio.wait({waiting})
        await manager.admit(prompts("a"))
        assert (await manager.statistics()).pending == 1

    run_virtual(main())


# ---- take_batch ----


def test_all_prompts_are_looked_at_once_a_batch_and_not_once_a_replaced_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    monkeypatch.setattr(PromptQueue, "require_conserved", lambda queue: checks.append(queue.num_in_flight))

    async def main() -> None:
        manager = await make_manager("a", "b")
        claims = await manager.claim("w0", 4, 0)
        await manager.drop(claims[0], "prompt_too_long")
        assert (await manager.take_batch(2, HOUR_S)).num_missing == 1
        await manager.admit(prompts("c"))
        await finish(manager, [*claims[1:], *await manager.claim("w0", 4, 0)])
        assert checks == []
        assert [group.uid for group in (await manager.take_batch(2, HOUR_S)).groups] == ["b", "c"]
        assert checks == [0]

    run_virtual(main())


def test_take_batch_waits_for_whole_batches() -> None:
    async def main() -> None:
        manager = await make_manager("a", "b", "c")
        claims = await manager.claim("w0", 6, 0)
        waiting = asyncio.create_task(manager.take_batch(2, HOUR_S))
        await finish(manager, claims[2:])
        await settle()
        assert not waiting.done()
        await finish(manager, claims[:1])
        assert [group.uid for group in (await woken(waiting)).groups] == ["c", "a"]

    run_virtual(main())


def test_take_batch_waits_for_the_wanted_prompts_and_takes_no_others() -> None:
    async def main() -> None:
        manager = await make_manager("a", "b", "c")
        claims = await manager.claim("w0", 6, 0)
        waiting = asyncio.create_task(manager.take_batch(2, HOUR_S, ("c", "b")))
        await finish(manager, claims[:2])
        await settle()
        assert not waiting.done()
        await finish(manager, claims[2:])
        assert [group.uid for group in (await woken(waiting)).groups] == ["c", "b"]

    run_virtual(main())


@pytest.mark.parametrize("how", ["drop", "fail"])
def test_take_batch_returns_early_when_too_few_are_in_flight(how: str) -> None:
    async def main() -> None:
        manager = await make_manager("a", "b")
        claims = await manager.claim("w0", 4, 0)
        waiting = asyncio.create_task(manager.take_batch(2, HOUR_S))
        await settle()
        assert not waiting.done()
        if how == "drop":
            await manager.drop(claims[0], "prompt_too_long")
        else:
            assert await manager.fail(claims[0], "once") is True
            (again,) = await manager.claim("w0", GROUP, 0)
            assert await manager.fail(again, "twice") is False
        assert await woken(waiting) == TakeResult(num_missing=1)

    run_virtual(main())


def test_second_taker_learns_that_prompts_are_missing() -> None:
    async def main() -> None:
        manager = await make_manager("a", "b")
        claims = await manager.claim("w0", 4, 0)
        takers = [asyncio.create_task(manager.take_batch(2, HOUR_S)) for _ in range(2)]
        await settle()
        await finish(manager, claims)
        results = sorted([await woken(taker) for taker in takers], key=lambda result: result.num_missing)
        assert [(len(result.groups), result.num_missing) for result in results] == [(2, 0), (0, 2)]

    run_virtual(main())


def test_take_by_another_wakes_whoever_can_no_longer_be_served() -> None:
    async def main() -> None:
        manager = await make_manager("a", "b", "c")
        await finish(manager, await manager.claim("w0", 2 * GROUP, 0))
        waiting = asyncio.create_task(manager.take_batch(3, HOUR_S))
        await settle()
        assert not waiting.done()
        assert len((await manager.take_batch(2, 0)).groups) == 2
        assert await woken(waiting) == TakeResult(num_missing=2)

    run_virtual(main())


def test_take_batch_names_who_is_waited_for_at_the_deadline() -> None:
    async def main() -> None:
        manager = await make_manager("a", "b", "c")
        await asyncio.sleep(5.0)
        await manager.claim("w7", GROUP, 0)
        await manager.report_step(3, 2, "open")
        message = r"waited 40\.0 s for 2 groups: pending 2, ongoing 1, done 0, .*'a' at worker 'w7' for 40\.0 s.*'open'"
        with pytest.raises(WaitTimeout, match=message):
            await manager.take_batch(2, 40.0)

    run_virtual(main())


def test_take_batch_names_the_slots_needed_when_nobody_claims() -> None:
    async def main() -> None:
        manager = await make_manager("a")
        with pytest.raises(WaitTimeout, match=r"no prompt is ongoing, the next one needs 2 free slots; 0 workers"):
            await manager.take_batch(1, 1.0)

    run_virtual(main())


# ---- reports ----


def test_finish_many_refuses_only_the_stale_group() -> None:
    async def main() -> None:
        manager = await make_manager("a", "b")
        old = await manager.claim("lost", 4, 0)
        await manager.release_worker("lost")
        new = await manager.claim("w0", GROUP, 0)
        assert await manager.finish_many([(old[0], trajectories("a")), (new[0], trajectories("a"))]) == FinishResult(
            stale=("a",)
        )
        assert (await manager.statistics()).done == 1

    run_virtual(main())


def test_report_of_a_released_worker_is_refused() -> None:
    async def main() -> None:
        manager = await make_manager("a")
        (claim,) = await manager.claim("w0", GROUP, 0)
        await manager.release_worker("w0")
        with pytest.raises(StaleClaim, match="'w0'.*'a'"):
            await manager.give_back(claim)

    run_virtual(main())


def test_a_lost_workers_report_that_arrives_while_its_rows_are_cleared_is_refused() -> None:
    async def main() -> None:
        manager = await make_manager("a")
        (claim,) = await manager.claim("lost", GROUP, 0)
        assert await manager.fence_worker("lost") == [claim]
        assert await manager.finish_many([(claim, trajectories("a"))]) == FinishResult(stale=("a",))
        assert await manager.claim("w0", GROUP, 0) == []  # nobody may write its rows before they are cleared
        assert await manager.release_worker("lost") == ReleaseResult(given_back=("a",))
        (claim,) = await manager.claim("w0", GROUP, 0)
        assert await manager.finish_many([(claim, trajectories("a"))]) == FinishResult()

    run_virtual(main())


def test_the_prompt_that_has_lost_too_many_workers_is_named_and_its_batch_asks_for_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        manager = RolloutPromptManager(Partial(16), 2, asyncio.get_running_loop().time, events=tmp_path)
        await manager.admit([PromptMeta("a", GROUP, global_step=1, source_index="41")])
        batch = asyncio.create_task(manager.take_batch(1, HOUR_S))
        for death in range(MAX_LOSSES):
            assert not batch.done()
            assert "is dropped" not in caplog.text
            (claim,) = await manager.claim(f"w{death}", GROUP, 0)
            await manager.fence_worker(f"w{death}")
            result = await manager.release_worker(f"w{death}")
        assert result == ReleaseResult(dropped=(claim,))
        assert await woken(batch) == TakeResult(num_missing=1)
        named = "prompt a (extra_info.index=41)"
        assert f"{named} is dropped: 4 agent-loop workers were lost while they generated it" in caplog.text
        assert (await manager.status()).last_failure == f"{named}: 4 workers were lost with it, last w3"

    run_virtual(main())
    (dropped,) = [event for event in EventReader(tmp_path).read() if isinstance(event, PromptDropped)]
    assert (dropped.uid, dropped.source_index, dropped.reason) == ("a", "41", WORKER_LOST)


def test_a_batch_is_not_taken_from_books_that_do_not_add_up() -> None:
    async def main() -> None:
        manager = await make_manager("a", "b")
        first, _ = await manager.claim("w0", 2 * GROUP, 0)
        await finish(manager, [first])
        manager._queue._claims.ongoing.clear()  # a bug
        with pytest.raises(InternalError, match="lost or doubled prompts, so the run ends: prompt b is lost"):
            await manager.take_batch(1, 0)

    run_virtual(main())


# ---- rounds ----


def test_claims_wait_for_the_round_and_deferred_ones_for_a_later_one() -> None:
    async def main() -> None:
        manager = RolloutPromptManager(Reorder(1, 2, max_deferrals=1), 2, asyncio.get_running_loop().time)
        await manager.admit(prompts("a", "b"))
        waiting = asyncio.create_task(manager.claim("w0", 2 * GROUP, HOUR_S))
        await settle()
        assert not waiting.done()
        assert (await manager.begin_round()).num_fresh == 0
        a, b = await woken(waiting)
        await finish(manager, [b])
        result = await manager.take_batch(1, 0)
        assert ([group.uid for group in result.groups], result.deferred) == (["b"], (a,))
        waiting = asyncio.create_task(manager.claim("w0", GROUP, HOUR_S))
        await settle()
        assert not waiting.done()
        assert (await manager.begin_round()).kind == "long"
        assert await woken(waiting) == [a]
        await finish(manager, [a])
        assert [group.num_deferrals for group in (await manager.take_batch(1, 0)).groups] == [1]

    run_virtual(main())


def test_a_closed_manager_begins_no_round() -> None:
    async def main() -> None:
        manager = await make_manager()
        await manager.close("run ended")
        with pytest.raises(ActorLost, match="run ended"):
            await manager.begin_round()

    run_virtual(main())


# ---- close, restore ----


def test_close_ends_all_waits_and_still_accepts_reports() -> None:
    async def main() -> None:
        manager = await make_manager("a")
        (claim,) = await manager.claim("w0", GROUP, 0)
        claiming = asyncio.create_task(manager.claim("w1", GROUP, HOUR_S))
        taking = asyncio.create_task(manager.take_batch(1, HOUR_S))
        await settle()
        await manager.close("run ended")
        assert await woken(claiming) == []
        with pytest.raises(ActorLost, match="run ended"):
            await woken(taking)
        with pytest.raises(ActorLost, match="run ended"):
            await manager.admit(prompts("c"))
        assert await manager.claim("w1", 1000, HOUR_S) == []
        await finish(manager, [claim])
        assert (await manager.statistics()).done == 1
        assert (await manager.status()).closed == "run ended"

    run_virtual(main())


def test_restore_continues_and_wakes_waiting_workers() -> None:
    async def main() -> None:
        before = await make_manager("a", "b", "c")
        claims = await before.claim("w0", 4, 0)
        await finish(before, claims[:1])
        manager = await make_manager()
        waiting = asyncio.create_task(manager.claim("w0", 4, HOUR_S))
        await settle()
        statistics = await manager.restore(await before.snapshot())
        assert statistics == QueueStatistics(admitted=3, pending=2, ongoing=0, done=1, taken=0)
        assert [claim.uid for claim in await woken(waiting)] == ["b", "c"]
        assert [group.uid for group in (await manager.take_batch(1, 0)).groups] == ["a"]
        with pytest.raises(DuplicateUid):
            await manager.admit(prompts("a"))

    run_virtual(main())


def test_a_restored_queue_knows_the_weights_that_were_reported_before() -> None:
    async def main() -> None:
        manager = await make_manager()
        await manager.report_step(7, 7, "open")
        await manager.restore(await (await make_manager("a")).snapshot())
        await manager.claim("w0", GROUP, 0)
        assert (await manager.snapshot()).begun == {"a": 7}

    run_virtual(main())


def test_restore_into_a_used_manager_is_refused() -> None:
    async def main() -> None:
        manager = await make_manager("a")
        with pytest.raises(InternalError, match="restore after prompts were admitted"):
            await manager.restore(await manager.snapshot())

    run_virtual(main())


# ---- visibility ----


def test_status_shows_workers_step_and_last_failure() -> None:
    async def main() -> None:
        manager = await make_manager()
        await manager.admit([PromptMeta("a", GROUP, global_step=1, source_index="41")])
        await manager.report_worker("w0", WorkerStatus(inflight_trajectories=3, slot_budget=8, requests_in_flight=1))
        await manager.report_worker("w1", WorkerStatus(inflight_trajectories=2, slot_budget=8))
        await manager.report_step(4, 3, "closed")
        await manager.fail((await manager.claim("w0", GROUP, 0))[0], "ValueError: no")
        status = await manager.status()
        assert (status.slots_in_use, status.slots_total, status.parked_requests) == (5, 16, 1)
        assert (status.step, status.weight_version, status.gate) == (4, 3, "closed")
        assert status.last_failure == "prompt a (extra_info.index=41): ValueError: no"
        await manager.release_worker("w0")
        assert (await manager.status()).slots_total == 8

    run_virtual(main())


def test_the_mean_of_slots_in_use_is_over_time_and_begins_anew_with_each_round_and_opening_of_gates() -> None:
    async def main() -> None:
        manager = await make_manager()
        await manager.report_worker("w0", WorkerStatus(inflight_trajectories=8, slot_budget=8))
        await asyncio.sleep(10)
        await manager.begin_round()  # as many are in use, and what was before does not count
        await manager.report_worker("w1", WorkerStatus(inflight_trajectories=4, slot_budget=8))
        await asyncio.sleep(3)
        await manager.report_worker("w0", WorkerStatus(inflight_trajectories=2, slot_budget=8))
        await asyncio.sleep(1)
        assert (await manager.status()).mean_slots_in_use == pytest.approx((12 * 3 + 6) / 4)
        await manager.release_worker("w1")  # it is lost, and its trajectories with it
        await asyncio.sleep(4)
        await manager.report_worker("w1", WorkerStatus(inflight_trajectories=4, slot_budget=8))  # late
        assert (await manager.status()).mean_slots_in_use == pytest.approx((12 * 3 + 6 + 2 * 4) / 8)
        await manager.report_step(1, 0, "closed")
        await asyncio.sleep(8)
        assert (await manager.status()).mean_slots_in_use == pytest.approx((12 * 3 + 6 + 2 * 12) / 16)
        await manager.report_step(1, 1, "open")
        await asyncio.sleep(2)
        assert (await manager.status()).mean_slots_in_use == pytest.approx(2)
        assert (await manager.status()).slots_in_use == 2

    run_virtual(main())


def test_metrics_are_exported_once_per_interval_however_many_events() -> None:
    async def main() -> None:
        sink = RecordingSink()
        manager = await make_manager("a", sink=sink)
        for _ in range(100):
            await manager.give_back((await manager.claim("w0", GROUP, 0))[0])
        await manager.claim("w0", GROUP, 0)
        assert sink.seen == []
        await asyncio.sleep(2.5 * METRICS_INTERVAL_S)
        assert [time_s for time_s, _ in sink.seen] == pytest.approx([METRICS_INTERVAL_S, 2 * METRICS_INTERVAL_S])
        assert sink.seen[-1][1].queue.oldest_ongoing_s == pytest.approx(2 * METRICS_INTERVAL_S)

    run_virtual(main())


def test_metrics_show_the_last_event_and_then_rest() -> None:
    async def main() -> None:
        sink = RecordingSink()
        manager = await make_manager("a", sink=sink)
        await finish(manager, await manager.claim("w0", GROUP, 0))
        await manager.take_batch(1, 0)
        await asyncio.sleep(HOUR_S)
        assert [status.queue.taken for _, status in sink.seen] == [1]

    run_virtual(main())


def test_the_queue_is_an_event_at_most_once_a_second_where_it_moved_and_says_what_status_says(tmp_path: Path) -> None:
    async def main() -> None:
        manager = RolloutPromptManager(Partial(16), 2, asyncio.get_running_loop().time, events=tmp_path)
        await manager.admit(prompts("a", "b"))
        (claim,) = await manager.claim("w0", GROUP, 0)
        await manager.report_worker("w0", WorkerStatus(2, 8, requests_in_flight=3))
        await asyncio.sleep(HOUR_S)  # nothing moves, though ages grow
        status = await manager.status()
        (told,) = [event for event in EventReader(tmp_path).read() if isinstance(event, QueueMoved)]
        assert told == msgspec.structs.replace(queue_event(status), t=told.t)
        assert (told.pending, told.ongoing, told.done, told.taken) == (1, 1, 0, 0)
        assert (told.slots_in_use, told.slots_total, told.parked) == (2, 8, status.parked_requests)
        assert (told.admitted, told.dropped) == (2, 0)
        for _ in range(100):
            await manager.give_back(claim)
            (claim,) = await manager.claim("w0", GROUP, 0)
        await finish(manager, [claim])
        await asyncio.sleep(2.5 * METRICS_INTERVAL_S)
        told = [event for event in EventReader(tmp_path, ["queue"]).read() if isinstance(event, QueueMoved)]
        assert [(event.pending, event.ongoing, event.done) for event in told] == [(1, 1, 0), (1, 0, 1)]
        assert not [
            event for event in EventReader(tmp_path, ["prompt_manager"]).read() if isinstance(event, QueueMoved)
        ]

    run_virtual(main())


# ---- the end that somebody has asked for ----


def test_a_trainer_that_waits_for_a_batch_is_told_that_the_run_should_end_and_no_group_is_taken() -> None:
    async def main() -> None:
        manager = await make_manager("a", "b")
        await manager.report_step(3, 2, "open")
        await finish(manager, await manager.claim("w0", GROUP, 0))
        waiting = asyncio.create_task(manager.take_batch(2, HOUR_S))
        await settle()
        assert await manager.request_stop("Ctrl-C")
        with pytest.raises(RunStopped, match="Ctrl-C"):
            await woken(waiting)
        with pytest.raises(RunStopped):
            await manager.take_batch(1, HOUR_S)
        now = await manager.statistics()
        assert (now.taken, now.done) == (0, 1)

    run_virtual(main())


def test_before_the_first_step_there_is_nobody_to_wait_for() -> None:
    async def main() -> None:
        assert not await (await make_manager("a")).request_stop("Ctrl-C")

    run_virtual(main())


# ---- a later process ----


class Process:
    """Processes of a manager that follow one another; `call` is what Ray says of the call that runs."""

    def __init__(self, folder: Path) -> None:
        self.call, self._folder, self._num_started = "", folder, 0
        self._manager: RolloutPromptManager | None = None

    def start(self) -> RolloutPromptManager:
        if self._manager is not None:
            self._manager._journal.close()
        self._num_started += 1
        place = Place(self._folder, goes_on=self._num_started > 1)
        clock = asyncio.get_running_loop().time
        self._manager = RolloutPromptManager(Partial(16), 2, clock, journal=lambda: place, call_id=lambda: self.call)
        return self._manager


def test_a_later_process_answers_a_poll_whose_claims_were_made(tmp_path: Path) -> None:
    async def main() -> None:
        process = Process(tmp_path)
        first = process.start()
        await first.admit(prompts("a", "b"))
        process.call = "poll"
        claims = await first.claim("w0", 2 * GROUP, HOUR_S)
        assert [claim.uid for claim in claims] == ["a", "b"]
        later, loop = process.start(), asyncio.get_running_loop()
        asked_s = loop.time()
        assert await later.claim("w0", 2 * GROUP, HOUR_S) == claims
        assert loop.time() == asked_s  # nothing is pending, and it does not wait
        assert (await later.statistics()).ongoing == 2

    run_virtual(main())


def test_a_later_process_gives_nothing_to_a_poll_of_a_worker_that_was_released(tmp_path: Path) -> None:
    """Nobody waits for its answer: what it claimed would be lost."""

    async def main() -> None:
        process = Process(tmp_path)
        first = process.start()
        process.call = "poll"
        waiting = asyncio.create_task(first.claim("w0", GROUP, HOUR_S))
        await settle()
        process.call = "release"
        await first.release_worker("w0")
        assert await woken(waiting) == []
        later = process.start()
        process.call = "admit"
        await later.admit(prompts("a"))
        process.call = "poll"
        assert await later.claim("w0", GROUP, HOUR_S) == []
        assert (await later.statistics()).pending == 1

    run_virtual(main())


def test_a_later_process_answers_a_batch_that_was_taken(tmp_path: Path) -> None:
    async def main() -> None:
        process = Process(tmp_path)
        first = process.start()
        await first.admit(prompts("a", "b", "c", "d"))
        claims = await first.claim("w0", 4 * GROUP, 0)
        await finish(first, claims[:2])
        process.call = "take"
        batch = await first.take_batch(2, HOUR_S)
        later = process.start()
        assert await later.take_batch(2, HOUR_S) == batch  # at once, although the others are not done
        process.call = ""
        await finish(later, claims[2:])
        assert [group.uid for group in (await later.take_batch(2, HOUR_S)).groups] == ["c", "d"]

    run_virtual(main())


def test_a_later_process_knows_that_the_run_should_end_and_has_ended(tmp_path: Path) -> None:
    async def main() -> None:
        process = Process(tmp_path)
        first = process.start()
        await first.report_step(3, 2, "open")
        assert await first.request_stop("Ctrl-C")
        later = process.start()
        assert (await later.stop_reason(), (await later.status()).step) == ("Ctrl-C", 3)
        with pytest.raises(RunStopped, match="Ctrl-C"):
            await later.take_batch(1, HOUR_S)
        await later.close("run ended")
        with pytest.raises(ActorLost, match="run ended"):
            await process.start().admit(prompts("a"))

    run_virtual(main())


def test_a_call_whose_change_was_made_before_the_end_has_its_answer_after_it(tmp_path: Path) -> None:
    async def main() -> None:
        process = Process(tmp_path)
        first = process.start()
        process.call = "begin"
        plan = await first.begin_round()
        process.call = "close"
        await first.close("run ended")
        later = process.start()
        process.call = "begin"
        assert await later.begin_round() == plan
        process.call = "another"
        with pytest.raises(ActorLost, match="run ended"):
            await later.begin_round()

    run_virtual(main())


def test_a_worker_that_gave_signs_of_life_owes_the_next_one_to_a_later_process(tmp_path: Path) -> None:
    async def main() -> None:
        process = Process(tmp_path)
        first = process.start()
        for name in ("w0", "w1"):
            await first.beat(name, 1)
        await first.release_worker("w1")
        later = process.start()
        assert list(later._books.beating) == ["w0"]

    run_virtual(main())
