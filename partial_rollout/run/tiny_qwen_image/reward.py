"""Rewards that need no model: what a picture looks like on average."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


def brightness(images: Sequence[np.ndarray[Any, Any]], prompts: Sequence[str]) -> list[float]:
    """Mean of all pixels, 0 (black) to 1 (white)."""
    return [float(image.mean()) / 255 for image in images]


def redness(images: Sequence[np.ndarray[Any, Any]], prompts: Sequence[str]) -> list[float]:
    """How much redder than green and blue a picture is, -1 to 1."""
    means = [image.reshape(-1, 3).mean(axis=0) / 255 for image in images]
    return [float(red - (green + blue) / 2) for red, green, blue in means]


def warm_left(images: Sequence[np.ndarray[Any, Any]], prompts: Sequence[str]) -> list[float]:
    """How much redder than blue the left half is, and bluer than red the right half, -2 to 2."""
    found = []
    for image in images:
        middle = image.shape[1] // 2
        left, right = image[:, :middle].mean(axis=(0, 1)), image[:, middle:].mean(axis=(0, 1))
        found.append(float((left[0] - left[2]) + (right[2] - right[0])) / 255)
    return found
