"""A dead agent-loop worker is replaced: its rows go before its prompts do, and the new one knows what it must."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from ray.exceptions import RayActorError

pytest.importorskip("verl")

from partial_rollout.agent_loop import manager as manager_module
from partial_rollout.agent_loop.rollout_log import LogFolder, WorkerLog
from partial_rollout.agent_loop.trajectory import Trajectory
from partial_rollout.core.queue.ledger import WORKER_LOST
from partial_rollout.core.queue.lifecycle import MAX_LOSSES
from partial_rollout.errors import ActorLost, EngineDead, WaitTimeout
from partial_rollout.runtime import remote_call
from partial_rollout.runtime.run_watch import MANAGER_START_S, POLL_S
from partial_rollout.types import ReleaseResult
from tests.fake_worker import make_claim
from tests.unit.agent_loop.support import make_workers
from tests.unit.agent_loop.test_unfinished_log import interrupt, interrupted_trajectory
from tests.unit.agent_loop.test_worker_log import LONG_S, output
from tests.unit.core.queue.queues import GROUP, make_queue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from partial_rollout.agent_loop.manager import PartialRolloutAgentLoopManager

DEAD = RayActorError(error_msg="killed")
U1, A_B = make_claim("u1"), make_claim("a_b")


class Refs:
    """Ray's calls as values: what a call returns is its answer, an exception is raised when the answer is asked for."""

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "node", "Alive": True, "Resources": {"CPU": 1.0}}]

    def put(self, value: Any) -> Any:
        return value

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return list(refs), []

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        if isinstance(refs, Exception):
            raise refs
        return refs


class Worker:
    """Notes its calls."""

    def __init__(self, name: str, calls: list[str], answer: Any = None) -> None:
        self._name, self._calls, self._answer = name, calls, answer

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            self._calls.append(f"{self._name}.{method}{args}")
            return self._answer if self._answer is not None else f"{self._name} {method}"

        return SimpleNamespace(remote=remote)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    for module in (manager_module, remote_call):
        monkeypatch.setattr(module, "ray", Refs())
    rows = {"u1": {}, "u1_0_0": {}, "u1_1_0": {}, "u2_0_0": {}, "a_b": {}, "a_b_0_1": {}}
    queue = SimpleNamespace(
        kv_list=lambda partition: {partition: rows},
        kv_clear=lambda keys, partition_id: calls.append(f"clear {sorted(keys)}"),
    )
    monkeypatch.setattr(manager_module, "tq", queue)
    return calls


@pytest.fixture
def manager(calls: list[str]) -> PartialRolloutAgentLoopManager:
    prompts = SimpleNamespace(
        fence_worker=SimpleNamespace(remote=lambda name: calls.append(f"fence {name}") or [U1, A_B]),
        release_worker=SimpleNamespace(
            remote=lambda name, going_on: (
                calls.append(f"release {name}, {going_on} go on") or ReleaseResult(("u1", "a_b"))
            )
        ),
    )
    manager = make_workers([Worker("w0", calls), Worker("w1", calls, DEAD)], prompt_manager=prompts)
    spawned: Callable[..., Any] = lambda rank, node, share: Worker(f"new{rank}:{share}", calls)  # noqa: E731
    manager._spawn = spawned  # type: ignore[method-assign]
    return manager


def test_rows_are_cleared_before_others_may_write_them_and_the_new_worker_knows_the_bound(
    manager: PartialRolloutAgentLoopManager, calls: list[str]
) -> None:
    manager.start()
    manager.hold([], 7)
    manager.resize(16)
    calls.clear()
    assert manager.restart(1) == "agent_loop_worker_1_again_1"
    assert [re.sub(r"take_over\(.*", "take_over", call) for call in calls] == [
        "fence agent_loop_worker_1",
        "clear ['a_b_0_1', 'u1_0_0', 'u1_1_0']",
        "w0.take_over",
        "w1.take_over",
        "release agent_loop_worker_1, [] go on",
        "new1:8.ping()",
        "new1:8.keep_unclaimed(frozenset(),)",
        "new1:8.hold([], 7)",
        "new1:8.resize(8,)",
        "new1:8.run()",
    ]
    assert manager.worker_ids == ["agent_loop_worker_0", "agent_loop_worker_1_again_1"]
    assert "new1:8 run" in manager.loops


