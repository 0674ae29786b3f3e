"""The format of the log of rollouts: frames, and the records in them. Pure.

    file  = frame, frame, ...            written at the end only, by one process
    frame = length (4 bytes), checksum (4 bytes), record (length bytes, msgpack with its kind)

The first record of a file is `Opened`. The checksum (CRC-32) is that of the record: a file that was cut off while it
was written, and one that was damaged, are read up to the first frame that is not whole, and no further.

Format rules, by `FORMAT_VERSION`: fields are only added, each with a default; a reader skips kinds that it does not
know.
"""

from __future__ import annotations

import io
import struct
import zlib
from array import array
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from partial_rollout.errors import DataError
from partial_rollout.types import ContextSpan, TrajectorySummary, VersionSpan  # noqa: TC001 - msgspec reads them

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FORMAT_VERSION = 1
HEADER = struct.Struct("<II")
"""Length and checksum of a record."""
MAX_RECORD_BYTES = 1 << 30
"""A longer record is none: its length was damaged. A trajectory of a million tokens has 9 MB."""
ID_BYTES = 4
"""Bytes of a packed token."""
TRAINER = "trainer"
"""Role of the process that writes what was admitted and what was trained."""


def prompt_of(key: str) -> str:
    """The prompt's uid of a trajectory, `{uid}_{session}`.

    >>> prompt_of("a_b_0")
    'a_b'
    """
    return key.rpartition("_")[0]


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What a frame holds."""


class Opened(Record, frozen=True, tag="opened"):
    """The first record of a file."""

    format: int
    number: int
    """Number of the start of training that wrote the file; starts count from 1 since the checkpoint."""
    role: str
    """`trainer`, or the id of an agent-loop worker."""
    base_step: int
    """The step of the checkpoint after which the records came; 0: the beginning of the run."""
    world: dict[str, str] = {}
    """In the trainer's file, the settings that the responses depend on."""
    holds_through: int = 0
    """In the trainer's file, the last step up to which records of earlier starts hold; their later ones are void."""


class Abandoned(Record, frozen=True, tag="abandoned"):
    """Training has left the history that earlier files tell; a record of the trainer's file."""

    holds_through: int
    """The last step up to which records of earlier files hold; their later ones are void."""
    admitted: int
    """How many prompts the run had admitted then: names that earlier records have of further ones are void."""


class Admitted(Record, frozen=True, tag="admitted"):
    """Prompts were admitted, in this order; a record of the trainer's file."""

    first: int
    """How many prompts the run had admitted before."""
    uids: list[str]
    prompts: list[str]
    """What the prompts ask, in a form that is the same after a restart."""


class Group(msgspec.Struct, frozen=True):
    """A member of a batch."""

    uid: str
    trajectories: list[tuple[str, int]]
    """Key of each trajectory, and the checksum of its record."""


class Taken(Record, frozen=True, tag="taken"):
    """A batch left the queue, with these groups in this order; a record of the trainer's file."""

    step: int
    groups: list[Group]


class Output(msgspec.Struct, frozen=True):
    """What an agent loop returned: most return one output a trajectory."""

    prompt_ids: bytes
    response_ids: bytes
    response_mask: bytes
    log_probs: bytes | None
    rest: bytes
    """The output's other fields, as the worker encodes them."""


class Finished(Record, frozen=True, tag="finished"):
    """A trajectory has ended, was scored, and is stored; a record of a worker's file."""

    key: str
    """`{uid}_{session}`."""
    claim_id: int
    outputs: list[Output]
    summaries: list[TrajectorySummary]
    """One for each output; without the record's own checksum."""

    @property
    def uid(self) -> str:
        """The prompt's uid."""
        return prompt_of(self.key)

    @property
    def num_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(summary.response_len for summary in self.summaries)


class Call(msgspec.Struct, frozen=True):
    """What a record adds to a generate call of an unfinished trajectory; core/unfinished.py writes and joins it."""

    number: int
    """The call's place among the trajectory's calls, from 0."""
    num_shared: int
    """Leading tokens of the prompt that the call before has; of a call that no record has had yet, as `prompt_ids`."""
    prompt_ids: bytes
    """The other tokens of the prompt."""
    token_ids: bytes
    """Tokens since the record before."""
    log_probs: bytes | None
    """Log-probs of `token_ids`."""
    spans: list[VersionSpan]
    """Versions of all tokens so far; what follows is of all tokens too."""
    context_spans: list[ContextSpan]
    stop_reason: str | None
    num_interruptions: int
    num_reprefilled_tokens: int
    settings: str = ""


class Interrupted(Record, frozen=True, tag="interrupted"):
    """A trajectory was interrupted: what it has more than in the record before; a record of a worker's file."""

    key: str
    """`{uid}_{session}`."""
    claim_id: int
    after: int
    """Checksum of the trajectory's record before in this file; 0: this one is the first, and has all."""
    calls: list[Call]

    @property
    def newest_version(self) -> int:
        """Newest weights that sampled a token of these calls."""
        return max((span.version for call in self.calls for span in call.spans), default=0)

    @property
    def num_tokens(self) -> int:
        """Tokens that the record adds."""
        return sum(len(call.token_ids) for call in self.calls) // ID_BYTES


