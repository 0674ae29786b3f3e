"""The prompt manager's status as text for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from partial_rollout.types import MANAGER_NAME

if TYPE_CHECKING:
    from partial_rollout.types import ManagerStatus, QueueStatistics

LABEL_WIDTH = 10
BAR_WIDTH = 20


def format_status(status: ManagerStatus) -> str:
    """Several lines: the prompts by state, the slots, the gate and the prompt that has been in generation longest."""
    queue = status.queue
    lines = [_headline(status), _row("prompts", _prompts(queue)), _row("in flight", _in_flight(status))]
    if queue.ongoing:
        lines.append(_row("oldest", _oldest(queue)))
    lines.append(_row("slots", _slots(status)))
    lines += [
        _row(
            "",
            f"{worker}: {_of(report.inflight_trajectories, report.slot_budget)}, {report.requests_in_flight} requests",
        )
        for worker, report in sorted(status.workers.items())
    ]
    lines.append(_row("dropped", _dropped(queue)))
    if status.last_failure:
        lines.append(_row("failure", status.last_failure))
    return "\n".join(lines)


def status_json(status: ManagerStatus) -> str:
    """One line of JSON: every field of the status, and the sums that the text shows."""
    values = dataclasses.asdict(status)
    values["queue"] |= {"in_flight": status.queue.in_flight, "conserved": status.queue.conserved}
    sums = {key: getattr(status, key) for key in ("slots_in_use", "slots_total", "parked_requests")}
    return json.dumps({"name": MANAGER_NAME, **values, **sums})


def _headline(status: ManagerStatus) -> str:
    if status.step < 0:
        where = "no step reported yet"
    else:
        where = f"step {status.step}, weights {status.weight_version}, gate {status.gate}"
    return f"{MANAGER_NAME}: {where}" + (f" (closed: {status.closed})" if status.closed else "")


def _prompts(queue: QueueStatistics) -> str:
    held = f"{queue.deferred} deferred, " if queue.deferred else ""
    text = f"{queue.pending} pending, {queue.ongoing} ongoing, {held}{queue.done} done, {queue.taken} taken"
    total = f"{queue.admitted} admitted"
    return f"{text}, {queue.num_dropped} dropped = {total}" if queue.conserved else f"{text}, NOT CONSERVED: {total}"


def _in_flight(status: ManagerStatus) -> str:
    used = status.queue.in_flight
    filled = round(BAR_WIDTH * min(1.0, used / status.capacity))
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {_of(used, status.capacity)}"


def _oldest(queue: QueueStatistics) -> str:
    return f"prompt {queue.oldest_ongoing_uid} at {queue.oldest_ongoing_worker} for {queue.oldest_ongoing_s:.1f} s"


def _slots(status: ManagerStatus) -> str:
    if not status.workers:
        return f"no worker has reported; {status.queue.claimed_trajectories} trajectories claimed"
    held = sum(worker.held_trajectories for worker in status.workers.values())
    text = f"{_of(status.slots_in_use, status.slots_total)} taken, {status.parked_requests} requests parked"
    return f"{text}, {held} trajectories held back with their tokens" if held else text


def _dropped(queue: QueueStatistics) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(queue.dropped.items()))
    restarted = f", {queue.restarted} with too old tokens" if queue.restarted else ""
    return f"{reasons or 'none'}; {queue.failed_attempts} failed attempts were tried again{restarted}"


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole}"


def _row(label: str, text: str) -> str:
    return f"  {label:<{LABEL_WIDTH}} {text}"
