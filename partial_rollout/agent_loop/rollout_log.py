"""A worker's part of the log of rollouts: it writes down what its trajectories return, and replays what was written.

A replayed trajectory is what the agent loop had returned, with its score: verl stores it as any other, and asks neither
engine nor reward for it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from pydantic import BaseModel

from partial_rollout.agent_loop.log_reading import read_frames
from partial_rollout.core.rollout_log import (
    FORMAT_VERSION,
    Finished,
    GivenUp,
    Opened,
    Output,
    encode,
    pack_ids,
    pack_log_probs,
    pack_mask,
    read_finished,
    stamped,
    unpack_ids,
    unpack_log_probs,
    unpack_mask,
)
from partial_rollout.core.unfinished import Written
from partial_rollout.errors import DataError
from partial_rollout.runtime.log_writer import LogWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from partial_rollout.agent_loop.log_reading import Left
    from partial_rollout.agent_loop.trajectory import Trajectory
    from partial_rollout.core.replay import Place
    from partial_rollout.types import TrajectorySummary

logger = logging.getLogger(__name__)

SCALAR, ARRAY = 1, 2
"""Codes of numpy's values in msgpack: their type, and their bytes."""
TOKENS = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
"""Fields of verl's output that a record has apart from its others."""
UNLOGGED = ("multi_modal_data", "routed_experts", "mm_processor_output")
"""Fields that are too large for a log: a trajectory that has one of them is not in it."""

UNREADABLE = (OSError, DataError, msgspec.DecodeError, asyncio.TimeoutError)
"""What the reading of a record may raise: then its tokens are generated again."""


class LogFolder(NamedTuple):
    """Where the processes of a run write the log."""

    path: str
    """The folder of the records since a checkpoint."""
    number: int
    """Number of the start of training."""
    base_step: int
    """The step of the checkpoint."""

    def file(self, role: str) -> Path:
        """The file of a process."""
        return Path(self.path) / f"{self.number:04d}-{role}.log"

    def opened(self, role: str, **of_trainer: Any) -> bytes:
        """The first record of a file."""
        return encode(
            Opened(format=FORMAT_VERSION, number=self.number, role=role, base_step=self.base_step, **of_trainer)
        )


class Replayed(NamedTuple):
    """A trajectory of the log."""

    outputs: list[dict[str, Any]]
    """The fields of verl's outputs."""
    summaries: list[TrajectorySummary]
    payload: bytes
    """The trajectory's record."""


class WorkerLog:
    """Writes the finished trajectories of one worker, and reads those of earlier starts that are to be replayed."""

    def __init__(self, worker_id: str, read_s: float) -> None:
        """`read_s`: a record that the disk does not give in this time is not used."""
        self._worker_id, self._read_s = worker_id, read_s
        self._writer = LogWriter(worker_id)
        self._places: dict[str, Place] = {}
        self._written: WeakKeyDictionary[Trajectory, Written] = WeakKeyDictionary()
        """What the file has of trajectories that have not ended."""
        self._warned = False

    def begin(self, folder: LogFolder, unfinished: Iterable[bytes]) -> None:
        """Write into this folder from now on; first the records of trajectories whose groups have not ended.

        Of a trajectory that has not ended the new file has nothing, until `write_interrupted`.
        """
        self._written.clear()
        self._writer.open(folder.file(self._worker_id))
        self._writer.append(folder.opened(self._worker_id))
        for payload in unfinished:
            self._writer.append(payload)

    def close(self, timeout_s: float) -> None:
        """Put all on the disk."""
        self._writer.close(timeout_s)

    def replay(self, places: Mapping[str, Place]) -> None:
        """Replay these trajectories when they are claimed, and no others."""
        self._places = dict(places)

    def take_over(self, left: Left) -> None:
        """Replay what a dead worker had ended, and nothing older of its prompts."""
        self._places = left.newest(self._places, left.places)

    def write(
        self, trajectory: Trajectory, outputs: Sequence[Any], found: Sequence[TrajectorySummary]
    ) -> list[TrajectorySummary]:
        """Write a trajectory that has ended; returns its summaries, which say of which record they are."""
        if not self._writer.is_on:
            return list(found)
        try:
            payload = encode_finished(trajectory, outputs, found)
        except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
            self._warn(f"a trajectory of {trajectory.claim.prompt_name} is not in the log of rollouts: {error}")
            return list(found)
        return self._append(trajectory, payload, found)

    def write_again(self, trajectory: Trajectory, replayed: Replayed) -> list[TrajectorySummary]:
        """Write a replayed trajectory into the log of this start."""
        return self._append(trajectory, replayed.payload, replayed.summaries)

    def write_interrupted(self, trajectory: Trajectory, *, between_calls: bool = False) -> None:
        """Write what an unfinished trajectory has, if an interruption has brought tokens that the file lacks.

        `between_calls`: also if none of its generate calls is unfinished.
        """
        # While saved calls are ahead, the record that has them is the better one.
        if not self._writer.is_on or trajectory.num_ahead:
            return
        written = self._written.setdefault(trajectory, Written())
        try:
            payload = written.more(
                trajectory.key, trajectory.claim.claim_id, trajectory.generations, between_calls=between_calls
            )
        except (TypeError, ValueError, OverflowError) as error:
            self._warn(f"tokens of {trajectory.claim.prompt_name} are not in the log of rollouts: {error}")
            return
        if payload is not None:
            self._writer.append(payload)

    def give_up(self, uid: str, claim_id: int) -> None:
        """Nothing goes on from the unfinished trajectories of the prompt's claims up to this one."""
        self._writer.append(encode(GivenUp(uid=uid, claim_id=claim_id)))

    async def read(self, trajectory: Trajectory) -> Replayed | None:
        """The trajectory as an earlier start has logged it; None if it is to be generated."""
        place = self._places.pop(trajectory.key, None)
        # A further attempt replays nothing: what the first one returned was refused.
        if place is None or not trajectory.may_go_on:
            return None
        try:
            (framed,) = await asyncio.wait_for(asyncio.to_thread(read_frames, [place]), self._read_s)
            record = read_finished(framed, trajectory.key, place.checksum)
            return Replayed([decode_output(each) for each in record.outputs], record.summaries, framed[8:])
        except UNREADABLE as error:
            self._warn_of_unread(trajectory, place, error)
            return None

    def _warn_of_unread(self, trajectory: Trajectory, place: Place, error: Exception) -> None:
        why = str(error)
        if isinstance(error, asyncio.TimeoutError):
            why = f"the disk has not answered for {self._read_s:g} s; nor are the others read"
            self._places.clear()
        name = trajectory.claim.prompt_name
        self._warn(f"{name} is generated again, its record in {place.path} cannot be read: {why}")

    def _append(
        self, trajectory: Trajectory, payload: bytes, found: Sequence[TrajectorySummary]
    ) -> list[TrajectorySummary]:
        self._writer.append(payload)
        trajectory.record_bytes = payload
        return stamped(found, payload)

    def _warn(self, text: str) -> None:
        """The first time as a warning."""
        logger.log(logging.INFO if self._warned else logging.WARNING, "%s", text)
        self._warned = True


