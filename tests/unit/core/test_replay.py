"""What is replayed: whole batches in their order, then what no batch has; nothing of weights that will not be again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from partial_rollout.core.replay import History, Place, Plan
from partial_rollout.core.rollout_log import (
    Abandoned,
    Admitted,
    AnyRecord,
    GivenUp,
    Group,
    Opened,
    Taken,
    checksum,
    encode,
)
from tests.unit.core.test_rollout_log import finished

BASE = 4
NUM_ADMITTED = 10
"""Prompts that the run had admitted when the checkpoint was saved."""


def opened(number: int, through: int = BASE) -> Opened:
    return Opened(format=1, number=number, role="trainer", base_step=BASE, holds_through=through)


def admitted(*uids: str, first: int = NUM_ADMITTED) -> Admitted:
    return Admitted(first=first, uids=list(uids), prompts=[f"asks {uid}" for uid in uids])


def taken(step: int, *uids: str, version: int = 3) -> Taken:
    groups = [
        Group(uid, [(f"{uid}_{n}_0", checksum(encode(finished(uid, n, version=version)))) for n in range(2)])
        for uid in uids
    ]
    return Taken(step=step, groups=groups)


def told(history: History, number: int, *records: AnyRecord, ended: dict[str, int] | None = None) -> History:
    """A start's files; `ended`: both trajectories of these prompts, by the version of their tokens."""
    for record in (opened(number), *records) if number == 1 else records:
        history.tell(record)
    for uid, version in (ended or {}).items():
        for session in range(2):
            record = finished(uid, session, version=version)
            history.found(record, number, Place(f"file {number}", 0, 1, checksum(encode(record))))
    return history


def plan(history: History, unfinished: tuple[str, ...] = (), done: tuple[str, ...] = ()) -> Plan:
    return history.plan(BASE, first=NUM_ADMITTED, unfinished=unfinished, done=done)


def batches(found: Plan) -> list[tuple[int, tuple[str, ...]]]:
    return [(batch.step, batch.uids) for batch in found.batches]


def test_batches_are_replayed_with_their_members_in_their_order() -> None:
    ended = dict.fromkeys("abcd", 3)
    history = told(History(), 1, admitted("c", "d"), taken(5, "b", "c"), taken(6, "d", "a"), ended=ended)
    found = plan(history, unfinished=("a", "b"))
    assert batches(found) == [(5, ("b", "c")), (6, ("d", "a"))]
    assert found.names == {10: ("c", "asks c"), 11: ("d", "asks d")}
    assert sorted(found.places) == [f"{uid}_{n}" for uid in "abcd" for n in range(2)]
    assert (found.through, found.num_responses, found.num_tokens) == (6, 8, 24)


def test_groups_that_the_checkpoint_holds_need_no_record() -> None:
    history = told(History(), 1, taken(5, "kept", "a"), ended={"a": 3})
    found = plan(history, unfinished=("a",), done=("kept",))
    assert batches(found) == [(5, ("kept", "a"))]
    assert sorted(found.places) == ["a_0", "a_1"]


def test_a_batch_with_a_missing_record_and_all_later_ones_are_not_replayed() -> None:
    history = told(History(), 1, taken(5, "a"), taken(6, "b"), taken(7, "c"), ended={"a": 3, "b": 3, "c": 3})
    del history.trajectories["b_1"]
    assert batches(plan(history, unfinished=("a", "b", "c"))) == [(5, ("a",))]


def test_a_record_that_is_not_the_one_that_was_trained_does_not_stand_for_it() -> None:
    history = told(History(), 1, taken(5, "a", version=3), ended={"a": 2})
    assert batches(plan(history, unfinished=("a",))) == []


def test_a_batch_of_a_prompt_that_nobody_knows_is_not_replayed() -> None:
    history = told(History(), 1, taken(5, "a"), ended={"a": 3})
    assert batches(plan(history)) == []
    gap = told(History(), 1, admitted("a", first=NUM_ADMITTED + 1), taken(5, "a"), ended={"a": 3})
    assert (batches(plan(gap)), plan(gap).names) == ([], {})


def test_no_prompt_is_trained_twice() -> None:
    history = told(History(), 1, taken(5, "a"), taken(6, "a"), ended={"a": 3})
    assert batches(plan(history, unfinished=("a",))) == [(5, ("a",))]
    history = told(History(), 1, taken(5, "a", "a"), ended={"a": 3})
    assert batches(plan(history, unfinished=("a",))) == []


