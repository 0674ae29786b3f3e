"""TransferQueue as the trainer sees it: tags by key in partitions, and a list of what was cleared."""

from __future__ import annotations

from typing import Any


class FakeTransferQueue:
    def __init__(self, **partitions: dict[str, dict[str, Any]]) -> None:
        self.partitions = partitions
        self.cleared: list[tuple[str, list[str]]] = []

    def kv_list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        return {partition_id: self.partitions[partition_id]} if partition_id in self.partitions else {}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        self.cleared.append((partition_id, list(keys)))
        for key in keys:
            self.partitions.get(partition_id, {}).pop(key, None)
