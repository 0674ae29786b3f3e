"""What `make faults` has measured, as one small file that the documents take their numbers from.

    python -m tests.faults.store outputs/faults/measured.jsonl --json benchmarks/results/faults.json

Of a test that ran more than once the last line counts. Blows are put together by process, phase and signal; each number
is a list with an entry for each blow, and a blow that nobody noticed, or after which no step ended, has no entry there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partial_rollout.advise.result import circumstances, store, versions
from partial_rollout.runtime import processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ANY = "any"
"""Stands for all phases."""
NUMBERS = ("noticed_s", "step_done_s", "tokens_lost", "charged", "starts")


def by_blow(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Numbers by process, phase and signal.

    >>> blow = {"role": "engine", "name": "EngineCore", "while": "generating", "signal": "SIGKILL", "noticed_s": None}
    >>> rows = by_blow([{"blows": [blow | {"step_done_s": 3.5, "tokens_lost": 7, "charged": 0, "starts": 0}]}])
    >>> rows["engine"]["generating"]["SIGKILL"]
    {'blows': 1, 'noticed_s': [], 'step_done_s': [3.5], 'tokens_lost': [7], 'charged': [0], 'starts': [0]}
    """
    rows: dict[str, Any] = {}
    for blow in (blow for line in lines for blow in line["blows"]):
        role = processes.ENGINE_WORKER.role if blow.get("name", "").startswith("Worker") else blow["role"]
        for phase in (blow["while"], ANY):
            empty = {"blows": 0, **{number: [] for number in NUMBERS}}
            row = rows.setdefault(role, {}).setdefault(phase, {}).setdefault(blow["signal"], empty)
            row["blows"] += 1
            for number in NUMBERS:
                row[number] += [blow[number]] if blow[number] is not None else []
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Read, and store."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("measured", type=Path)
    line.add_argument("--json", type=Path, required=True)
    line.add_argument("--command", default="make faults", help="what has measured")
    options = line.parse_args(words)
    last = {each["test"]: each for each in map(json.loads, options.measured.read_text().splitlines())}
    about = {**circumstances(options), "versions": versions()}
    failed = sorted(name for name, each in last.items() if not each["passed"])
    store({**about, "tests": len(last), "failed": failed, "rows": by_blow(last.values())}, options.json)


if __name__ == "__main__":
    main()
