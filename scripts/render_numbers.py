"""Numbers in the documents, taken from stored results.

    python -m scripts.render_numbers            # writes the stored numbers into the documents
    python -m scripts.render_numbers --check    # fails, and says which line, where text and file differ

`docs/numbers.yaml` lists for each document the lines that hold numbers, with a place for each number:

    {alias:path;format}                 one value, for example {a:summary.sync.gen_s;.2f}
    {alias:path / alias:path;format}    a ratio; `*` multiplies, and what stands first is done first

`alias` is a stored file, `path` the keys in it, joined by dots (a number is a place in a list), `format` Python's.
Before the format, `k` multiplies by 1,000, `m` divides by it, `percent` multiplies by 100, `list` joins the values of a
list, and `least` and `most` take one of them. A sign between two lists counts them value by value.
A file of whole jobs has one branch more, `from_N.MODE`: what the job's steps from the N-th on say (see `job_rows`).
`from_N-M.MODE` is the list of these for all first steps from N to M.
A file of one engine has `steps.TRACE.MODE`: the seconds of its measured steps.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from partial_rollout.advise.result import read_result

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"\{([a-z0-9_]+:[^{}]*)\}")
NUMBER = r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:, [-+]?[0-9][0-9,]*(?:\.[0-9]+)?)*"
"""What may stand in a document at a place: a number, or a list of numbers."""
FIRST_STEPS = re.compile(r"from_([0-9]+)(?:-([0-9]+))?")
STALENESS = (
    ("partial_rollout/staleness_steps/mean", "partial_rollout/staleness_steps/max"),
    ("training/off_policy/trajectory_staleness_worst/mean", "training/off_policy/trajectory_staleness_worst/max"),
)
"""Age of a response's oldest token, in our mode and in verl's own."""


PROMPT_TOKENS = 256
"""Tokens of each prompt of a job, where the job's file does not say."""


class NumbersError(Exception):
    """A path that a stored file does not have, or a line that a document does not have exactly once."""


@cache
def stored(name: str) -> Any:
    """A stored result, with the steps that lie compressed beside it."""
    return read_result(ROOT / name)


