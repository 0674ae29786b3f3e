"""This package's log messages in a process in which other packages have set up the root logger."""

from __future__ import annotations

import logging
import sys

NAME = "partial_rollout"
FORMAT = "%(levelname)s:%(asctime)s:%(message)s"
"""verl's format."""


def configure_logging() -> None:
    """Write this package's messages of level INFO and above to stderr; a second call changes nothing.

    Importing verl's trainer in a Ray worker leaves a root logger that drops everything below ERROR.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    own = logging.getLogger(NAME)
    own.handlers, own.propagate = [handler], False
    own.setLevel(logging.INFO)
