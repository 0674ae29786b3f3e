"""The classes and functions that a reader meets first have an example in their docstring, and the examples run."""

from __future__ import annotations

import doctest
import importlib

import pytest

CENTRAL = [
    "partial_rollout.advise.measure.cells_for",
    "partial_rollout.advise.predict.non_negative_fit",
    "partial_rollout.advise.scheduler.Speed",
    "partial_rollout.advise.workload.Workload",
    "partial_rollout.agent_loop.slots.SlotBudget",
    "partial_rollout.core.engine_meter.EngineMeter",
    "partial_rollout.core.gate.Gate",
    "partial_rollout.core.queue.ledger.Ledger",
    "partial_rollout.core.queue.lifecycle.next_state",
    "partial_rollout.core.queue.queue.PromptQueue",
    "partial_rollout.core.queue.staleness.StalenessBound",
    "partial_rollout.core.queue.tail.Partial",
    "partial_rollout.core.queue.tail.Reorder",
    "partial_rollout.core.resume.ResumableGeneration",
    "partial_rollout.core.resume.extend",
    "partial_rollout.core.resume.kv_lags",
    "partial_rollout.core.slots.SlotController",
    "partial_rollout.core.slots.share_slots",
    "partial_rollout.diffusion.hold.Hold",
    "partial_rollout.diffusion.sde_window.WindowPlan",
    "partial_rollout.observability.events.EventWriter",
    "partial_rollout.observability.step_line.seconds_by_part",
    "partial_rollout.observability.step_line.step_line",
    "partial_rollout.observability.summary.duration",
    "partial_rollout.packing.plan.CostModel",
    "partial_rollout.packing.planners.GlobalPlanner",
    "partial_rollout.rollout.admission.Admission",
    "partial_rollout.run.quickstart.verdict.num_baseline_steps",
    "partial_rollout.run.task_files.text_after",
    "partial_rollout.settings.block.PartialRolloutConfig",
    "partial_rollout.settings.block.TailConfig",
    "partial_rollout.settings.command_line.check_overrides",
    "partial_rollout.train.resources.Need",
    "partial_rollout.train.stale_mask.masked",
    "partial_rollout.weights.protocol.buckets.BucketPlan",
    "partial_rollout.weights.protocol.engine_weights.EngineWeights",
]
"""Who has an example; each row is the full name of a class or a function."""


@pytest.mark.parametrize("name", CENTRAL)
def test_the_example_in_a_docstring_runs(name: str) -> None:
    module_name, _, own_name = name.rpartition(".")
    module = importlib.import_module(module_name)
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(module, own_name), name, module)
    assert test.examples, f"{name} has no example in its docstring"
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert not report, "".join(report)