def job_rows(result: dict[str, Any], first: int) -> dict[str, dict[str, Any]]:
    """By mode, means of its first job over an even number of steps, from step `first` on (step 1 loads everything).

    An even number, because every other step of `colocate_async` is a long one. Rates are response tokens for each
    second of generation.
    """
    load, prompt = result["workload"], result["engine"].get("prompt_tokens", PROMPT_TOKENS)
    rows: dict[str, dict[str, Any]] = {}
    for job in result["jobs"]:
        steps = (job.get("first_steps", []) + job["steps"])[first - 1 :]
        steps = steps[: len(steps) // 2 * 2]
        if not steps or job["mode"] in rows:
            continue
        tokens = sum(step["perf/total_num_tokens"] - load["batch"] * load["group"] * prompt for step in steps)
        seconds = sum(step["timing_s/gen"] for step in steps)
        row: dict[str, Any] = {"num_steps": len(steps), "gen_s": seconds / len(steps), "tokens_per_s": tokens / seconds}
        row["each_gen_s"] = [step["timing_s/gen"] for step in steps]
        row["update_weights_s"] = statistics.median(step["timing_s/update_weights"] for step in steps)
        mean, most = next(names for names in STALENESS if names[0] in steps[0])
        row["staleness_mean"] = statistics.fmean(step[mean] for step in steps)
        row["staleness_max"] = max(step[most] for step in steps)
        rows[job["mode"]] = row
    return rows


def engine_steps(result: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Seconds of each measured step of one engine, by trace and mode."""
    found: dict[str, dict[str, list[float]]] = {}
    for block in result["blocks"]:
        walls = found.setdefault(block["trace"], {}).setdefault(block["mode"], [])
        walls += [step["wall_s"] for step in block["steps"] if not step["warmup"]]
    return found


def look_up(value: Any, path: str) -> Any:
    """The value at `path`; keys may hold dots themselves."""
    parts = path.split(".")
    found = FIRST_STEPS.fullmatch(parts[0])
    if found and isinstance(value, dict) and "jobs" in value:
        first, last = (int(number) for number in found.groups(default=found.group(1)))
        each = [look_up(job_rows(value, number), ".".join(parts[1:])) for number in range(first, last + 1)]
        return each if found.group(2) else each[0]
    if parts[0] == "steps" and isinstance(value, dict) and "blocks" in value:
        return look_up(engine_steps(value), ".".join(parts[1:]))
    while parts:
        if isinstance(value, list):
            value, parts = value[int(parts[0])], parts[1:]
            continue
        for count in range(len(parts), 0, -1):
            key = ".".join(parts[:count])
            if isinstance(value, dict) and key in value:
                value, parts = value[key], parts[count:]
                break
        else:
            raise NumbersError(f"nothing at {parts[0]!r} of {path!r}; there is: {', '.join(map(str, value))[:300]}")
    return value


def _stored_at(term: str, files: dict[str, str]) -> Any:
    alias, _, path = term.partition(":")
    return look_up(stored(files[alias]), path)


def fill(place: str, files: dict[str, str]) -> str:
    """The text of one place."""
    expression, _, form = place.partition(";")
    first, *others = re.split(r" ([*/]) ", expression)
    value = _stored_at(first, files)
    for sign, term in zip(others[::2], others[1::2], strict=True):
        value = _counted(value, sign, _stored_at(term, files))
    if form.startswith(("least", "most")):
        value = min(value) if form.startswith("least") else max(value)
        form = form.removeprefix("least").removeprefix("most")
    if form.startswith("percent"):
        value, form = value * 100, form.removeprefix("percent")
    if form.startswith("list"):
        return ", ".join(format(each, form.removeprefix("list")) for each in value)
    if form.startswith("k"):
        value, form = value * 1000, form.removeprefix("k")
    if form.startswith("m"):
        value, form = value / 1000, form.removeprefix("m")
    return format(value, form)


def _counted(value: Any, sign: str, other: Any) -> Any:
    if isinstance(value, list):
        others = other if isinstance(other, list) else [other] * len(value)
        return [_counted(one, sign, two) for one, two in zip(value, others, strict=True)]
    return value / other if sign == "/" else value * other


def rendered(line: str, files: dict[str, str]) -> str:
    """The line as it must stand in the document."""
    return PLACE.sub(lambda found: fill(found.group(1), files), line)


def pattern(line: str) -> re.Pattern[str]:
    """The line with any number at its places, over any line breaks."""
    parts = PLACE.split(line)
    texts = [r"\s+".join(re.escape(word) for word in re.split(r"\s+", part)) for part in parts[::2]]
    return re.compile(NUMBER.join(texts))


def entries() -> list[dict[str, Any]]:
    """What `docs/numbers.yaml` lists."""
    return yaml.safe_load((ROOT / "docs/numbers.yaml").read_text(encoding="utf-8"))


def checked_lines() -> list[tuple[str, str, dict[str, str]]]:
    """(document, line, files) of every line."""
    return [(entry["document"], line, entry["files"]) for entry in entries() for line in entry["lines"]]


def difference(document: str, line: str, files: dict[str, str]) -> str | None:
    """What the document should say instead, or None. Line breaks in the document do not count."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = list(pattern(line).finditer(text))
    if len(found) != 1:
        return f"{document}: {len(found)} places, not one, for the line {line!r}"
    wanted = rendered(line, files)
    if " ".join(found[0].group().split()) == " ".join(wanted.split()):
        return None
    return f"{document}:\n  says   {found[0].group()}\n  stored {wanted}"


def write(document: str, line: str, files: dict[str, str]) -> None:
    """Put the stored numbers into the document; the line's breaks are lost only where a number changes."""
    path = ROOT / document
    text = path.read_text(encoding="utf-8")
    path.write_text(pattern(line).sub(lambda _: rendered(line, files), text), encoding="utf-8")


def main() -> int:
    """Render, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where text and file differ")
    options = parser.parse_args()
    wrong = [(each, said) for each in checked_lines() if (said := difference(*each))]
    for each, said in wrong:
        print(said)
        if not options.check and " places, not one" not in said:
            write(*each)
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