def test_a_frozen_worker_is_waited_for_until_a_manager_that_froze_too_was_replaced_and_has_killed_it(
    manager: PartialRolloutAgentLoopManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s = list[float]()

    def settle_all(refs: list[Any], *, timeout_s: float, who_waits: str) -> list[Any]:
        limits_s.append(timeout_s)
        return refs

    monkeypatch.setattr(manager_module, "settle_all", settle_all)
    manager.hold([], 7)
    timeouts = manager._settings.timeouts
    replaced_s = POLL_S + timeouts.call_s + MANAGER_START_S
    assert limits_s[0] >= replaced_s + timeouts.claim_s + manager_module.HOLD_TIMEOUT_S


def test_a_prompt_that_kills_four_workers_is_dropped_and_nothing_of_it_is_kept(
    manager: PartialRolloutAgentLoopManager, calls: list[str], tmp_path: Path
) -> None:
    queue = make_queue("a_b", "u1")
    fence, release = SimpleNamespace(remote=queue.fence_worker), SimpleNamespace(remote=queue.release_worker)
    manager._prompt_manager = cast("Any", SimpleNamespace(fence_worker=fence, release_worker=release))
    manager.begin_log(folder := LogFolder(str(tmp_path), 2, 7))
    for death in range(MAX_LOSSES):
        assert not any(call.startswith("clear ['a_b']") for call in calls)
        worker_id = manager.worker_ids[1]
        claim, *others = queue.claim(worker_id, 2 * GROUP)
        assert (claim.uid, claim.attempt) == ("a_b", 1 + death)
        assert bool(others) == (death < MAX_LOSSES - 1)  # a worker has one prompt that may have killed its workers
        log = WorkerLog(worker_id, LONG_S)
        log.begin(folder, [])
        log.write_interrupted(interrupted_trajectory(claim))
        log.close(LONG_S)
        calls.clear()
        manager.restart(1)
        assert manager._known.unclaimed == (set() if death == MAX_LOSSES - 1 else {"a_b_0"})
    assert only(calls, "clear ['a_b']") == "clear ['a_b']"  # the prompt's own row, after those of its trajectories
    told = [call for call in calls if call.startswith("w0.take_over")]
    assert "'a_b_0'" in told[0]
    assert told[1:] == ["w0.take_over(Left(uids=frozenset({'a_b'}), places={}, tokens={}),)"]
    assert queue.statistics().dropped == {WORKER_LOST: 1}
    assert [claim.uid for claim in queue.claim("w0", 2 * GROUP)] == ["u1"]


def test_a_new_worker_writes_its_part_of_the_log_where_the_others_do(
    manager: PartialRolloutAgentLoopManager, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    manager.start()
    folder = LogFolder("folder", 2, 7)
    manager.begin_log(folder)  # one of the workers has died: that costs its part only
    assert "the log of rollouts has nothing of an agent-loop worker" in caplog.text
    calls.clear()
    manager.restart(1)
    assert calls.index(f"new1:8.begin_log({folder!r},)") < calls.index("new1:8.run()")


def told_before_run(calls: list[str]) -> list[str]:
    """What the last new worker was told of an earlier start, before it claims."""
    names = ("replay", "restore_tokens", "keep_unclaimed")
    before = calls[calls.index("new1:8.ping()") : calls.index("new1:8.run()")]
    return [call.removeprefix("new1:8.") for call in before if call.removeprefix("new1:8.").startswith(names)]


def keep(manager: PartialRolloutAgentLoopManager, *keys: str) -> None:
    """A worker says that it has started all trajectories but these."""
    manager._keep([("agent_loop_worker_0", cast("Any", None))], [frozenset(keys)])


def test_a_new_worker_replays_and_goes_on_as_the_others_do_until_they_forget(
    manager: PartialRolloutAgentLoopManager, calls: list[str]
) -> None:
    manager.agent_loop_workers[1] = cast("Any", Worker("w1", calls))
    places: Any = {"a_0": "place"}
    manager.replay(places)
    saved: Any = {"b_0": [], "c_0": []}
    manager.restore_tokens(saved)
    keep(manager, "b_0")
    manager.start()
    calls.clear()
    manager.restart(1)
    assert told_before_run(calls) == [
        f"replay({places},)",
        "restore_tokens({'b_0': []},)",
        "keep_unclaimed(frozenset({'b_0'}),)",
    ]
    assert manager._restored == {"agent_loop_worker_0", "agent_loop_worker_1_again_1"}
    manager.replay({})  # the replay breaks off
    keep(manager)
    calls.clear()
    manager.restart(1)
    assert told_before_run(calls) == ["keep_unclaimed(frozenset(),)"]


@pytest.fixture
def left(tmp_path: Path) -> LogFolder:
    """A log in which worker 1 has a trajectory that has ended, and one that has not."""
    folder = LogFolder(str(tmp_path), 2, 7)
    log = WorkerLog("agent_loop_worker_1", LONG_S)
    log.begin(folder, [])
    log.write(Trajectory(U1, 0), [output()], [])
    log.write_interrupted(interrupted_trajectory(A_B))
    log.write_interrupted(interrupted_trajectory(make_claim("another workers")))
    log.close(LONG_S)
    return folder


def test_all_workers_know_what_a_dead_one_has_logged_before_one_of_them_can_claim_it(
    manager: PartialRolloutAgentLoopManager, calls: list[str], left: LogFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = manager._settle
    monkeypatch.setattr(
        manager, "_settle", lambda refs, what, timeout_s: calls.append(what) or settle(refs, what, timeout_s)
    )
    manager.replay(cast("Any", {"c_0": "place", "u1_0": "older", "a_b_1": "older"}))
    manager.restore_tokens({"d_0": [], "e_0": [], "u1_1": []})
    keep(manager, "d_0", "u1_1")
    manager.begin_log(left)
    manager.start()
    calls.clear()
    manager.restart(1)
    before = calls[: calls.index("release agent_loop_worker_1, ['a_b', 'u1'] go on")]
    assert before.index("take over what a dead worker had") > before.index(only(before, "w0.take_over"))
    assert sorted(re.findall(r"'(\w+_\d)'", only(before, "w0.take_over"))) == ["a_b_0", "u1_0"]
    replayed, restored, unclaimed = told_before_run(calls)
    assert sorted(re.findall(r"'(\w+_\d)'", replayed)) == ["c_0", "u1_0"]
    assert "older" not in replayed
    assert sorted(re.findall(r"'(\w+_\d)'", restored)) == ["a_b_0", "d_0"]
    assert sorted(re.findall(r"'(\w+_\d)'", unclaimed)) == ["a_b_0", "d_0"]


def only(calls: list[str], beginning: str) -> str:
    (found,) = [call for call in calls if call.startswith(beginning)]
    return found


def test_tokens_of_a_dead_worker_are_forgotten_as_restored_ones_are_when_they_are_claimed(
    manager: PartialRolloutAgentLoopManager, left: LogFolder
) -> None:
    manager.begin_log(left)
    manager.restart(1)
    assert manager._known.unclaimed == {"a_b_0"}
    assert manager._restored == {"agent_loop_worker_0", "agent_loop_worker_1_again_1"}
    keep(manager)
    assert manager._known.tokens is None


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_worker_that_dies_while_a_checkpoint_begins_has_logged_in_the_folder_before(
    manager: PartialRolloutAgentLoopManager, calls: list[str], left: LogFolder, tmp_path: Path, is_begun: bool
) -> None:
    new = LogFolder(str(tmp_path / "after_step_9"), 1, 9)
    manager.begin_log(left)
    manager.begin_log(new)
    if is_begun:
        log = WorkerLog("agent_loop_worker_1", LONG_S)
        log.begin(new, [])
        interrupt((longer := interrupted_trajectory(A_B)).generations[0], 7)
        log.write_interrupted(longer)
        log.close(LONG_S)
    manager.restart(1)
    assert "release agent_loop_worker_1, ['a_b', 'u1'] go on" in calls
    ended = re.search(r"u1_0.*?path='([^']*)'", only(calls, "w0.take_over"))
    assert ended is not None
    assert ended[1] == str(left.file("agent_loop_worker_1"))
    (call,) = cast("Any", manager._known.tokens)["a_b_0"]
    assert call.token_ids == ([8, 9, 7] if is_begun else [8, 9])


class Spied:
    """A lock that says when somebody wants it."""

    def __init__(self) -> None:
        self._lock, self.is_wanted = threading.RLock(), threading.Event()

    def __enter__(self) -> None:
        self.is_wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_what_a_dead_worker_had_is_not_handed_on_while_the_trainer_asks_for_what_there_is(
    manager: PartialRolloutAgentLoopManager, calls: list[str], left: LogFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.begin_log(left)
    ask, gives_back = manager._ask_unclaimed, threading.Thread(target=manager._give_back, args=("agent_loop_worker_1",))
    monkeypatch.setattr(manager, "_telling", lock := Spied())
    monkeypatch.setattr(manager, "_keep", lambda asked, answers: frozenset())

    def ask_while_it_is_given_back(asked: Any) -> list[Any]:
        lock.is_wanted.clear()
        gives_back.start()
        assert lock.is_wanted.wait(LONG_S)
        assert not any("take_over" in call for call in calls)
        return ask(asked)

    monkeypatch.setattr(manager, "_ask_unclaimed", ask_while_it_is_given_back)
    manager._restored = frozenset(manager.worker_ids)
    manager.agent_loop_workers[1] = cast("Any", Worker("w1", calls))
    manager.forget_claimed()
    gives_back.join(LONG_S)
    told = [call.partition("(")[0] for call in calls if "w0." in call]
    assert told.index("w0.keep_unclaimed") < told.index("w0.take_over")
    assert manager._known.unclaimed == {"a_b_0"}


def test_nobody_goes_on_where_a_worker_does_not_say_that_it_knows(
    manager: PartialRolloutAgentLoopManager, calls: list[str], left: LogFolder
) -> None:
    manager.begin_log(left)
    manager._settle = lambda refs, what, timeout_s: [WaitTimeout(what)]  # type: ignore[method-assign]
    manager._give_back("agent_loop_worker_1")
    assert "release agent_loop_worker_1, [] go on" in calls


def test_nothing_older_is_kept_where_what_is_known_cannot_be_read(
    manager: PartialRolloutAgentLoopManager, calls: list[str], left: LogFolder
) -> None:
    manager.replay(cast("Any", {"u1_0": "older"}))
    manager.restore_tokens({"a_b_1": [], "d_0": []})
    manager._unclaimed_tokens = lambda: ({}, ["lost"])  # type: ignore[method-assign]
    manager.begin_log(left)
    manager._give_back("agent_loop_worker_1")
    assert "release agent_loop_worker_1, [] go on" in calls
    assert manager._known.places is None
    assert manager._known.unclaimed == {"d_0"}


@pytest.mark.parametrize("why", [None, WaitTimeout("the disk"), OSError("the disk")])
def test_without_the_dead_ones_file_its_prompts_begin_afresh(
    manager: PartialRolloutAgentLoopManager,
    calls: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: Exception | None,
) -> None:
    bounded = manager_module.call_bounded

    def call(read: Callable[[], Any], *, who_waits: str, **limits: Any) -> Any:
        if why is not None and "has logged" in who_waits:
            raise why
        return bounded(read, who_waits=who_waits, **limits)

    monkeypatch.setattr(manager_module, "call_bounded", call)
    manager.begin_log(LogFolder(str(tmp_path), 1, 7))
    manager.restart(1)
    assert "release agent_loop_worker_1, [] go on" in calls
    assert all("places={}, tokens={}" in call for call in calls if "take_over" in call)
    assert "cannot be read on" not in caplog.text  # a checkpoint removes the file before, as a rule
    assert ("is generated again: the disk" in caplog.text) == (why is not None)


def test_what_the_others_are_told_while_a_new_worker_is_told_reaches_it_too(
    manager: PartialRolloutAgentLoopManager, calls: list[str]
) -> None:
    places: Any = {"a_0": "place"}
    manager.replay(places)
    manager.start()
    calls.clear()
    tell = manager._tell

    def tell_and_break_off(worker: Any, known: Any) -> None:
        tell(worker, known)
        if known.places:
            manager.replay({})

    manager._tell = tell_and_break_off  # type: ignore[method-assign]
    manager.restart(1)
    told = [call for call in told_before_run(calls) if call.startswith("replay")]
    assert told == [f"replay({places},)", "replay({},)"]


def test_a_worker_that_died_before_training_began_claims_nothing_until_it_does(
    manager: PartialRolloutAgentLoopManager, calls: list[str]
) -> None:
    manager.restart(1)
    assert not any(".run" in call for call in calls)
    assert manager.loops == {}


def test_calls_to_all_workers_pass_a_dead_one_over(manager: PartialRolloutAgentLoopManager) -> None:
    manager.start()
    manager.hold([], 3)
    manager.resize(16)
    manager.replace_reward_worker(0, cast("Any", "reward"))
    manager.restore_tokens({"a_0": []})
    manager.go_back({"a_0"}, {})
    manager.stop()


def test_the_end_of_a_dead_workers_claim_loop_is_left_to_the_watch(manager: PartialRolloutAgentLoopManager) -> None:
    manager.start()
    assert DEAD in manager.loops
    manager.raise_if_ended([cast("Any", DEAD)])
    assert list(manager.loops) == ["w0 run"]
    with pytest.raises(ActorLost, match="agent-loop worker 0 ended its claim loop"):
        manager.raise_if_ended([cast("Any", "w0 run")])
    failed = cast("Any", EngineDead("replica 0"))
    manager.loops[failed] = "agent-loop worker 1"
    with pytest.raises(EngineDead):
        manager.raise_if_ended([failed])


def test_what_a_dead_worker_validated_is_validated_by_its_successor(
    manager: PartialRolloutAgentLoopManager, calls: list[str]
) -> None:
    prompts: Any = SimpleNamespace(chunk=lambda number: ["first half", "second half"])
    manager._dispatch_validation(prompts)
    waiting = threading.Thread(target=manager.wait_validation, args=(60.0,))
    waiting.start()
    manager.restart(1)
    waiting.join(60.0)
    assert not waiting.is_alive()
    assert "new1:8.validate('second half',)" in calls
    assert calls.count("w0.validate('first half',)") == 1
