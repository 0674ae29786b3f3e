"""How many drafts from earlier text a model would accept, by replaying the log of rollouts of a job.

    python -m partial_rollout.advise.acceptance LOG_FOLDER --json FILE.json
    python -m partial_rollout.advise.acceptance LOG_FOLDER --prices PRICES --curve CURVE     # and what that would gain

LOG_FOLDER has the files of a job with `partial_rollout.tail.policy=wait`, whose groups begin together. A draft counts
as right if it is the recorded token. vLLM accepts a draft x with the model's probability of x, which is how often x was
sampled, so the replay needs no model. One tick is one verified step of all unfinished responses; it brings one token
and the drafts that are right. The first token comes from the prefill. Sources of drafts:

    own        the prompt and the response so far
    siblings   the other responses of the group, as far as they were at the tick before
    whole      the other responses of the group, whole: what a sibling that began later would see
    epoch-1    the responses to the same prompt one epoch earlier; epoch-2: two epochs; earlier: both
    all        own, siblings and earlier

Drafts continue the longest suffix, of `least` to `MOST` tokens, that the sources have, by its most frequent next token
(of several the newest), while that one has a share of `SHARE` of the continuations.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from partial_rollout.advise.drafts import GATES, VARIANTS, read_prices, time_ratios
from partial_rollout.advise.predict import markdown
from partial_rollout.advise.result import about_run, read_result, store
from partial_rollout.advise.workload import workload
from partial_rollout.core.rollout_log import (
    Admitted,
    Finished,
    FrameReader,
    Taken,
    decode,
    unpack_ids,
    unpack_log_probs,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SOURCES = ("own", "siblings", "whole", "epoch-1", "epoch-2", "earlier", "all")
MOST, SHARE = 16, 0.3
POSITIONS = (0, 32, 128, 512)
"""Where a slice of positions in the response begins."""
PROBABILITIES = (0.0, 0.5, 0.9, 0.99)
"""Where a slice of the recorded tokens' probabilities begins."""
NATS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
"""Where a slice of groups by their nats a token begins."""
APART = (1, 9, 17, 25, 33)
"""Where a slice begins of groups by the weight versions since the prompt's last epoch."""
ENTROPIES = (0.1, 0.2, 0.4, 0.6)
"""Nats a token of models for which acceptance is estimated."""
TAILS = (64, 16)
"""Unfinished responses of a step, from which on a tick is one of the tail."""
LONG_TRACES = ("long_tail", "heavy_tail")
"""Lengths for which the gain is predicted: up to 4,096 tokens, and with some of 32,768."""
DRAWS, INTERVAL = 1000, (5, 95)


class Response(NamedTuple):
    """A recorded trajectory."""

    tokens: list[int]
    log_probs: list[float]
    version: int


@dataclass
class Group:
    """The responses to a prompt in one step; `epoch` counts from 0."""

    step: int
    epoch: int
    prompt: list[int]
    responses: list[Response] = field(default_factory=list)


Prompt = list[Group]
"""What was generated for a prompt, by epoch."""


class Config(NamedTuple):
    """Where drafts come from, how many at most, and how long their suffix is at least."""

    source: str
    drafts: int = 3
    least: int = 2


CONFIGS = (
    *(Config(source) for source in SOURCES),
    *(Config(source, 5) for source in ("own", "all")),
    *(Config("all", 3, least) for least in (1, 4)),
)


DETAILED = (Config("all"), Config("own"))
"""Configurations whose rows are reported in full, and carried over to other models."""


class Replayed(NamedTuple):
    """By tick of a response: position of its next token, tokens that it got, drafts checked, and drafts right."""

    positions: list[int]
    emitted: list[int]
    checked: list[int]
    right: list[int]


class Index:
    """Which tokens followed each suffix of `least` to `MOST` tokens, the newest last."""

    def __init__(self, least: int) -> None:
        """An index that has nothing yet."""
        self._least = least
        self.following: defaultdict[tuple[int, ...], dict[int, int]] = defaultdict(dict)

    def add(self, text: Sequence[int], start: int, end: int) -> None:
        """The tokens from `start` to `end` of a text."""
        for place in range(start, end):
            for length in range(self._least, min(MOST, place) + 1):
                row = self.following[tuple(text[place - length : place])]
                row[text[place]] = row.pop(text[place], 0) + 1

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], least: int, start: int = 1) -> Index:
        """An index of whole texts, whose tokens before `start` are only suffixes."""
        index = cls(least)
        for text in texts:
            index.add(text, start, len(text))
        return index