def encode_finished(trajectory: Trajectory, outputs: Sequence[Any], found: Sequence[TrajectorySummary]) -> bytes:
    """The record of a trajectory.

    Raises:
        NotImplementedError, TypeError, ValueError, OverflowError: a value of an output that no record can hold.
    """
    return encode(
        Finished(
            key=trajectory.key,
            claim_id=trajectory.claim.claim_id,
            outputs=[_encode_output(output) for output in outputs],
            summaries=list(found),
        )
    )


def decode_output(output: Output) -> dict[str, Any]:
    """The fields of verl's output."""
    fields: dict[str, Any] = _DECODER.decode(output.rest)
    fields["prompt_ids"], fields["response_ids"] = unpack_ids(output.prompt_ids), unpack_ids(output.response_ids)
    fields["response_mask"] = unpack_mask(output.response_mask)
    if output.log_probs is not None:
        fields["response_logprobs"] = unpack_log_probs(output.log_probs)
    return fields


def _encode_output(output: Any) -> Output:
    large = [name for name in UNLOGGED if getattr(output, name, None)]
    if large:
        raise NotImplementedError(f"it has {', '.join(large)}")
    # verl stores the fields that somebody has set, and no defaults.
    names = output.model_fields_set - {*TOKENS, *UNLOGGED}
    rest = {name: getattr(output, name) for name in sorted(names)}
    log_probs = output.response_logprobs
    return Output(
        prompt_ids=pack_ids(output.prompt_ids),
        response_ids=pack_ids(output.response_ids),
        response_mask=pack_mask(output.response_mask),
        log_probs=None if log_probs is None else pack_log_probs(log_probs),
        rest=_ENCODER.encode(rest),
    )


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        shape = [str(value.dtype), list(value.shape), value.tobytes()]
        return msgspec.msgpack.Ext(ARRAY, _ENCODER.encode(shape))
    if isinstance(value, np.generic):
        return msgspec.msgpack.Ext(SCALAR, _ENCODER.encode([str(value.dtype), value.tobytes()]))
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    raise NotImplementedError(f"it has a {type(value).__name__}")


def _from_plain(code: int, data: memoryview) -> Any:
    if code == SCALAR:
        kind, content = _DECODER.decode(data)
        return np.frombuffer(content, dtype=kind)[0]
    if code == ARRAY:
        kind, shape, content = _DECODER.decode(data)
        return np.frombuffer(bytearray(content), dtype=kind).reshape(shape)
    raise DataError(f"the log of rollouts has a value of unknown kind {code}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_DECODER = msgspec.msgpack.Decoder(ext_hook=_from_plain)
