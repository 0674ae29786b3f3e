"""How one server carries out its interrupt mode: cache salts, engine settings, and what it tells the client."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from partial_rollout.core.interrupt import FRESH, Context, Retained, context_of, mode_of
from partial_rollout.core.resume import ABORTED
from partial_rollout.weights.directory import SHARED_MEMORY

if TYPE_CHECKING:
    from verl.workers.rollout.replica import TokenOutput

    from partial_rollout.rollout.gated_engine import Passage
    from partial_rollout.settings.block import PartialRolloutConfig

EVERY_TOKEN = 1
"""Stream interval for modes whose requests stay: vLLM hands over tokens between two intervals only when one leaves."""


class Interruption:
    """The interrupt mode of one server."""

    def __init__(self, settings: PartialRolloutConfig) -> None:
        """Take the mode from the settings."""
        self.mode = mode_of(settings.tail)
        self._offload_bytes = (settings.tail.offload_gib or 0) << 30
        self._stream_interval = settings.stream_interval
        self._engine = uuid.uuid4().hex

    def cache_salt(self, retained: Retained | None, openings: int, version: int) -> str | None:
        """Salt of a request's blocks, which are found by requests with the same one only.

        A fresh request shares its prompt's blocks with the others that entered after the same opening of the gate with
        the same weight version. A resumed request keeps the salt of its first segment, which no fresh request has any
        more. So no request finds a block that is older than its own first one.
        """
        if not self.mode.retains_kv:
            return None
        return retained.cache_salt if retained is not None else f"{self._engine}-{openings}-{version}"

    def engine_arguments(self, given: dict[str, Any]) -> None:
        """Add the arguments that the mode needs to an engine's arguments, in place."""
        given.setdefault("stream_interval", EVERY_TOKEN if self.mode.stays else self._stream_interval)
        if self.mode.releases_memory:
            given["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "engine_id": self._engine,
                # vLLM's default offloads prompts only: the KV of an interrupted response would be lost.
                "kv_connector_extra_config": {"cpu_bytes_to_use": self._offload_bytes, "offload_prompt_only": False},
            }

    def unlink_host_memory(self) -> None:
        """Unlink the file that maps a running engine's host memory (vLLM 0.28).

        The memory is freed when the engine's processes end, however they end; a relaunched engine makes a new file.
        """
        for path in SHARED_MEMORY.glob(f"vllm_offload_{self._engine}*.mmap"):
            path.unlink(missing_ok=True)

    def nothing(self, version: int) -> dict[str, Any]:
        """Fields of an output for which no engine was asked."""
        return {"context": Context(version, FRESH), "retained": None}

    def fields(self, passage: Passage, output: TokenOutput, *, version: int, context_len: int) -> dict[str, Any]:
        """Fields of a segment: how its context was computed, and what the segment leaves behind if it was interrupted.

        `context_len` is 0 for a first segment.
        """
        context = context_of(
            self.mode,
            version,
            retained=passage.retained,
            went_on=passage.went_on,
            context_len=context_len,
            num_cached_tokens=output.extra_fields.get("num_cached_tokens") or 0,
        )
        retained = self._retained(passage, output, version) if output.stop_reason == ABORTED else None
        return {"context": context, "retained": retained}

    def _retained(self, passage: Passage, output: TokenOutput, version: int) -> Retained | None:
        before = passage.retained
        if before is None and not output.token_ids:
            return None  # only a prompt, which new weights should compute again
        if passage.kept_id is None and passage.cache_salt is None:
            return None
        return Retained(passage.cache_salt, before.kv_version if before else version, passage.kept_id)
