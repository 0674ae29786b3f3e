"""A run as far as its metrics go: the prompt manager as an actor, and steps that a trainer tells; for a Prometheus.

    python -m tests.ray.exporting_run RAY_FOLDER

It says that it exports, and ends when its input ends.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray

from partial_rollout.observability.metrics import STEP_GAUGES, STEP_TOTALS, TrainerMetrics
from partial_rollout.runtime.prompt_manager import create_manager
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.types import PromptMeta, TrajectorySummary, WorkerStatus

READY = "exports"
RUN, BATCH, GROUP, CALL_S = "scraped", 4, 2, 120.0


def work(manager: Any) -> None:
    """Two prompts are trained, one is dropped, one is generated, and four wait."""

    def ask(method: str, *arguments: Any) -> Any:
        return ray.get(getattr(manager, method).remote(*arguments), timeout=CALL_S)

    ask("report_step", 1, 0, "open")
    ask("admit", [PromptMeta(f"p{number}", GROUP, global_step=1) for number in range(2 * BATCH)])
    claims = ask("claim", "w0", BATCH * GROUP, 0.0)
    whole = [
        (claim, [TrajectorySummary(f"{claim.uid}_{each}_0", 3, 5, 0, 0) for each in range(GROUP)])
        for claim in claims[:2]
    ]
    ask("finish_many", whole)
    ask("take_batch", 2, CALL_S)
    ask("drop", claims[2], "prompt_too_long")
    ask("report_worker", "w0", WorkerStatus(GROUP, 2 * BATCH, requests_in_flight=GROUP))


def main() -> None:
    """Export until the input ends."""
    ray.init(num_cpus=1, include_dashboard=True, _temp_dir=sys.argv[1], log_to_driver=False)
    manager = create_manager(PartialRolloutConfig(events=str(Path(sys.argv[1]) / RUN / "events")), BATCH)
    work(manager)
    trainer = TrainerMetrics(RUN)
    for seconds in (2.0, 3.0):
        sources = [source for source, _ in (*STEP_GAUGES.values(), *STEP_TOTALS.values())]
        trainer.update(dict.fromkeys(sources, seconds))
    print(READY, flush=True)
    sys.stdin.read()
    ray.kill(manager)
    ray.shutdown()


if __name__ == "__main__":
    main()
