"""What the trainer does may take long, but not for ever; who keeps it is told by where the ranks stand."""

from __future__ import annotations

from partial_rollout.core.phases import Phases, shortened, who_is_stuck

LEAST_S = 1800.0
IN_QUEUE = "kv_batch_get (/site-packages/transfer_queue/interface.py:400)"


def told(phases: Phases, until_s: float, every_s: float = 10.0) -> list[tuple[float, bool]]:
    """When a watch that looks every ten seconds has something to say."""
    found, now_s = [], 0.0
    while now_s < until_s:
        now_s += every_s
        found += [(now_s, late.is_over) for late in phases.look(now_s)]
    return found


def test_a_first_phase_is_warned_of_four_times_and_ends_after_four_times_the_least_limit() -> None:
    phases = Phases(LEAST_S)
    phases.begin("train", 0.0)
    assert told(phases, 20_000.0) == [(720.0, False), (1440.0, False), (2880.0, False), (5760.0, False), (7200.0, True)]


def test_sound_steps_of_any_length_are_never_warned_of() -> None:
    for step_s in (1.0, 90.0, 700.0, 4000.0):
        phases = Phases(LEAST_S)
        phases.begin("train", 0.0)
        phases.begin("train", step_s)
        # Now and then a step takes twice as long, as where a batch has the longest responses.
        assert phases.look(step_s + 2 * step_s - 0.001) == []


def test_each_kind_has_its_own_longest_time() -> None:
    phases = Phases(LEAST_S)
    phases.begin("train", 0.0)
    phases.begin("save", 400.0)
    phases.begin("", 410.0)
    assert (phases.limit_s("train"), phases.limit_s("save"), phases.limit_s("report")) == (8000.0, LEAST_S, 4 * LEAST_S)


def test_what_others_limit_is_not_watched_and_a_stopped_process_is_not_blamed() -> None:
    phases = Phases(LEAST_S)
    phases.begin("", 0.0)
    assert told(phases, 100_000.0) == []
    phases.begin("train", 0.0)
    phases.put_off(50_000.0)
    assert told(phases, 50_000.0) == []
    phases.begin("", 50_100.0)
    assert phases.longest_s("train") == 100.0


def test_the_rank_that_stands_alone_is_named_first() -> None:
    stacks = {"actor-0": "wait", "actor-1": "wait", "actor-2": "copy", "critic-0": "wait"}
    stuck = who_is_stuck("get", stacks)
    assert stuck.ranks[0] == "actor-2"
    assert not stuck.in_transfer_queue
    assert "actor-2, actor-0" in stuck.in_words


def test_a_trainer_or_a_rank_that_waits_in_transfer_queue_blames_it() -> None:
    assert who_is_stuck(IN_QUEUE, {}).in_transfer_queue
    assert who_is_stuck("get", {"actor-0": IN_QUEUE, "actor-1": "all_reduce"}).in_transfer_queue
    alone = who_is_stuck("log (wandb/sdk.py:1)", {})
    assert (alone.in_transfer_queue, alone.in_words) == (False, "no training rank has an open call")


def test_a_message_of_a_thousand_ranks_is_short() -> None:
    assert shortened([f"actor-{rank}" for rank in range(1000)]).endswith("actor-7 and 992 more")
