"""The prompt manager's status as Ray metrics, for the Ray dashboard and whatever reads Ray's Prometheus port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.util.metrics import Counter, Gauge

if TYPE_CHECKING:
    from partial_rollout.types import ManagerStatus

PREFIX = "partial_rollout"


class ManagerMetrics:
    """Gauges and counters of one prompt manager. Made in its process, to which Ray metrics belong."""

    def __init__(self) -> None:
        self._prompts = Gauge(f"{PREFIX}_prompts", "Prompts in the queue, by state.", ("state",))
        self._dropped = Gauge(f"{PREFIX}_dropped_prompts", "Prompts dropped in this run, by reason.", ("reason",))
        self._slots = Gauge(f"{PREFIX}_slots", "Trajectory slots over all workers: in use and total.", ("kind",))
        self._parked = Gauge(f"{PREFIX}_parked_requests", "Requests that wait at a closed gate.")
        self._oldest = Gauge(f"{PREFIX}_oldest_ongoing_seconds", "Seconds since the oldest claim that is not finished.")
        self._admitted = Counter(f"{PREFIX}_admitted_prompts", "Prompts admitted, restored ones included.")
        self._taken = Counter(f"{PREFIX}_taken_prompts", "Prompts taken for training, restored ones included.")
        self._num_admitted = self._num_taken = 0

    def update(self, status: ManagerStatus) -> None:
        """Set every gauge to `status`, and advance the counters to it."""
        queue = status.queue
        for state in ("pending", "ongoing", "deferred", "done", "taken"):
            self._prompts.set(getattr(queue, state), {"state": state})
        for reason, count in queue.dropped.items():
            self._dropped.set(count, {"reason": reason})
        self._slots.set(status.slots_in_use, {"kind": "in_use"})
        self._slots.set(status.slots_total, {"kind": "total"})
        self._parked.set(status.parked_requests)
        self._oldest.set(queue.oldest_ongoing_s)
        self._num_admitted = _advance(self._admitted, self._num_admitted, queue.admitted)
        self._num_taken = _advance(self._taken, self._num_taken, queue.taken)


def _advance(counter: Counter, old: int, new: int) -> int:
    if new > old:
        counter.inc(new - old)
    return max(old, new)
