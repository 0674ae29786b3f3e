"""A module whose import names a class of Ray's, as the imports of verl do."""

from __future__ import annotations

import ray


@ray.remote
class Actor:
    """Not created by anyone."""