def draft(indexes: Sequence[Index], text: Sequence[int], config: Config) -> list[int]:
    """What the indexes, the older first, say of the tokens after a text."""
    rows = [index.following for index in indexes]
    longest = range(min(MOST, len(text)), config.least - 1, -1)
    tail = tuple(text[-MOST:])
    length = next((each for each in longest if any(tail[-each:] in row for row in rows)), 0)
    found: list[int] = []
    while length and len(found) < config.drafts:
        counts: dict[int, int] = {}
        for row in rows:
            for token, number in row.get(tail[-length:], {}).items():
                counts[token] = counts.pop(token, 0) + number
        best = max(reversed(counts), key=lambda token: counts[token]) if counts else None
        if best is None or counts[best] < SHARE * sum(counts.values()):
            break
        found.append(best)
        tail, length = (*tail[1 - MOST :], best), min(length + 1, MOST)
    return found


def replay(group: Group, before: Sequence[Group], config: Config) -> list[Replayed]:
    """The ticks of each response of a group, whose prompt had the groups `before` in earlier epochs."""
    source, start = config.source, len(group.prompt)
    texts = [[*group.prompt, *response.tokens] for response in group.responses]
    earlier = [
        Index.of([[*each.prompt, *response.tokens] for response in each.responses], config.least, len(each.prompt))
        for each in before
        if source in ("earlier", "all", f"epoch-{group.epoch - each.epoch}")
    ]
    shared = Index.of([group.prompt] if source == "all" else [], config.least)
    own = [Index.of([group.prompt] if source == "own" else [], config.least) for _ in texts]
    if source == "whole":
        own = [Index.of([text], config.least, start) for text in texts]

    def indexes(number: int) -> list[Index]:
        others = [*own[:number], *own[number + 1 :]]
        mine = {"own": [own[number]], "siblings": others, "whole": others, "all": [shared]}
        return [*earlier, *mine.get(source, [])]

    ends, seen = [start + 1] * len(texts), [start] * len(texts)
    found = [Replayed([], [], [], []) for _ in texts]
    while unfinished := [number for number, text in enumerate(texts) if ends[number] < len(text)]:
        for number in unfinished:
            text, end = texts[number], ends[number]
            drafts = draft(indexes(number), text[max(0, end - MOST) : end], config)
            wrong = (n for n, each in enumerate(drafts) if text[end + n : end + n + 1] != [each])
            right = next(wrong, len(drafts))
            ends[number] = min(len(text), end + right + 1)
            for column, value in zip(found[number], (end - start, ends[number] - end, len(drafts), right), strict=True):
                column.append(value)
        for number in unfinished:  # what others see at the next tick
            target = {"own": own[number], "siblings": own[number], "all": shared}.get(source)
            if target is not None:
                target.add(texts[number], seen[number], ends[number])
            seen[number] = ends[number]
    return found


def replay_prompt(prompt: Prompt, config: Config) -> list[list[Replayed]]:
    """The replayed groups of a prompt, by epoch."""
    return [replay(group, prompt[:number], config) for number, group in enumerate(prompt)]


def records(folder: Path) -> Iterator[Any]:
    """The records of all files of a log."""
    for path in sorted(folder.rglob("*.log")):
        with path.open("rb") as file:
            yield from (decode(payload) for _, payload in FrameReader(file))


