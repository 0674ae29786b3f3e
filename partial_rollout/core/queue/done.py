"""Finished groups that wait to be trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partial_rollout.core.queue.lifecycle import Event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from partial_rollout.core.queue.lifecycle import Entry
    from partial_rollout.core.queue.staleness import StalenessBound
    from partial_rollout.types import FinishedGroup


class DoneGroups:
    """Groups in the order in which they are trained, and apart from them those past the staleness bound.

    add -> waiting -> take
                   -> expired (by `add` or `expire`) -> hand_over -> discard, once their rows are gone

    Nothing expires unless the bound discards groups.
    """

    def __init__(self, bound: StalenessBound) -> None:
        self._bound = bound
        self._oldest_allowed = 0
        self._waiting: dict[str, tuple[Entry, FinishedGroup]] = {}
        self._expired: dict[str, tuple[Entry, FinishedGroup]] = {}
        self._handed_over: dict[str, Entry] = {}

    def __len__(self) -> int:
        """Groups that may be trained."""
        return len(self._waiting)

    @property
    def num_expired(self) -> int:
        """Groups that may not, and are still done."""
        return len(self._expired) + len(self._handed_over)

    def in_order(self) -> Iterator[str]:
        """Uids, oldest finished first; under a staleness bound those with the oldest tokens first."""
        if self._bound.max_staleness is None:
            return iter(self._waiting)
        return iter(sorted(self._waiting, key=lambda uid: self._waiting[uid][1].min_version))

    def groups(self) -> tuple[FinishedGroup, ...]:
        """All but those handed over, oldest finished first."""
        return tuple(group for groups in (self._expired, self._waiting) for _, group in groups.values())

    def add(self, entry: Entry, group: FinishedGroup) -> bool:
        """A prompt has finished; returns whether it may be trained."""
        expired = self._bound.discards and group.min_version < self._oldest_allowed
        (self._expired if expired else self._waiting)[group.uid] = entry, group
        return not expired

    def take(self, uid: str) -> FinishedGroup:
        """The group is trained."""
        entry, group = self._waiting.pop(uid)
        entry.move(Event.TAKE)
        return group

    def expire(self, trained_version: int) -> None:
        """Put apart what is too old for an update of `trained_version`, and for any later one."""
        self._oldest_allowed = max(self._oldest_allowed, self._bound.oldest(trained_version))
        waiting, self._waiting = self._waiting, {}
        for entry, group in waiting.values():
            self.add(entry, group)

    def hand_over(self) -> tuple[FinishedGroup, ...]:
        """Expired groups, each once, so that their rows are cleared."""
        groups = tuple(group for _, group in self._expired.values())
        self._handed_over |= {uid: entry for uid, (entry, _) in self._expired.items()}
        self._expired = {}
        return groups

    def discard(self) -> list[Entry]:
        """Forget the groups that were handed over."""
        entries, self._handed_over = list(self._handed_over.values()), {}
        return entries
