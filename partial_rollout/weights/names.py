"""Dotted names of parameters and modules, compared across layers and across what models rename."""

from __future__ import annotations


def from_first_number(name: str) -> str:
    """The part that starts with a number, since models may rename what comes before; all of it if none does."""
    words = name.split(".")
    first = next((index for index, word in enumerate(words) if word.isdigit()), 0)
    return ".".join(words[first:])


def any_layer(name: str) -> str:
    """The name with its numbers left open, which is the same in every layer."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))