def read_prompts(folder: Path) -> list[Prompt]:
    """The trained groups of a log, by prompt and epoch.

    Raises:
        SystemExit: the log has none.
    """
    asked: dict[str, tuple[str, int]] = {}
    steps: dict[str, int] = {}
    finished: dict[str, dict[str, Finished]] = defaultdict(dict)
    seen: Counter[str] = Counter()
    for record in sorted(records(folder), key=lambda each: each.first if isinstance(each, Admitted) else -1):
        if isinstance(record, Admitted):
            for uid, prompt in zip(record.uids, record.prompts, strict=True):
                asked[uid] = (prompt, seen[prompt])
                seen[prompt] += 1
        elif isinstance(record, Taken):
            steps |= {group.uid: record.step for group in record.groups}
        elif isinstance(record, Finished):
            finished[record.uid][record.key] = record
    prompts: dict[str, Prompt] = defaultdict(list)
    for uid, step in sorted(steps.items(), key=lambda each: each[1]):
        found = [each for _, each in sorted(finished[uid].items()) if len(each.outputs) == 1]
        if found:
            group = Group(step, asked[uid][1], unpack_ids(found[0].outputs[0].prompt_ids))
            group.responses = [_response(each) for each in found]
            prompts[asked[uid][0]].append(group)
    if not prompts:
        raise SystemExit(f"{folder} has no trained group: give the folder rollout_log of a job that still runs")
    return list(prompts.values())


def _response(record: Finished) -> Response:
    output = record.outputs[0]
    log_probs = unpack_log_probs(output.log_probs) if output.log_probs else []
    return Response(unpack_ids(output.response_ids), log_probs, record.summaries[0].min_version)


def ticks(prompts: Sequence[Prompt], replayed: Sequence[list[list[Replayed]]]) -> dict[str, np.ndarray]:
    """A column for each property of a tick of a response, over all responses."""
    running: Counter[tuple[int, int]] = Counter()
    for prompt, groups in zip(prompts, replayed, strict=True):
        for group, responses in zip(prompt, groups, strict=True):
            running.update((group.step, tick) for each in responses for tick in range(len(each.positions)))
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for number, (prompt, groups) in enumerate(zip(prompts, replayed, strict=True)):
        versions = [group.responses[0].version for group in prompt]
        for place, (group, responses) in enumerate(zip(prompt, groups, strict=True)):
            nats, apart = nats_a_token([group]), versions[place] - versions[max(0, place - 1)]
            for response, each in zip(group.responses, responses, strict=True):
                many = len(each.positions)
                columns["nats"] += [nats] * many
                columns["apart"] += [apart] * many
                columns["prompt"] += [number] * many
                columns["epoch"] += [group.epoch] * many
                columns["position"] += each.positions
                columns["emitted"] += each.emitted
                columns["checked"] += each.checked
                columns["right"] += each.right
                columns["unfinished"] += [running[group.step, tick] for tick in range(many)]
                probabilities = np.exp(response.log_probs)[each.positions] if response.log_probs else [-1.0] * many
                columns["probability"] += list(probabilities)
    return {name: np.array(values) for name, values in columns.items()}


