"""Lets torchvision's wheel of PyPI load beside the CPU's torch; Python imports this by its name from PYTHONPATH.

The wheel's own library needs CUDA's and does not load. Then torchvision says what shape the results of its operators
have, and torch refuses that for operators that nobody has declared. Nothing here calls one of them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

OPERATORS = (
    *("nms", "qnms", "roi_align", "qroi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward"),
    *("ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward"),
    *("deform_conv2d", "_deform_conv2d_backward"),
)


class DeclareFirst:
    """A finder that finds nothing, and declares the operators when torchvision is first looked for."""

    library: object = None
    """Declarations end with it."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called for each import."""
        if name == "torchvision" and cls.library is None:
            import torch

            library = cls.library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                library.define(f"{operator}(Tensor a) -> Tensor")
        return None


sys.meta_path.insert(0, DeclareFirst)