def test_steps_that_lack_one_end_with_it() -> None:
    history = told(History(), 1, taken(5, "a"), taken(7, "b"), ended={"a": 3, "b": 3})
    assert plan(history, unfinished=("a", "b")).through == 5


def test_ended_trajectories_of_no_batch_are_replayed_if_their_weights_will_be_again() -> None:
    history = told(History(), 1, taken(5, "a"), ended={"a": 3, "now": 5, "later": 6, "gone": 5})
    found = plan(history, unfinished=("a", "now", "later"))
    assert sorted(found.places) == ["a_0", "a_1", "now_0", "now_1"]


def given_up(history: History, number: int, uid: str, claim_id: int) -> None:
    history.tell_of_worker(GivenUp(uid=uid, claim_id=claim_id), number, Place(f"file {number}", 0, 1, 1))


def test_ended_trajectories_of_an_attempt_that_has_failed_are_void_but_for_those_that_were_trained() -> None:
    history = told(History(), 1, taken(5, "a"), ended={"a": 3, "b": 3, "c": 3})
    for uid, claim_id in (("a", 5), ("b", 5), ("c", 4)):  # the records are of claim 5
        given_up(history, 1, uid, claim_id)
    found = plan(history, unfinished=("a", "b", "c"))
    assert sorted(found.places) == ["a_0", "a_1", "c_0", "c_1"]


def test_a_replayed_trajectory_comes_before_what_its_start_has_claimed_itself() -> None:
    """Start 2 has written it again under claim 80, as start 1 had. Then its attempt there, claim 5, fails."""
    old = replace(finished("a", 0, version=3), claim_id=80)
    new = replace(finished("a", 0, version=4), claim_id=9)
    history = told(History(), 1)
    for number, record in ((1, old), (2, old)):
        history.found(record, number, Place(f"file {number}", 0, 1, checksum(encode(record))))
    assert plan(history, unfinished=("a",)).places["a_0"].path == "file 2"
    given_up(history, 2, "a", 5)
    assert plan(history, unfinished=("a",)).places == {}
    history.found(new, 2, Place("next attempt", 0, 1, checksum(encode(new))))
    assert plan(history, unfinished=("a",)).places["a_0"].path == "next attempt"


def test_a_trajectory_that_one_start_has_written_twice_keeps_its_claim() -> None:
    """An earlier attempt, claim 3, has failed: what claim 5 has ended is there in two files, and counts."""
    history, record = told(History(), 1), finished("a", 0, version=3)
    for path in ("one", "another"):
        history.tell_of_worker(record, 1, Place(path, 0, 1, checksum(encode(record))))
    given_up(history, 1, "a", 3)
    assert plan(history, unfinished=("a",)).places["a_0"].path == "another"


def test_a_trajectory_of_several_outputs_is_as_new_as_the_newest_of_them() -> None:
    record = finished("a", 0, version=3)
    record = replace(record, summaries=[*finished("a", 0, version=5).summaries, *record.summaries])
    history = told(History(), 1)
    history.found(record, 1, Place("file 1", 0, 1, checksum(encode(record))))
    assert plan(history, unfinished=("a",)).places == {}  # no weights of step 5 will be again


def test_of_what_was_given_up_in_several_files_the_latest_claim_counts() -> None:
    """Each worker has a file, so the later claim may be told first."""
    history = told(History(), 1, ended={"a": 3})
    for claim_id in (5, 2):
        given_up(history, 1, "a", claim_id)
    assert plan(history, unfinished=("a",)).places == {}


def test_what_weights_have_sampled_that_a_start_still_holds_is_kept() -> None:
    history = told(History(), 1, taken(5, "a"), ended={"a": 3, "of 5": 5, "of 6": 6})
    told(history, 2, opened(2, through=5), taken(6, "x", version=5), ended={"x": 5})
    found = plan(history, unfinished=("a", "of 5", "of 6", "x"))
    assert found.through == 6
    assert sorted(found.places) == [f"{uid}_{n}" for uid in ("a", "of 5", "x") for n in range(2)]


def test_of_two_records_that_no_batch_has_the_later_start_counts() -> None:
    history = told(History(), 1, ended={"a": 3, "b": 3})
    told(history, 2, opened(2), ended={"a": 4})
    found = plan(history, unfinished=("a", "b"))
    paths = {key: place.path for key, place in found.places.items()}
    assert paths == {"a_0": "file 2", "a_1": "file 2", "b_0": "file 1", "b_1": "file 1"}


