"""Pictures are drawn from whatever a run has stored, whole or cut off."""

from __future__ import annotations

import pytest

from benchmarks.gpu.plots import draw
from benchmarks.gpu.summary import by_trace
from tests.unit.benchmarks.support import block, sample, step


def result(*, modes: tuple[str, ...], cells: list[dict]) -> dict:
    samples = [sample(second, 4 - second % 3, 50 * second) for second in range(20)]
    blocks = [block(mode, step(4, 100), step(5, 100), samples=samples) for mode in modes]
    about = {"engine": {"shape": "tiny"}, "devices": []}
    return {**about, "blocks": blocks, "summary": by_trace(blocks), "curve": {"cell": cells}}


@pytest.mark.parametrize(
    ("modes", "cells", "kinds"),
    [
        (("sync", "partial_abort", "uninterrupted"), [{"concurrency": 8, "context": 96, "decode_ms": 2.0}], 4),
        (("partial_abort",), [], 3),
        ((), [{"concurrency": 8, "context": 96, "decode_ms": 2.0}], 1),
    ],
)
def test_pictures(tmp_path, modes, cells, kinds):
    paths = draw(result(modes=modes, cells=cells), tmp_path, "x")
    assert len(paths) == kinds
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
