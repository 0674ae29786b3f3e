"""Which cells of a latency curve an engine can run, and that the curve of a user's own model can be stored."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from partial_rollout.advise.measure import (
    CELLS,
    CONTEXT,
    DECODED,
    LEAST_CONTEXT,
    LEAST_SLOTS,
    SLOTS,
    cells_for,
    fitting,
    interrupted_cell,
    main,
    measure,
    parser,
)
from partial_rollout.advise.result import circumstances, store
from partial_rollout.rollout.host_memory import host_memory

if TYPE_CHECKING:
    from pathlib import Path


def test_a_model_that_is_given_as_a_folder_is_stored_by_its_name(tmp_path: Path) -> None:
    options = parser().parse_args(["--model", str(tmp_path / "checkpoint"), "--json", str(tmp_path / "curve.json")])
    store(circumstances(options), options.json)
    assert json.loads(options.json.read_text())["options"]["model"] == "checkpoint"


COPIES = host_memory(4 << 30, "curve", 64)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], {}),
        (["--kv-bytes", "46000000000"], {"kv_cache_memory_bytes": 46_000_000_000}),
        (["--offload-gib", "4", "--offload-block", "64"], {"kv_transfer_config": COPIES}),
    ],
)
def test_the_kv_cache_of_the_command_line_is_what_the_engine_gets(tmp_path: Path, monkeypatch, words, given) -> None:
    def start(_options, _model, **more):
        raise RuntimeError(more)

    monkeypatch.setattr("partial_rollout.advise.measure.start", start)
    options = parser().parse_args(["--shape", "8b", "--json", str(tmp_path / "curve.json"), *words])
    with pytest.raises(RuntimeError) as started:
        asyncio.run(measure(options, tmp_path, {}))
    assert started.value.args == (given,)


def test_a_small_engine_runs_the_cells_that_it_has_room_for() -> None:
    assert fitting(CELLS, SLOTS, CONTEXT, 1e9) == list(CELLS)
    small = fitting(cells_for(LEAST_CONTEXT), LEAST_SLOTS, LEAST_CONTEXT, 1e9)
    assert (LEAST_SLOTS, LEAST_CONTEXT - DECODED) in small
    assert all(requests <= LEAST_SLOTS and length + DECODED <= LEAST_CONTEXT for requests, length in small)
    assert fitting(CELLS, SLOTS, CONTEXT, LEAST_SLOTS * LEAST_CONTEXT - 1) == []
    assert fitting([(4, 100)], SLOTS, 600, 4 * 600, decoded=500) == [(4, 100)]
    assert fitting([(4, 100)], SLOTS, 600, 4 * 600 - 1, decoded=500) == []
    assert fitting([(4, 100)], SLOTS, 599, 4 * 600, decoded=500) == []
    requests, length = interrupted_cell(SLOTS, CONTEXT, kv=10_000)
    assert 0 < requests * (length + 2 * DECODED) <= 10_000


@pytest.mark.parametrize(("words", "said"), [(["--context", "300"], "at least 384"), (["--slots", "4"], "at least 16")])
def test_an_engine_that_is_too_small_is_refused_before_it_starts(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path), "--json", str(tmp_path / "curve.json"), *words])
    assert said in capsys.readouterr().err


def test_a_dry_run_shows_the_engine_and_its_cells_and_stores_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = tmp_path / "curve.json"
    main(["--shape", "8b", "--slots", "64", "--json", str(curve), "--dry-run"])
    shown = capsys.readouterr().out
    assert "'slots': 64" in shown
    assert "(64, 256)" in shown
    assert "(256, 256)" not in shown
    assert not curve.exists()
