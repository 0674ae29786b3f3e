"""Long polls: a prompt wakes one of many, and none waits for a poll that is gone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from virtual_time import run_virtual, settle, woken

from partial_rollout.core.queue.lifecycle import MAX_LOSSES
from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.tail import Partial
from partial_rollout.runtime.prompt_manager import RolloutPromptManager
from partial_rollout.types import FinishResult, PromptMeta, TrajectorySummary

if TYPE_CHECKING:
    import pytest

    from partial_rollout.types import Claim

GROUP = 2
NUM_POLLS = 200
HOUR_S = 3600.0


def prompts(*uids: str, group: int = GROUP) -> list[PromptMeta]:
    return [PromptMeta(uid, group, global_step=1) for uid in uids]


def without_spread(claim: Claim) -> list[TrajectorySummary]:
    return [TrajectorySummary(f"{claim.uid}_{i}_0", 3, 5, 0, 0, metric=0.0) for i in range(claim.num_trajectories)]


def new_manager() -> RolloutPromptManager:
    return RolloutPromptManager(Partial(16), 2, asyncio.get_running_loop().time)


async def park(manager: RolloutPromptManager, number: int, free_slots: int) -> list[asyncio.Task[list[Claim]]]:
    polls = [asyncio.create_task(manager.claim(f"w{each}", free_slots, HOUR_S)) for each in range(number)]
    await settle()
    assert not any(poll.done() for poll in polls)
    return polls


async def uids(poll: asyncio.Task[list[Claim]]) -> list[str]:
    return [claim.uid for claim in await woken(poll)]


def note_looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Workers of the polls that are looked at from now on."""
    looks: list[str] = []
    can_claim = PromptQueue.can_claim

    def counted(queue: PromptQueue, worker_id: str, free_slots: int) -> bool:
        looks.append(worker_id)
        return can_claim(queue, worker_id, free_slots)

    monkeypatch.setattr(PromptQueue, "can_claim", counted)
    return looks


def test_an_event_looks_at_no_more_polls_than_there_are_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        manager = new_manager()
        polls = await park(manager, NUM_POLLS, GROUP)
        looks = note_looks(monkeypatch)
        await manager.admit(prompts("a", "b"))
        assert await uids(polls[0]) == ["a"]
        assert await uids(polls[1]) == ["b"]
        (claim,) = polls[0].result()
        await manager.give_back(claim)
        assert await uids(polls[2]) == ["a"]
        (claim,) = polls[1].result()
        assert await manager.finish_many([(claim, without_spread(claim))]) == FinishResult(no_spread=("b",))
        await settle()
        assert looks == ["w0", "w1", "w2"]
        assert [poll.done() for poll in polls[3:]] == [False] * (NUM_POLLS - 3)
        await manager.close("")
        assert await asyncio.gather(*polls[3:]) == [[]] * (NUM_POLLS - 3)

    run_virtual(main())


def test_a_poll_that_is_cancelled_when_it_was_woken_wakes_the_next_one() -> None:
    async def main() -> None:
        manager = new_manager()
        polls = await park(manager, 2, GROUP)
        await manager.admit(prompts("a"))
        polls[0].cancel()  # before it had its turn
        assert await uids(polls[1]) == ["a"]
        assert polls[0].cancelled()

    run_virtual(main())


def test_a_poll_that_is_cancelled_just_before_it_is_woken_wakes_the_next_one() -> None:
    async def main() -> None:
        manager = new_manager()
        polls = await park(manager, 2, GROUP)
        polls[0].cancel()
        await manager.admit(prompts("a"))  # before the poll has heard that it is cancelled
        assert await uids(polls[1]) == ["a"]
        assert polls[0].cancelled()

    run_virtual(main())


def test_a_poll_whose_time_is_over_keeps_no_prompt_from_the_next_one() -> None:
    async def main() -> None:
        manager = new_manager()
        short = asyncio.create_task(manager.claim("short", GROUP, HOUR_S / 2))
        await settle()
        (poll,) = await park(manager, 1, GROUP)
        assert await short == []
        await manager.admit(prompts("a"))
        assert await uids(poll) == ["a"]

    run_virtual(main())


def test_a_prompt_that_a_newer_call_has_taken_is_waited_for_on() -> None:
    async def main() -> None:
        manager = new_manager()
        (poll,) = await park(manager, 1, GROUP)
        await manager.admit(prompts("a"))
        assert [claim.uid for claim in await manager.claim("new", GROUP, 0)] == ["a"]
        await settle()
        assert not poll.done()
        await manager.admit(prompts("b"))
        assert await uids(poll) == ["b"]

    run_virtual(main())


def test_a_poll_with_too_few_slots_keeps_no_prompt_from_the_next_poll() -> None:
    async def main() -> None:
        manager = new_manager()
        small = asyncio.create_task(manager.claim("small", GROUP, HOUR_S))
        await settle()
        large = asyncio.create_task(manager.claim("large", 2 * GROUP, HOUR_S))
        await settle()
        await manager.admit([*prompts("a", group=2 * GROUP), *prompts("b")])
        assert await uids(large) == ["a"]
        assert await uids(small) == ["b"]

    run_virtual(main())


async def with_suspects(*uids: str) -> RolloutPromptManager:
    """A manager whose prompts have lost all workers but the last one."""
    manager = new_manager()
    await manager.admit(prompts(*uids))
    for _ in range(MAX_LOSSES - 1):
        await manager.claim("lost", len(uids) * GROUP, 0)
        await manager.fence_worker("lost")
        await manager.release_worker("lost")
    return manager


def test_a_suspect_is_given_to_a_younger_poll_where_older_ones_have_one_and_nobody_looks_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        manager = await with_suspects("a", "b", "c")
        claims = [claim for each in range(3) for claim in await manager.claim(f"w{each}", GROUP, 0)]
        polls = await park(manager, 2, GROUP)
        young = asyncio.create_task(manager.claim("w3", GROUP, HOUR_S))
        await settle()
        looks = note_looks(monkeypatch)
        await manager.give_back(claims[2])
        assert await uids(young) == ["c"]
        await settle()
        assert looks == ["w0", "w1", "w3"]
        assert not any(poll.done() for poll in polls)
        await manager.close("")
        await asyncio.gather(*polls)

    run_virtual(main())


def test_a_poll_is_given_the_next_suspect_when_that_of_its_worker_has_ended() -> None:
    async def main() -> None:
        manager = await with_suspects("a", "b", "c")
        claims = [claim for each in range(2) for claim in await manager.claim(f"w{each}", GROUP, 0)]
        older, poll = await park(manager, 2, GROUP)
        await manager.finish_many([(claims[1], without_spread(claims[1]))])
        assert await uids(poll) == ["c"]
        assert not older.done()
        await manager.close("")
        await older

    run_virtual(main())
