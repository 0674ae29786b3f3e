"""What `python -m partial_rollout.status` prints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from partial_rollout import status as command
from partial_rollout.observability.events import EventWriter, PhaseBegan
from partial_rollout.observability.status_view import format_status, status_json
from partial_rollout.types import ManagerStatus, QueueStatistics, WorkerStatus

if TYPE_CHECKING:
    from pathlib import Path

BUSY = ManagerStatus(
    queue=QueueStatistics(
        admitted=40,
        pending=3,
        ongoing=4,
        done=1,
        taken=30,
        dropped={"prompt_too_long": 1, "agent_loop_failed": 1},
        failed_attempts=2,
        claimed_trajectories=16,
        oldest_ongoing_s=12.34,
        oldest_ongoing_uid="u7",
        oldest_ongoing_worker="w1",
    ),
    capacity=16,
    workers={"w1": WorkerStatus(5, 8, 2), "w0": WorkerStatus(6, 8)},
    step=7,
    weight_version=6,
    gate="closed",
    last_failure="u3: ValueError: no",
)
IDLE = ManagerStatus(queue=QueueStatistics(0, 0, 0, 0, 0), capacity=16)


def test_busy_manager_as_text() -> None:
    assert format_status(BUSY).splitlines() == [
        "rollout_prompt_manager: step 7, weights 6, gate closed",
        "  prompts    3 pending, 4 ongoing, 1 done, 30 taken, 2 dropped = 40 admitted",
        "  in flight  [##########..........] 8 of 16",
        "  oldest     prompt u7 at w1 for 12.3 s",
        "  slots      11 of 16 taken, 2 requests parked",
        "             w0: 6 of 8, 0 requests",
        "             w1: 5 of 8, 2 requests",
        "  dropped    1 agent_loop_failed, 1 prompt_too_long; 2 failed attempts were tried again",
        "  failure    u3: ValueError: no",
    ]


def test_idle_manager_as_text() -> None:
    assert format_status(IDLE).splitlines() == [
        "rollout_prompt_manager: no step reported yet",
        "  prompts    0 pending, 0 ongoing, 0 done, 0 taken, 0 dropped = 0 admitted",
        "  in flight  [....................] 0 of 16",
        "  slots      no worker has reported; 0 trajectories claimed",
        "  dropped    none; 0 failed attempts were tried again",
    ]


def test_deferred_prompts_are_shown() -> None:
    queue = QueueStatistics(admitted=5, pending=1, ongoing=1, done=0, taken=1, deferred=2)
    status = ManagerStatus(queue=queue, capacity=16, workers={"w0": WorkerStatus(2, 8, held_trajectories=3)})
    text = format_status(status).splitlines()
    assert text[1] == "  prompts    1 pending, 1 ongoing, 2 deferred, 0 done, 1 taken, 0 dropped = 5 admitted"
    assert text[4] == "  slots      2 of 8 taken, 0 requests parked, 3 trajectories held back with their tokens"


def test_a_lost_prompt_cannot_be_overlooked() -> None:
    lost = ManagerStatus(queue=QueueStatistics(5, 1, 1, 1, 1), capacity=16, closed="run ended")
    text = format_status(lost)
    assert "NOT CONSERVED: 5 admitted" in text
    assert "(closed: run ended)" in text
    assert json.loads(status_json(lost))["queue"]["conserved"] is False


def test_json_has_every_field_and_the_sums() -> None:
    values = json.loads(status_json(BUSY))
    assert values["queue"]["in_flight"] == 8
    assert values["workers"]["w1"] == {
        "inflight_trajectories": 5,
        "slot_budget": 8,
        "requests_in_flight": 2,
        "held_trajectories": 0,
    }
    assert (values["name"], values["slots_total"], values["gate"]) == ("rollout_prompt_manager", 16, "closed")


def test_watch_draws_again_what_has_changed_until_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--why RUN` it needs no cluster; on a terminal the screen is cleared before each drawing."""
    writer = EventWriter(tmp_path / "events", "worker-0")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise KeyboardInterrupt
        writer.write(PhaseBegan(uid="late", session=0, phase="tool", response=1, row="17"))

    monkeypatch.setattr(command.time, "sleep", sleep)
    monkeypatch.setattr(command.sys.stdout, "isatty", lambda: True, raising=False)
    assert command.main(["--why", str(tmp_path), "--watch", "5"]) == 0
    first, second = capsys.readouterr().out.split(command.CLEAR_SCREEN)[1:]
    assert slept == [5.0, 5.0]
    assert first == "no trajectory is unfinished\n"
    assert "row 17, prompt late: trajectory 0, at response 1, for a tool or its agent loop" in second
    with pytest.raises(SystemExit):
        command.main(["--watch", "0"])


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "local", "127.0.0.1:99999"])
def test_no_cluster_is_one_line_and_exit_code_2(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--address", address]) == command.EXIT_NOT_FOUND
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("partial_rollout.status: ")
    assert address in errors[0]
