"""The prompt queue after any sequence of events: conserved, each prompt in one state, none trained twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.tail import Partial
from partial_rollout.errors import (
    CapacityExceeded,
    StaleClaim,
)
from partial_rollout.types import Claim, PromptMeta, ReleaseResult
from tests.unit.core.queue.queues import ManualClock, trajectories, uids


class QueueMachine(RuleBasedStateMachine):
    """Any sequence of events against a model that keeps one plain dict: uid -> state."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PromptQueue(Partial(12), max_attempts=2, clock=ManualClock())
        self.model: dict[str, str] = {}
        self.order: list[str] = []
        self.claims: list[Claim] = []
        self.ended: list[Claim] = []
        self.trained: list[str] = []
        self.owed = 0
        """Prompts that `take` found missing."""

    def end(self, claim: Claim, state: str) -> None:
        self.claims.remove(claim)
        self.ended.append(claim)
        self.model[claim.uid] = state

    @rule(sizes=st.lists(st.integers(1, 3), max_size=5))
    def admit(self, sizes: list[int]) -> None:
        new = [PromptMeta(f"p{len(self.model) + i}", n, global_step=0) for i, n in enumerate(sizes)]
        if len(new) > max(self.queue.policy.capacity - self.queue.num_in_flight, self.owed):
            with pytest.raises(CapacityExceeded):
                self.queue.admit(new)
            return
        self.queue.admit(new)
        self.owed = max(0, self.owed - len(new))
        self.model |= {meta.uid: "pending" for meta in new}
        self.order += [meta.uid for meta in new]

    @rule(worker=st.sampled_from(["w0", "w1"]), free_slots=st.integers(0, 6))
    def claim(self, worker: str, free_slots: int) -> None:
        expected = [uid for uid in self.order if self.model[uid] == "pending"]
        claims = self.queue.claim(worker, free_slots)
        assert uids(claims) == expected[: len(claims)]
        assert sum(claim.num_trajectories for claim in claims) <= free_slots
        for claim in claims:
            self.model[claim.uid] = "ongoing"
        self.claims += claims

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), event=st.sampled_from(["finish", "finish flat", "fail", "drop", "give_back"]))
    def report(self, data: st.DataObject, event: str) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        if event.startswith("finish"):
            metric = 1.0 if event == "finish flat" else None
            members = [replace(each, metric=metric) for each in trajectories(claim.uid, claim.num_trajectories)]
            is_done = self.queue.finish(claim, members)
            assert is_done == (metric is None or claim.num_trajectories == 1)
            self.end(claim, "done" if is_done else "dropped")
        elif event == "fail":
            self.end(claim, "pending" if self.queue.fail(claim) else "dropped")
        elif event == "drop":
            self.queue.drop(claim, "reason")
            self.end(claim, "dropped")
        else:
            self.queue.give_back(claim)
            self.end(claim, "pending")

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def stale_report_changes_nothing(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.ended))
        before = self.queue.snapshot()
        for report in (
            lambda: self.queue.finish(claim, trajectories(claim.uid, claim.num_trajectories)),
            lambda: self.queue.fail(claim),
            lambda: self.queue.drop(claim, "reason"),
            lambda: self.queue.give_back(claim),
        ):
            with pytest.raises(StaleClaim):
                report()
        assert self.queue.snapshot() == before

    @rule(worker=st.sampled_from(["w0", "w1"]), goes_on=st.booleans())
    def release(self, worker: str, goes_on: bool) -> None:
        lost = [claim for claim in self.claims if claim.worker_id == worker]
        result = self.queue.release_worker(worker, uids(lost) if goes_on else [])
        assert result == ReleaseResult(given_back=tuple(uids(lost)))  # it stops, which no prompt is charged for
        for claim in lost:
            self.end(claim, "pending")

    @rule(num_groups=st.integers(1, 4))
    def take(self, num_groups: int) -> None:
        result = self.queue.take(num_groups)
        assert len(result.groups) in (0, num_groups)
        if not result.groups:
            self.owed = result.num_missing  # these may be admitted beyond the capacity
        self.trained += [group.uid for group in result.groups]
        self.model |= {group.uid: "taken" for group in result.groups}

    @rule()
    def restart(self) -> None:
        before = self.queue.statistics()
        for claim in list(self.claims):
            self.end(claim, "pending")
        snapshot = self.queue.snapshot()
        self.queue, self.owed = PromptQueue.restore(snapshot, Partial(12), 2, ManualClock()), 0
        after = self.queue.statistics()
        assert (after.admitted, after.in_flight, after.taken) == (before.admitted, before.in_flight, before.taken)
        self.order = [meta.uid for meta in snapshot.ongoing + snapshot.pending]
        assert [meta.uid for meta in self.queue.snapshot().pending] == self.order

    @invariant()
    def conserved_and_each_uid_in_one_state(self) -> None:
        now, counts = self.queue.statistics(), Counter(self.model.values())
        assert now.conserved, now
        seen = (now.pending, now.ongoing, now.done, now.taken, now.num_dropped)
        assert seen == tuple(counts[state] for state in ("pending", "ongoing", "done", "taken", "dropped"))
        assert now.claimed_trajectories == sum(claim.num_trajectories for claim in self.claims)

    @invariant()
    def no_prompt_is_trained_twice(self) -> None:
        assert len(self.trained) == len(set(self.trained))


QueueMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestQueueMachine = QueueMachine.TestCase
