"""Reads files of the log of rollouts: records with their places, and the tokens of trajectories that have not ended."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from partial_rollout.core.replay import History, Place
from partial_rollout.core.rollout_log import (
    HEADER,
    End,
    Finished,
    FrameReader,
    Interrupted,
    checksum,
    decode,
    prompt_of,
    read_interrupted,
)
from partial_rollout.core.saved_calls import unfold
from partial_rollout.core.unfinished import join
from partial_rollout.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from partial_rollout.agent_loop.trajectory import Saved
    from partial_rollout.core.rollout_log import AnyRecord
    from partial_rollout.types import Claim

logger = logging.getLogger(__name__)
T = TypeVar("T")

ANY_VERSION = sys.maxsize
"""Later than any version of the weights."""


class Left(NamedTuple):
    """What the log has of the prompts of a dead worker."""

    uids: frozenset[str]
    """All of its prompts, also those of which the log has nothing."""
    places: dict[str, Place]
    """Records of trajectories that have ended."""
    tokens: Saved
    """Tokens of the others."""

    def newest(self, known: Mapping[str, T], found: Mapping[str, T]) -> dict[str, T]:
        """What is `known` of other prompts, and `found`: nothing older of this worker's prompts counts any more."""
        return {key: each for key, each in known.items() if prompt_of(key) not in self.uids} | dict(found)

    @property
    def going_on(self) -> list[str]:
        """Prompts of which there is something."""
        return sorted({prompt_of(key) for key in (*self.places, *self.tokens)})


def read_frames(places: Sequence[Place]) -> list[bytes]:
    """The frames at places of one file. Raises OSError."""
    with Path(places[0].path).open("rb") as file:
        return [os.pread(file.fileno(), place.num_bytes, place.offset) for place in places]


def read_left(paths: Sequence[Path], claims: Sequence[Claim]) -> Left:
    """What a worker that has died had written under its last claims; `paths` are its files, the oldest first.

    A file that is not there has nothing: a checkpoint that is whole removes the one before. A trajectory that was
    replayed is in the file as an earlier start of training had written it, with the claim of that start. So it is not
    found, and is generated again.

    Raises:
        OSError: the disk does not say whether a file is there.
    """
    history, last = History(), {claim.uid: claim.claim_id for claim in claims}
    for number, path in enumerate(paths, 1):
        for place, record in read_records(path) if path.exists() else ():
            if isinstance(record, Finished | Interrupted) and last.get(prompt_of(record.key)) == record.claim_id:
                history.tell_of_worker(record, number, place)
    plan = history.plan(ANY_VERSION, first=0, unfinished=last.keys(), done=())
    return Left(frozenset(last), plan.places, read_tokens(plan.unfinished))


def read_records(path: Path) -> Iterator[tuple[Place, AnyRecord]]:
    """The records of a file up to the first that is not whole."""
    try:
        with path.open("rb") as file:
            reader = FrameReader(file)
            for offset, payload in reader:
                record = decode(payload)
                if record is not None:
                    yield Place(str(path), offset, HEADER.size + len(payload), checksum(payload)), record
        if reader.end is End.DAMAGED:
            logger.warning("%s is damaged: what follows in it is not used", path)
    except (OSError, DataError) as error:
        logger.warning("%s cannot be read on: what follows in it is not used (%s)", path, error)


def read_tokens(unfinished: Mapping[str, Sequence[Place]]) -> Saved:
    """The generate calls of unfinished trajectories from their records, folded as a checkpoint has them.

    One that cannot be read is left out, and the first of these is warned of.
    """
    found: Saved = {}
    unread: list[str] = []
    for key, places in unfinished.items():
        try:
            calls = join(read_interrupted(read_frames(places), key, [place.checksum for place in places]))
            unfold(calls)  # raises if they do not follow each other
            found[key] = calls
        except (OSError, DataError, msgspec.DecodeError) as error:
            unread.append(f"trajectory {key} in {places[0].path}: {error}")
    if unread:
        said = (
            "the tokens that the log has of %d unfinished responses cannot be read, and are generated again; first: %s"
        )
        logger.warning(said, len(unread), unread[0])
    return found