def slices(column: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Which ticks each row of the result is about; all steps of all but the first epoch, then parts of them."""
    late = column["epoch"] > 0 if column["epoch"].max() else column["epoch"] == 0
    yield "all", late
    for most in TAILS:
        yield tail(most), late & (column["unfinished"] <= most)
    for epoch in range(int(column["epoch"].max()) + 1):
        yield f"epoch {epoch + 1}", column["epoch"] == epoch
    for most in TAILS:
        yield f"epoch 1, {tail(most)}", (column["epoch"] == 0) & (column["unfinished"] <= most)
    columns = {"position": POSITIONS, "probability": PROBABILITIES, "nats": NATS, "apart": APART}
    for name, starts in columns.items():
        for part, (start, end) in parts(name, starts).items():
            yield part, late & (column[name] >= start) & (column[name] < end)


def parts(name: str, starts: Sequence[float]) -> dict[str, tuple[float, float]]:
    """By name of the slice: where each part of a column begins, and where it ends.

    >>> parts("position", (0, 32))
    {'position 0 to 32': (0, 32), 'position 32 to inf': (32, inf)}
    """
    ends = (*starts[1:], math.inf)
    return {f"{name} {start:g} to {end:g}": (start, end) for start, end in zip(starts, ends, strict=True)}


def numbers(column: dict[str, np.ndarray], chosen: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    """Tokens a verified step of the chosen ticks, with 90 % of the draws of prompts, and how the drafts were."""
    checked, right = column["checked"][chosen], column["right"][chosen]
    many = int(column["prompt"].max()) + 1
    steps = np.bincount(column["prompt"][chosen], minlength=many)
    tokens = np.bincount(column["prompt"][chosen], weights=column["emitted"][chosen], minlength=many)
    drawn = rng.integers(many, size=(DRAWS, many))
    draws = tokens[drawn].sum(1) / np.maximum(1, steps[drawn].sum(1))
    low, high = np.percentile(draws, INTERVAL)
    first = right[checked > 0] > 0
    found = {"tokens_a_step": tokens.sum() / steps.sum(), "low": low, "high": high}
    found |= {"drafted": (checked > 0).mean(), "checked_a_step": checked.mean()}
    found |= {"right": right.sum() / max(1, checked.sum()), "first_right": first.mean() if first.size else 0.0}
    return {"steps": int(steps.sum())} | {name: round(float(value), 3) for name, value in found.items()}


def acceptance(prompts: Sequence[Prompt], config: Config, mapped: Callable[..., Any] = map) -> list[dict[str, Any]]:
    """Rows of the result for one configuration, by slice; `mapped` replays the prompts, if need be side by side."""
    column = ticks(prompts, list(mapped(partial(replay_prompt, config=config), prompts)))
    rng = np.random.default_rng(0)
    chosen = [(name, each) for name, each in slices(column) if each.any()]
    return [{**config._asdict(), "slice": name, **numbers(column, each, rng)} for name, each in chosen]


def about_log(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What the replayed log has."""
    groups = [group for prompt in prompts for group in prompt]
    responses = [response for group in groups for response in group.responses]
    pairs = [(prompt[0], later) for prompt in prompts for later in prompt[1:]]
    apart = [late.responses[0].version - early.responses[0].version for early, late in pairs]
    return {
        "prompts": len(prompts), "groups": len(groups), "responses": len(responses),
        "tokens": sum(len(each.tokens) for each in responses), "steps": max(group.step for group in groups),
        "versions_from_the_first_epoch": dict(sorted(Counter(apart).items())),
        "nats_a_token": nats_a_token(groups),
    }  # fmt: skip


def nats_a_token(groups: Sequence[Group]) -> float:
    """Mean of minus the log-probabilities of the tokens, which is the entropy that the model sampled with."""
    return -float(np.mean([value for group in groups for each in group.responses for value in each.log_probs] or [0.0]))


def by_slice(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Tokens a verified step by configuration and slice, for documents; finer slices only of `DETAILED`."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        config = _config(row)
        if config in DETAILED or not row["slice"].startswith(("position", "probability", "nats")):
            found[" ".join(map(str, config))][row["slice"]] = row["tokens_a_step"]
    return dict(found)


def _config(row: dict[str, Any]) -> Config:
    return Config(row["source"], row["drafts"], row["least"])


def carried(prompts: Sequence[Prompt], rows: Sequence[dict[str, Any]], config: Config) -> dict[str, Any]:
    """Tokens a verified step of a model with more entropy, from how often the first draft was right by probability.

    A draft is taken as right with that share of its bin, whatever the tokens before it were. `all_bins`: the bins
    below the highest get larger by one factor, until the nats are reached; `lowest_bin`: only the lowest one does.
    None: no such shares reach the nats. Nothing is said where a bin has no step.
    """
    bins = list(parts("probability", PROBABILITIES))
    found = {row["slice"]: row for row in rows if _config(row) == config}
    if not found.keys() >= set(bins):
        return {}
    right = np.array([found[name]["drafted"] * found[name]["first_right"] for name in bins])
    log_probs = np.array(
        [value for prompt in prompts for group in prompt for each in group.responses for value in each.log_probs]
    )
    place = np.digitize(np.exp(log_probs), PROBABILITIES[1:])
    share = np.bincount(place, minlength=len(bins)) / place.size
    nats = np.bincount(place, weights=-log_probs, minlength=len(bins)) / np.maximum(1, share * place.size)

    def tokens(shares: np.ndarray) -> float | None:
        shares[-1] = 1 - shares[:-1].sum()
        return None if shares[-1] < 0 else round(float(((shares @ right) ** np.arange(config.drafts + 1)).sum()), 2)

    estimates: dict[str, Any] = {}
    for entropy in (float(share @ nats), *ENTROPIES):
        all_bins, lowest = share * (entropy / (share @ nats)), share.copy()
        lowest[0] += (entropy - share @ nats) / nats[0]
        estimates[f"{entropy:.2g}"] = {"all_bins": tokens(all_bins), "lowest_bin": tokens(lowest)}
    columns = {"share": share, "nats": nats, "first_right": right}
    table = {name: {key: round(float(each[n]), 4) for key, each in columns.items()} for n, name in enumerate(bins)}
    return {"bins": table, "tokens_a_step": estimates}


def predicted(rows: Sequence[dict[str, Any]], prices: dict[str, Any], curve: dict[str, Any]) -> list[dict[str, Any]]:
    """Time with drafts from all sources, without them = 1, by trace, variant, mode and gate.

    A gate gets the tokens a step of the ticks in which at most so many responses run; the widest those of all steps.
    """
    tokens = {
        (row["drafts"], row["slice"]): row["tokens_a_step"]
        for row in rows
        if _config(row) == Config("all", row["drafts"])
    }
    epochs = {"first": ("epoch 1", "epoch 1, {}"), "later": ("all", "{}")}
    found = []
    for trace, (name, variant), (epoch, (every, few)) in product(LONG_TRACES, VARIANTS.items(), epochs.items()):
        if (variant.drafts, every) not in tokens:
            continue
        load = workload(curve["engine"]["shape"], trace)
        of_all = tokens[variant.drafts, every]
        measured = {gate: tokens.get((variant.drafts, few.format(tail(gate))), of_all) for gate in GATES}
        ratios = time_ratios(prices, curve, load, variant, {gate: [number] for gate, number in measured.items()})
        for mode, gates in ratios.items():
            for gate, number in measured.items():
                row = {"trace": trace, "variant": name, "epochs": epoch, "mode": mode, "gate": gate}
                [ratio] = gates[str(gate)]
                found.append({**row, "tokens_a_step": number, "time_ratio": round(ratio, 3)})
    return found


def tail(most: int) -> str:
    """Name of the slice of ticks with at most so many unfinished responses of a step."""
    return f"at most {most} unfinished"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(
        "partial_rollout.advise.acceptance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    line.add_argument("log", type=Path, help="folder of a job's log of rollouts, or a copy")
    line.add_argument("--prompts", type=int, help="replay only so many (all)")
    line.add_argument("--quick", action="store_true", help="only three drafts, from all sources and from the own text")
    line.add_argument("--processes", type=int, default=2, help="(%(default)s)")
    line.add_argument("--prices", nargs="+", type=Path, help="results of advise.drafts: predict the gain")
    line.add_argument("--curve", type=Path, help="latency curve of the same shape, for --prices")
    line.add_argument("--json", type=Path, help="where the result goes")
    return line


def main(words: Sequence[str] | None = None) -> None:
    """Replay, print and store."""
    line = parser()
    options = line.parse_args(words)
    if bool(options.prices) != bool(options.curve):
        line.error("--prices and --curve belong together")
    prompts = read_prompts(options.log)[: options.prompts]
    result = {**about_run(options), "log": about_log(prompts)}
    configs = DETAILED if options.quick else CONFIGS
    result["rows"] = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for config in configs:
            rows = acceptance(prompts, config, partial(pool.map, chunksize=4))
            print(*config, *(f"{row['slice']}: {row['tokens_a_step']}" for row in rows[:2]), sep="  ", flush=True)
            result["rows"] += rows
            store(result, options.json, raw=["rows"])
    result["tokens_a_step"] = by_slice(result["rows"])
    result["carried"] = {each.source: carried(prompts, result["rows"], each) for each in DETAILED}
    if options.prices:
        curve = read_result(options.curve)
        result["predicted"] = predicted(result["rows"], read_prices(options.prices), curve)
    store(result, options.json, raw=["rows", "predicted"])
    for found in filter(None, (result["rows"], result.get("predicted"))):
        print(markdown([list(found[0]), ["---"] * len(found[0]), *(list(map(str, row.values())) for row in found)]))


if __name__ == "__main__":
    main()
