"""A manager whose process dies at any moment answers as one that lives: no change is lost, and none made twice."""

from __future__ import annotations

import ast
import fcntl
import inspect
import os
import random
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.staleness import UNBOUNDED, StalenessBound
from partial_rollout.core.queue.tail import FewAtATime, Partial, Reorder, Wait
from partial_rollout.errors import InternalError, JournalUnreadable, PartialRolloutError, StaleClaim
from partial_rollout.runtime import journal as module
from partial_rollout.runtime import prompt_manager
from partial_rollout.runtime.books import Books
from partial_rollout.runtime.journal import Journal, Place
from partial_rollout.types import Claim, PromptMeta, TrajectorySummary, VersionSpan
from tests.unit.core.queue.queues import GROUP, ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from partial_rollout.core.queue.tail import TailPolicy

BATCH = 2
CALLS = 60
SCHEDULES = 20
LIMIT_S = 30.0
WORKERS = ("w0", "w1", "w2")
POLICIES: dict[str, tuple[TailPolicy, StalenessBound]] = {
    "partial": (Partial(3 * BATCH), UNBOUNDED),
    "partial, drop": (Partial(3 * BATCH), StalenessBound(0, "drop")),
    "partial, restart": (Partial(3 * BATCH), StalenessBound(0, "restart")),
    "partial, finish": (Partial(2 * BATCH), StalenessBound(1, "finish")),
    "wait": (Wait(BATCH), UNBOUNDED),
    "reorder": (Reorder(BATCH, BATCH + 1, max_deferrals=2), UNBOUNDED),
    "reorder, few": (FewAtATime(BATCH, BATCH + 1, max_deferrals=2, max_joining=1), UNBOUNDED),
}
Call = tuple[str, tuple[Any, ...]]