class GivenUp(Record, frozen=True, tag="given_up"):
    """Trajectories that were not trained are void: their attempt has failed or was lost. Of a worker's file."""

    uid: str
    claim_id: int
    """The last claim of the prompt whose trajectories are void; those of earlier claims are void too."""


AnyRecord = Opened | Abandoned | Admitted | Taken | Finished | Interrupted | GivenUp
KINDS: frozenset[str] = frozenset(str(kind.__struct_config__.tag) for kind in AnyRecord.__args__)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyRecord)


class _Kind(msgspec.Struct):
    kind: str


_KIND = msgspec.msgpack.Decoder(_Kind)


class End(Enum):
    """How a file ends."""

    WHOLE = "whole"
    TORN = "torn"
    """The last frame is not all there: the process died while it wrote."""
    DAMAGED = "damaged"
    """A frame is not what was written; what follows is not read."""


def encode(record: AnyRecord) -> bytes:
    """The record's bytes, without its frame."""
    return _ENCODER.encode(record)


def frame(payload: bytes) -> bytes:
    """The frame around a record's bytes.

    >>> frame(b"abc")
    b'\\x03\\x00\\x00\\x00\\xc2A$5abc'
    """
    return HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def checksum(payload: bytes) -> int:
    """What tells a record from others of the same trajectory; never 0, which says that there is no record."""
    return zlib.crc32(payload) or 1


class FrameReader:
    """The frames of a file, one after the other; `end` says afterwards how the file ends.

    >>> reader = FrameReader(io.BytesIO(frame(b"one") + frame(b"two")[:-1]))
    >>> [payload for _, payload in reader], reader.end
    ([b'one'], <End.TORN: 'torn'>)
    """

    def __init__(self, file: BinaryIO) -> None:
        """`file` is read from where it stands."""
        self._file = file
        self.end = End.WHOLE

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Pairs: where the frame begins, relative to the first one, and the bytes of its record."""
        offset = 0
        while header := self._file.read(HEADER.size):
            if len(header) < HEADER.size:
                self.end = End.TORN
                return
            length, expected = HEADER.unpack(header)
            if length > MAX_RECORD_BYTES:
                self.end = End.DAMAGED
                return
            payload = self._file.read(length)
            if len(payload) < length:
                self.end = End.TORN
                return
            if zlib.crc32(payload) != expected:
                self.end = End.DAMAGED
                return
            yield offset, payload
            offset += HEADER.size + length


def decode(payload: bytes) -> AnyRecord | None:
    """A record; None if it is of a kind that a later release has added.

    Raises:
        DataError: it is no record.
    """
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            if _KIND.decode(payload).kind not in KINDS:
                return None
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        raise DataError(f"a record of the log of rollouts cannot be read: {error}") from error


def read_finished(framed: bytes, key: str, expected: int) -> Finished:
    """The record of a trajectory from the bytes of its frame.

    Raises:
        DataError: it is another one, or not whole.
    """
    reader = FrameReader(io.BytesIO(framed))
    payload = next((payload for _, payload in reader), b"")
    record = decode(payload) if checksum(payload) == expected else None
    if not isinstance(record, Finished) or record.key != key:
        raise DataError(f"the record of trajectory {key} in the log of rollouts is {reader.end.value}, or not its own")
    return record


def read_interrupted(framed: Sequence[bytes], key: str, expected: Sequence[int]) -> list[Interrupted]:
    """The records of a trajectory that has not ended, from the bytes of their frames in their order.

    Raises:
        DataError: one of them is another one, or not whole, or they do not follow each other.
    """
    found: list[Interrupted] = []
    last = claim_id = 0
    for content, check in zip(framed, expected, strict=True):
        payload = next((payload for _, payload in FrameReader(io.BytesIO(content))), b"")
        record = decode(payload) if checksum(payload) == check else None
        if not isinstance(record, Interrupted) or (record.key, record.after) != (key, last):
            raise DataError(f"record {len(found) + 1} of unfinished trajectory {key} is not whole, or not its own")
        if found and record.claim_id != claim_id:
            raise DataError(f"unfinished trajectory {key} has records of claims {claim_id} and {record.claim_id}")
        found.append(record)
        last, claim_id = check, record.claim_id
    return found


def stamped(summaries: Sequence[TrajectorySummary], payload: bytes) -> list[TrajectorySummary]:
    """The summaries of a record with its checksum."""
    return [replace(summary, log_checksum=checksum(payload)) for summary in summaries]


def pack_ids(ids: Sequence[int]) -> bytes:
    """Tokens in 4 bytes each.

    >>> unpack_ids(pack_ids([0, 151_643]))
    [0, 151643]
    """
    return array("i", ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """What `pack_ids` was given."""
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()


def pack_mask(mask: Sequence[int]) -> bytes:
    """Numbers from 0 to 255 in a byte each."""
    return array("B", mask).tobytes()


def unpack_mask(packed: bytes) -> list[int]:
    """What `pack_mask` was given."""
    return list(packed)


def pack_log_probs(values: Sequence[float]) -> bytes:
    """In 4 bytes each, as they are trained."""
    return array("f", values).tobytes()


def unpack_log_probs(packed: bytes) -> list[float]:
    """What `pack_log_probs` was given, rounded to 4 bytes."""
    values = array("f")
    values.frombytes(packed)
    return values.tolist()
