"""The name by which a worker's weight channel is known at both of its ends."""

from __future__ import annotations


def channel_name(rank: int) -> str:
    """Name of the weight channel to one worker of a server."""
    return f"diffusion worker {rank}"
