"""`update_engines`: who is relaunched, how often, and what a run that gives up says. Training ranks are actors."""

from __future__ import annotations

import threading

import pytest

from partial_rollout.errors import EnginesLost, WaitTimeout, WeightUpdateError

pytestmark = pytest.mark.ray

NUM_MANY, SILENT = 64, 37


class Rank:
    """A training rank that answers as it is told, one word for each update."""

    def __init__(self, answers: list[str]) -> None:
        self.answers = answers

    def update_weights(self) -> None:
        answer = self.answers.pop(0)
        if answer == "never":
            threading.Event().wait()
        if answer == "bug":
            raise ZeroDivisionError
        if answer != "ok":
            raise WeightUpdateError(answer)


class Engines:
    """Failures by replica for each time they are asked for."""

    def __init__(self, *failures: dict[int, str]) -> None:
        self.failures = list(failures)
        self.events: list[str] = []

    def failed_updates(self) -> dict[int, str]:
        return self.failures.pop(0)

    def relaunch(self, failed: dict[int, str]) -> None:
        self.events.append(f"relaunch {sorted(failed)}")


@pytest.fixture
def run(ray_cluster):
    """Run an update over ranks with these answers."""
    from partial_rollout.weights.update import update_engines

    actors = []

    def update(engines: Engines, *answers: list[str], relaunches: int = 1, timeout_s: float = 60.0) -> int:
        actors.extend(ray_cluster.remote(num_cpus=0)(Rank).remote(each) for each in answers)
        ranks = actors[-len(answers) :]

        def send():
            engines.events.append("send")
            refs = [rank.update_weights.remote() for rank in ranks]
            ray_cluster.wait(refs)  # the first one's answer, however slowly its process starts
            return refs

        return update_engines(
            send,
            engines,
            version=7,
            relaunches=relaunches,
            timeout_s=timeout_s,
            before_resend=lambda: engines.events.append("sleep"),
        )

    yield update
    for actor in actors:
        ray_cluster.kill(actor)


def test_only_the_engine_that_failed_is_relaunched_and_all_are_sent_everything_again(run):
    engines = Engines({1: "the worker died"})
    assert run(engines, ["ok", "ok"], ["the channel broke", "ok"]) == 1
    assert engines.events == ["send", "relaunch [1]", "sleep", "send"]


def test_engines_that_fail_after_a_relaunch_too_are_lost_and_the_error_names_every_replica_and_reason(run):
    engines = Engines({1: "first"}, {0: "no room", 1: "killed"})
    with pytest.raises(EnginesLost, match=r"version 7 .*1 were relaunched.*relaunches=1.*0: no room; .*1: killed"):
        run(engines, ["ok", "x"], ["x", "x"])
    assert engines.events == ["send", "relaunch [1]", "sleep", "send"]


def test_without_relaunches_the_first_failure_is_the_last(run):
    engines = Engines({0: "killed"})
    with pytest.raises(EnginesLost, match=r"^replica 0 has not taken weight version 7 .*replica 0: killed$"):
        run(engines, ["x"], relaunches=0)
    assert engines.events == ["send"]


def test_a_failure_in_no_engine_is_not_cured_by_a_relaunch(run):
    engines = Engines({})
    with pytest.raises(WeightUpdateError, match=r"^[^\n]*: the server is gone$"):
        run(engines, ["the server is gone"])
    assert engines.events == ["send"]


def test_what_has_nothing_to_do_with_engines_is_raised_as_it_is(run):
    with pytest.raises(ZeroDivisionError):
        run(Engines(), ["ok"], ["bug"])


def test_every_rank_is_waited_for_before_anything_is_relaunched(run):
    engines = Engines({0: "killed"})
    with pytest.raises(WaitTimeout, match=r"version 7 .*of 2 ranks no answer within 0\.5 s from 1$"):
        run(engines, ["killed"], ["never"], timeout_s=0.5)
    assert engines.events == ["send"]


def test_one_silent_rank_of_64_is_named(ray_cluster):
    """63 have answered before anybody waits for them."""
    from partial_rollout.weights.update import update_engines

    silent = ray_cluster.remote(num_cpus=0)(Rank).remote(["never"])
    refs = [ray_cluster.put(None) for _ in range(NUM_MANY)]
    refs[SILENT] = silent.update_weights.remote()
    with pytest.raises(WaitTimeout, match=rf"of {NUM_MANY} ranks no answer within 0\.5 s from {SILENT}$"):
        update_engines(
            lambda: refs,
            Engines(),
            version=7,
            relaunches=1,
            timeout_s=0.5,
            before_resend=lambda: None,
        )
    ray_cluster.kill(silent)
