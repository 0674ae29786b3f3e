"""The last lines of a run: what it showed."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from partial_rollout.observability.step_line import NUM_TOKENS, PREFIX, REWARD, STEP_SECONDS, seconds_by_part

if TYPE_CHECKING:
    from partial_rollout.observability.record import RunRecord

WINDOW = 10
"""Steps of a mean: the rewards of single batches vary too much to show anything."""
LABEL_WIDTH = 12
WAITS = {
    "engine": "engine and gate",
    "tool": "tools and agent loop",
    "reward": "reward and storing",
    "held": "held back",
}


@dataclass(frozen=True, slots=True)
class Change:
    """A value at the beginning of a run and at its end, each the mean of some steps."""

    first: float
    last: float
    window: int

    @classmethod
    def of(cls, values: list[float]) -> Change | None:
        """The change over the values of all steps; None for fewer than two values."""
        window = min(WINDOW, len(values) // 2)
        return cls(fmean(values[:window]), fmean(values[-window:]), window) if window else None


def summary_lines(record: RunRecord) -> list[str]:
    """One line a subject; subjects of which the run has nothing are left out."""
    if not record.steps:
        return []
    rows = {
        "steps": _steps(record),
        "reward": _reward(record),
        "time": _time(record),
        "slots": _slots(record),
        "staleness": _staleness(record),
        "interrupted": _interrupted(record),
        "engines": _engines(record),
        "waits": _waits(record),
        "dropped": _dropped(record),
        "choices": _choices(record),
        "faults": _faults(record),
    }
    return [f"{label:<{LABEL_WIDTH}} {text}" for label, text in rows.items() if text]


def _steps(record: RunRecord) -> str:
    seconds, tokens = record.sum(STEP_SECONDS), record.sum(NUM_TOKENS)
    rate = f", {tokens / seconds:,.0f} tokens/s" if tokens and seconds else ""
    between_s = sum(record.between_s.values())
    between = f"; {duration(between_s)} between steps are in none" if between_s >= 1 else ""
    return f"{len(record.steps)} in {duration(seconds)}{between}{rate}"


def _reward(record: RunRecord) -> str:
    change = Change.of(record.values(REWARD))
    if change is None:
        return ""
    of = f"the mean of the first and of the last {change.window} steps" if change.window > 1 else "first and last step"
    return f"{change.first:.3f} -> {change.last:.3f} ({of})"


def _time(record: RunRecord) -> str:
    parts: dict[str, float] = {}
    for step in record.series:
        for name, seconds in seconds_by_part(step).items():
            parts[name] = parts.get(name, 0.0) + seconds
    whole = sum(parts.values())
    return ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts.items()) if whole else ""


def _slots(record: RunRecord) -> str:
    used = record.mean(f"{PREFIX}/slot_utilisation")
    if used is None:
        return ""
    return f"requests filled {used:.0%} of those that the run began with while engines generated, mean of all steps"


def _staleness(record: RunRecord) -> str:
    mean, most = record.mean(f"{PREFIX}/staleness_steps/mean"), record.values(f"{PREFIX}/staleness_steps/max")
    if mean is None:
        return ""
    share, highest = record.mean(f"{PREFIX}/stale_token_share") or 0.0, max(most, default=0.0)
    return f"{mean:.1f} steps, at most {highest:.0f}; {share:.0%} of the trained tokens are of older weights"


def _interrupted(record: RunRecord) -> str:
    if not record.values(f"{PREFIX}/interrupted"):
        return ""
    again = record.sum(f"{PREFIX}/reprefilled_tokens")
    kept = f"; {record.tokens_kept:,} tokens were kept and not generated again" if record.tokens_kept else ""
    return f"{record.sum(f'{PREFIX}/interrupted'):,.0f} requests{kept}; {again:,.0f} tokens were computed again"


def _engines(record: RunRecord) -> str:
    """How even several engines are loaded, and whether interrupted responses went on where their KV may be."""
    use = record.engines
    whole = sum(use.tokens.values())
    if len(use.tokens) < 2 or not whole:
        return ""
    least, most = (pick(use.tokens.values()) / whole for pick in (min, max))
    again = f"; {use.num_back:,} of {use.num_resumed:,} interrupted responses went on in the same engine"
    shares = f"{least:.0%} to {most:.0%} of the tokens each"
    return f"{len(use.tokens)}, {shares}{again if use.num_resumed else ''}"


def _waits(record: RunRecord) -> str:
    whole = sum(record.waits_s.values())
    ordered = sorted(record.waits_s.items(), key=lambda wait: -wait[1])
    shares = {name: seconds / whole for name, seconds in ordered if whole}
    shown = ", ".join(f"{WAITS[name]} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    return f"of a trajectory's time: {shown}" if shown else ""


def dropped_by_reason(record: RunRecord) -> dict[str, int]:
    """Prompts that the run let go, as counted at its last step."""
    prefix = f"{PREFIX}/dropped/"
    return {
        name.removeprefix(prefix): int(count)
        for name, count in record.last.items()
        if name.startswith(prefix) and count
    }


def _dropped(record: RunRecord) -> str:
    if not record.values(f"{PREFIX}/queue/num_dropped"):
        return ""
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped_by_reason(record).items())
    return f"prompts: {reasons or 'none'}"


def _choices(record: RunRecord) -> str:
    last = {choice.key: choice for choice in record.choices}
    return "; ".join(f"{key}={choice.after} ({choice.reason})" for key, choice in last.items())


def _faults(record: RunRecord) -> str:
    return "; ".join(f"{fault.role} {fault.name}: {fault.action or fault.text}" for fault in list(record.faults)[-3:])


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(41.2), duration(461), duration(7300)
    ('41 s', '7 min 41 s', '2 h 01 min')
    """
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