class Calls:
    """Draws the calls of a trainer and its workers, wrong and late ones among them; told each answer."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.claims: list[Claim] = []
        self.missing = self.num_admitted = self.version = 0

    def next(self) -> Call:
        """A change and its arguments."""
        draw, slots = self.draw, self.draw.choice([GROUP, 2 * GROUP, 8])
        kinds: list[Callable[[], Call]] = [
            lambda: ("begin_round", ()),
            lambda: ("take", (BATCH, ())),
            lambda: ("take", (BATCH, [f"p{draw.randrange(self.num_admitted + 1)}"])),
            lambda: ("discard_expired", ()),
            lambda: ("take_long_running", (draw.choice([0.0, 5.0]),)),
            lambda: ("report_step", (self.version, self.version, draw.choice(["open", "closed"]))),
            lambda: ("set_capacity", (draw.choice([4, 6, 8]),)),
            lambda: ("fence_worker", (draw.choice(WORKERS),)),
            lambda: ("release_worker", (draw.choice(WORKERS), [f"p{draw.randrange(self.num_admitted + 1)}"])),
            lambda: (draw.choice(["beats", "forget"]), (draw.choice(WORKERS),)),
            *[lambda: ("admit", (self._prompts(),))] * 3,
            *[lambda: ("claim", (draw.choice(WORKERS), slots))] * 4,
            *[lambda: ("take", (BATCH, ()))] * 2,
        ]
        if self.claims:
            claim = draw.choice(self.claims)
            kinds += [lambda: ("finish_many", ([(each, self._group(each)) for each in self.claims[:2]],))] * 6
            kinds += [lambda: ("fail", (claim, "ValueError")), lambda: ("drop", (claim, "bad_data"))]
            kinds += [lambda: ("expire", (claim,)), lambda: ("give_back", (claim,))]
        return draw.choice(kinds)()

    def answered(self, call: Call, answer: Any) -> None:
        """What comes of a call for the next ones."""
        change, arguments = call
        if change == "claim":
            self.claims += [claim for claim in answer if claim not in self.claims]
        elif change == "take" and not isinstance(answer, Exception):
            self.missing = answer.num_missing
            self.version += bool(answer.groups)
        elif change == "begin_round":
            self.missing = answer.num_fresh
        elif change == "finish_many" and self.draw.random() < 0.8:  # else reported once more, as a stale one
            self.claims = self.claims[2:]

    def _prompts(self) -> list[PromptMeta]:
        number, first = self.missing or self.draw.choice([1, 2]), self.num_admitted
        self.num_admitted += self.draw.choice([number, number, number - 1])  # some uids are not new
        return [PromptMeta(f"p{first + i}", GROUP, self.version, str(i)) for i in range(number)]

    def _group(self, claim: Claim) -> list[TrajectorySummary]:
        metrics = self.draw.choice([None, None, None, 1.0])
        number = self.draw.choice([GROUP] * 9 + [1])  # some are not whole
        spans = (VersionSpan(self.version, 5),)
        return [
            TrajectorySummary(f"{claim.uid}_{i}_0", 3, 5, self.version, self.version, 1, 2, spans, metric=metrics)
            for i in range(number)
        ]


def ask(journal: Journal, number: int, call: Call) -> Any:
    try:
        return journal.do(f"call {number}", module.CHANGES[call[0]], *call[1])
    except PartialRolloutError as error:
        return error


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Exception):
        return (type(one), str(one)) == (type(other), str(other))
    return one == other


def state(journal: Journal) -> bytes:
    return msgspec.msgpack.encode(journal.books.whole())


def kill(journal: Journal, folder: Path, before: tuple[Path, int] | None, cut: Callable[[int, int], int]) -> None:
    """The process dies while it writes, or after it has written: what it was writing when it was at `before`."""
    journal.close()
    last = latest(folder)
    if before is not None and before[0] == last:
        os.truncate(last, cut(before[1], last.stat().st_size))


def latest(folder: Path) -> Path:
    return max(folder.glob("journal.*[0-9]"), key=lambda path: int(path.suffix[1:]))


def play(seed: int, policy: TailPolicy, bound: StalenessBound, folder: Path) -> int:
    """One schedule of calls at a manager that lives and at one that dies now and then; how often it did."""
    calls, clock, num_deaths = Calls(seed), ManualClock(), 0
    draw = random.Random(-seed)

    def start() -> Journal:
        return Journal(policy, 2, clock, bound, Place(folder, goes_on=num_deaths > 0))

    lives, dies = Journal(policy, 2, clock, bound), start()
    for number in range(CALLS):
        clock.now_s += draw.random()
        call = calls.next()
        expected = ask(lives, number, call)
        before = (latest(folder), latest(folder).stat().st_size)
        answer = ask(dies, number, call)
        if draw.random() < 0.3:
            num_deaths += 1
            kill(dies, folder, before, lambda least, most: draw.choice([least, most, draw.randint(least, most)]))
            dies = start()
            answer = ask(dies, number, call)
        if draw.random() < 0.1:  # the connection broke, not the process
            answer = ask(dies, number, call)
        calls.answered(call, expected)
        assert same(answer, expected), (number, call, answer, expected)
        assert state(dies) == state(lives), number
        assert dies.books.queue.statistics() == lives.books.queue.statistics()
        assert dies.books.queue.snapshot() == lives.books.queue.snapshot()
    dies.close()
    return num_deaths


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("file_bytes", [1, 3000, module.FILE_BYTES])
def test_a_manager_that_dies_at_any_moment_answers_as_one_that_lives(
    name: str, file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", file_bytes)
    monkeypatch.setattr(module, "BOOKS_SHARE", 0)
    num_deaths = 0
    for seed in range(SCHEDULES):
        try:
            num_deaths += play(seed, *POLICIES[name], tmp_path / str(seed))
        except AssertionError as error:
            raise AssertionError(f"play({seed}, {name!r}) with files of {file_bytes} bytes") from error
    assert num_deaths > SCHEDULES


# ---- reading what is not what was written ----


def written(folder: Path, name: str = "partial, restart") -> dict[int, bytes]:
    """A journal of one file: the books by the bytes that it had then."""
    calls, clock = Calls(7), ManualClock()
    journal = Journal(*_made(name, clock), Place(folder))
    states = {latest(folder).stat().st_size: state(journal)}
    for number in range(CALLS):
        clock.now_s += 1.0
        call = calls.next()
        calls.answered(call, ask(journal, number, call))
        states[latest(folder).stat().st_size] = state(journal)
    journal.close()
    assert len(states) == CALLS + 1
    return states


def _made(name: str, clock: ManualClock) -> tuple[TailPolicy, int, ManualClock, StalenessBound]:
    policy, bound = POLICIES[name]
    return policy, 2, clock, bound


def read(folder: Path, content: bytes) -> bytes:
    """The books that a new process makes of a file."""
    path = latest(folder)
    path.write_bytes(content)
    journal = Journal(*_made("partial, restart", ManualClock()), Place(folder, goes_on=True))
    journal.close()
    return state(journal)


def test_a_file_that_was_cut_gives_the_changes_up_to_there(tmp_path: Path) -> None:
    states = written(tmp_path)
    content, beginning = latest(tmp_path).read_bytes(), min(states)
    cuts = {*range(beginning, len(content), 7), *(each + more for each in states for more in (-1, 0, 1, 12))}
    for num_bytes in sorted(cuts & set(range(beginning, len(content) + 1))):
        whole = max(each for each in states if each <= num_bytes)
        assert read(tmp_path, content[:num_bytes]) == states[whole]
        assert latest(tmp_path).stat().st_size == whole  # what follows is not written behind a torn end
    for num_bytes in range(0, beginning, 5):
        with pytest.raises(JournalUnreadable, match=r"journal\.1 at byte \d+ cannot be read"):
            read(tmp_path, content[:num_bytes])


def test_a_file_with_a_wrong_bit_is_refused_by_its_name(tmp_path: Path) -> None:
    written(tmp_path)
    content, draw = latest(tmp_path).read_bytes(), random.Random(3)
    for place in [*range(0, len(content), 7), len(content) - 1]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << draw.randrange(8)
        with pytest.raises(JournalUnreadable, match=r"journal\.1 at byte \d+ cannot be read"):
            read(tmp_path, bytes(damaged))


def test_a_wrong_bit_in_a_torn_end_is_cut_off_or_refused(tmp_path: Path) -> None:
    states = written(tmp_path)
    content, draw = latest(tmp_path).read_bytes(), random.Random(4)
    num_cut = 0
    for num_bytes in range(min(states) + 1, len(content), 5):
        damaged = bytearray(content[:num_bytes])
        damaged[draw.randrange(max(0, num_bytes - 40), num_bytes)] ^= 1 << draw.randrange(8)
        try:
            assert read(tmp_path, bytes(damaged)) == states[max(each for each in states if each <= num_bytes)]
            num_cut += 1
        except JournalUnreadable:
            pass
    assert num_cut > 0


def test_records_in_another_order_are_refused_or_lead_to_the_same_books(tmp_path: Path) -> None:
    """Each record is whole, so only its effects can tell: a file that follows tells the books it must lead to."""
    clock, folder = ManualClock(), tmp_path
    journal = Journal(*_made("partial", clock), Place(folder))
    for number in range(2):
        journal.do(f"call {number}", PromptQueue.admit, [PromptMeta(f"p{number}", GROUP, 0)])
    first = latest(folder)
    journal._begin_file()
    journal.close()
    content = first.read_bytes()
    frames = module.Frames(first, content)
    begins = [frames.num_bytes for _ in frames]  # ends, in fact: of the books and of two records
    swapped = content[: begins[0]] + content[begins[1] :] + content[begins[0] : begins[1]]
    first.write_bytes(swapped)
    with pytest.raises(
        JournalUnreadable, match=r"journal\.2 at byte \d+ cannot be read: the changes of the file before"
    ):
        Journal(*_made("partial", clock), Place(folder, goes_on=True))


def test_a_journal_that_is_gone_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    latest(tmp_path).unlink()
    with pytest.raises(JournalUnreadable, match="is not in"):
        Journal(*_made("partial", ManualClock()), Place(tmp_path, goes_on=True))


def test_a_full_disk_ends_the_journal_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(*_made("partial", ManualClock()), Place(tmp_path))

    def full(file: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    journal.do("call 1", PromptQueue.admit, [PromptMeta("a", GROUP, 0)])
    assert [claim.uid for claim in journal.do("call 2", PromptQueue.claim, "w0", GROUP)] == ["a"]
    assert "the run goes on, but the death of the prompt manager" in caplog.text
    journal.close()
    with pytest.raises(JournalUnreadable, match="is not in"):  # never a queue that lacks a change
        Journal(*_made("partial", ManualClock()), Place(tmp_path, goes_on=True))


def test_a_change_that_cannot_be_made_again_is_an_error_and_never_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(*_made("partial", ManualClock()), Place(tmp_path))
    journal.do("call 1", PromptQueue.begin_round)
    journal.close()

    def fails(_queue: object) -> None:
        raise ValueError("no more")

    monkeypatch.setitem(module.CHANGES, "begin_round", fails)
    with pytest.raises(InternalError, match=r"journal\.1 at byte \d+: the change 'begin_round' failed with ValueError"):
        Journal(*_made("partial", ManualClock()), Place(tmp_path, goes_on=True))


# ---- what is kept ----


def test_the_folder_is_private_and_has_two_files_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 1)
    folder = tmp_path / "journal"
    journal, clock = Journal(*_made("partial", ManualClock()), Place(folder)), ManualClock()
    for number in range(200):
        clock.now_s += 1.0
        journal.do(f"call {number}", Books.report_step, number, number, "open")
    journal.close()
    assert len(list(folder.glob("journal.*"))) == 2
    assert folder.stat().st_mode & 0o077 == 0


def test_answers_are_forgotten_when_nobody_can_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_ANSWERS", 3)
    journal = Journal(*_made("partial", ManualClock()))
    journal.do("take 1", Books.take, BATCH, ())
    journal.do("take 2", Books.take, BATCH, ())
    assert (journal.answered("take 1"), journal.answered("take 2")) == (False, True)
    for number in range(3):
        journal.do(f"call {number}", PromptQueue.begin_round)
    assert [journal.answered(call) for call in ("take 2", "call 0", "call 2")] == [False, True, True]


def test_the_answer_of_a_call_that_was_refused_is_its_error(tmp_path: Path) -> None:
    journal = Journal(*_made("partial", ManualClock()), Place(tmp_path))
    stale = Claim("a", 1, "w0", GROUP, 0, 1)
    for _ in range(2):
        with pytest.raises(StaleClaim):
            journal.do("call 1", PromptQueue.give_back, stale)
    journal.close()
    again = Journal(*_made("partial", ManualClock()), Place(tmp_path, goes_on=True))
    assert again.answered("call 1")
    with pytest.raises(StaleClaim):
        again.do("call 1", PromptQueue.give_back, stale)
    again.close()


def test_only_what_a_later_process_can_make_again_is_done() -> None:
    journal = Journal(*_made("partial", ManualClock()))
    methods: list[Callable[..., Any]] = [PromptQueue.take, PromptQueue.finish, PromptQueue.resize, Books.load_whole]
    for method in methods:
        with pytest.raises(InternalError, match="cannot be written down"):
            journal.do("call 1", method, None)


READS = {"policy", "statistics", "snapshot", "can_claim", "can_take", "has_batch", "next_group_size", "uids_of_worker"}
READS |= {"has_startable_suspect"}
"""What the manager may ask its queue past the journal."""


def test_the_manager_changes_its_queue_by_the_journal_only() -> None:
    """A change past it would be missing in a later process."""
    tree = ast.parse(inspect.getsource(prompt_manager.RolloutPromptManager))
    asked = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "_queue"
    }
    assert asked <= READS


@pytest.mark.parametrize("name", POLICIES)
def test_asking_the_queue_changes_nothing(name: str) -> None:
    calls, clock = Calls(5), ManualClock()
    journal = Journal(*_made(name, clock))
    for number in range(CALLS):
        call = calls.next()
        calls.answered(call, ask(journal, number, call))
        before, queue = state(journal), journal.books.queue
        asked = [queue.statistics(), queue.snapshot(), queue.can_claim("w9", 4), queue.can_take(BATCH)]
        asked += [queue.has_batch(BATCH), queue.uids_of_worker("w9"), queue.next_group_size, queue.num_due(BATCH)]
        asked += [queue.has_startable_suspect]
        assert state(journal) == before, asked


def test_a_later_process_waits_until_the_one_before_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Journal(*_made("partial", ManualClock()), Place(tmp_path))
    made, waits, flock = list[Journal](), threading.Event(), fcntl.flock

    def noted(file: int, operation: int) -> None:
        try:
            flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            waits.set()
            flock(file, operation)

    def later() -> None:
        made.append(Journal(*_made("partial", ManualClock()), Place(tmp_path, goes_on=True)))

    monkeypatch.setattr(module.fcntl, "flock", noted)
    thread = threading.Thread(target=later, daemon=True)
    thread.start()
    assert waits.wait(LIMIT_S)
    before.do("call 1", PromptQueue.admit, [PromptMeta("a", GROUP, 0)])  # late, as of a process whose disk had hung
    before.close()
    thread.join(LIMIT_S)
    assert made[0].answered("call 1")
    made[0].close()


def test_numbers_of_numpy_are_written_down_and_any_other_thing_ends_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def group(claim: Claim, metric: Any) -> list[TrajectorySummary]:
        return [
            TrajectorySummary(f"{claim.uid}_{i}_0", np.int64(3), 5, np.int32(1), 1, metric=metric)  # pyright: ignore[reportArgumentType]
            for i in range(GROUP)
        ]

    journal = Journal(*_made("partial", ManualClock()), Place(tmp_path))
    journal.do("call 1", PromptQueue.admit, [PromptMeta(uid, GROUP, 0) for uid in "abc"])
    first, second, _ = journal.do("call 2", PromptQueue.claim, "w0", 3 * GROUP)
    groups = [(first, group(first, None)), (second, group(second, np.float64(1.0)))]
    assert journal.do("call 3", Books.finish_many, groups).no_spread == ("b",)
    journal._begin_file()
    journal.close()
    later = Journal(*_made("partial", ManualClock()), Place(tmp_path, goes_on=True))
    assert module.ENCODER.encode(later.books.whole()) == module.ENCODER.encode(journal.books.whole())
    later.do("call 4", PromptQueue.admit, [PromptMeta("d", GROUP, 0, object())])  # pyright: ignore[reportArgumentType]
    assert "a object cannot be written down" in caplog.text
    assert later.books.queue.statistics().pending == 1
    later.close()
