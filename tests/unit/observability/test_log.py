"""Our messages are seen whatever the root logger drops."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from partial_rollout.observability.log import NAME, configure_logging

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Loggers as they were."""
    own, root = logging.getLogger(NAME), logging.getLogger()
    before = own.handlers, own.propagate, own.level, root.level
    yield
    own.handlers, own.propagate = before[0], before[1]
    own.setLevel(before[2])
    root.setLevel(before[3])


def test_a_message_is_written_once_whatever_the_root_logger_drops(capsys: pytest.CaptureFixture[str]):
    logging.getLogger().setLevel(logging.ERROR)
    configure_logging()
    configure_logging()
    logging.getLogger(f"{NAME}.train.packing").info("rows are %s", "packed")
    assert capsys.readouterr().err.count("rows are packed") == 1
