"""Images as one PNG."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

GAP = 2
"""Pixels between images."""


def save_grid(images: Sequence[np.ndarray[Any, Any]], path: Path) -> None:
    """Write images [H, W, 3] of one size, uint8, row by row as a grid that is about square."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    height, width = images[0].shape[:2]
    canvas = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), 255, dtype=np.uint8)
    for index, image in enumerate(images):
        top, left = (index // columns) * (height + GAP), (index % columns) * (width + GAP)
        canvas[top : top + height, left : left + width] = image
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(canvas).save(path)