def test_a_second_start_goes_on_with_the_history_of_the_first() -> None:
    history = told(History(), 1, taken(5, "a"), taken(6, "b"), ended={"a": 3, "b": 3, "c": 3})
    told(history, 2, opened(2, through=6), taken(5, "a"), taken(7, "c"), ended={"a": 3})
    assert [batch.step for batch in plan(history, unfinished=("a", "b", "c")).batches] == [5, 6, 7]


def test_a_second_start_that_has_left_the_history_hides_what_came_after() -> None:
    history = told(History(), 1, taken(5, "a"), taken(6, "b"), taken(7, "c"), ended={"a": 3, "b": 3, "c": 3, "d": 6})
    told(
        history,
        2,
        opened(2, through=7),
        taken(5, "a"),
        Abandoned(holds_through=5, admitted=0),
        taken(6, "c"),
        ended={"c": 3},
    )
    found = plan(history, unfinished=("a", "b", "c", "d"))
    assert batches(found) == [(5, ("a",)), (6, ("c",))]
    assert "d_0" not in found.places
    told(history, 3, opened(3, through=BASE))
    assert batches(plan(history, unfinished=("a", "b", "c"))) == []


def test_a_step_of_several_batches_has_them_all() -> None:
    history = told(History(), 1, taken(5, "a"), taken(5, "b"), ended={"a": 3, "b": 3})
    told(history, 2, opened(2, through=5), taken(5, "a"), taken(5, "b"))
    assert batches(plan(history, unfinished=("a", "b"))) == [(5, ("a",)), (5, ("b",))]


def test_prompts_get_their_names_from_the_latest_start() -> None:
    history = told(History(), 1, admitted("a", "b"))
    told(history, 2, opened(2), admitted("x"))
    assert [uid for uid, _ in plan(history).names.values()] == ["x", "b"]


def test_a_start_that_has_left_the_history_hides_names_that_it_has_not_given_itself() -> None:
    history = told(History(), 1, admitted("a", "b", "c", "d"))
    first = next(iter(history.names))
    told(history, 2, opened(2), admitted("a"), Abandoned(holds_through=BASE, admitted=first + 1))
    assert [uid for uid, _ in plan(history).names.values()] == ["a"]
    history.tell(Admitted(first=first + 1, uids=["x"], prompts=["another"]))
    assert [uid for uid, _ in plan(history).names.values()] == ["a", "x"]


UIDS = ("a", "b", "c", "d")
STEPS = st.lists(st.lists(st.sampled_from(UIDS), min_size=1, max_size=3), max_size=4)
ENDED = st.dictionaries(st.sampled_from(UIDS), st.integers(0, 7))


@st.composite
def starts(draw: st.DrawFn) -> History:
    """Starts that tell of any batches, whether or not their trajectories are there, and of any that hold no more."""
    history = History()
    for number in range(1, draw(st.integers(1, 3)) + 1):
        history.tell(opened(number, through=draw(st.integers(BASE, BASE + 4))))
        history.tell(admitted(*draw(st.lists(st.sampled_from(UIDS), unique=True, max_size=2))))
        for step, uids in enumerate(draw(STEPS), BASE + 1):
            history.tell(taken(step, *uids, version=draw(st.integers(0, 7))))
            if draw(st.integers(0, 9)) == 0:
                history.tell(Abandoned(holds_through=draw(st.integers(BASE, step)), admitted=draw(st.integers(0, 12))))
        told(history, number + 1, ended=draw(ENDED))
    return history


@given(starts(), st.sets(st.sampled_from(UIDS)), st.sets(st.sampled_from(UIDS)))
def test_whatever_the_files_tell_each_step_is_whole_and_no_prompt_is_trained_twice(
    history: History, unfinished: set[str], done: set[str]
) -> None:
    unfinished -= done
    found = plan(history, tuple(unfinished), tuple(done))
    assert [batch.step for batch in found.batches] == list(range(BASE + 1, found.through + 1))
    uids = [uid for batch in found.batches for uid in batch.uids]
    assert len(uids) == len(set(uids))
    assert set(uids) <= unfinished | done | {uid for uid, _ in found.names.values()}
    for batch in found.batches:
        for group in (group for groups in history.batches[batch.step] for group in groups):
            named = {key.rpartition("_")[0]: check for key, check in group.trajectories}
            assert group.uid in done or {key: found.places[key].checksum for key in named} == named
    members = {f"{uid}_{session}" for uid in uids for session in range(2)}
    for key, place in found.places.items():
        (logged,) = (each for each in history.trajectories[key].values() if each.place == place)
        assert key in members or logged.newest_version <= found.through
