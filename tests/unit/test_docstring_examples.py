"""Every example in a docstring runs, and the classes that a reader meets first have one."""

from __future__ import annotations

import ast
import doctest
import importlib
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).resolve().parents[2] / "partial_rollout"
DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CAST = {
    "agent_loop.slots.SlotBudget",
    "agent_loop.trajectory.Trajectory",
    "core.gate.Gate",
    "core.interrupt.InterruptMode",
    "core.queue.claims.ClaimBook",
    "core.queue.ledger.Ledger",
    "core.queue.queue.PromptQueue",
    "core.queue.staleness.StalenessBound",
    "core.queue.tail.Partial",
    "core.resume.ResumableGeneration",
    "core.slots.SlotController",
    "packing.plan.Plan",
    "packing.planners.GlobalPlanner",
    "rollout.admission.Admission",
    "rollout.client.ResumingLLMServerClient",
    "runtime.journal.Journal",
    "runtime.prompt_manager.RolloutPromptManager",
    "settings.block.PartialRolloutConfig",
    "weights.protocol.buckets.BucketPlan",
    "weights.protocol.engine_weights.EngineWeights",
    "weights.protocol.stream.ReceiverMachine",
}
"""Classes that must have an example."""


def names(node: ast.AST, prefix: str) -> Iterator[str]:
    """Classes and functions below `node` whose docstring has an example."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DOCUMENTED):
            name = f"{prefix}.{child.name}"
            if ">>> " in (ast.get_docstring(child) or ""):
                yield name
            yield from names(child, name)


def examples() -> list[tuple[str, str]]:
    """Module and name in it, below the package, of all that have an example."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found += [(module, name.removeprefix(".")) for name in names(ast.parse(path.read_text(encoding="utf-8")), "")]
    return found


@pytest.mark.parametrize(("module", "name"), examples(), ids=".".join)
def test_the_example_in_a_docstring_runs(module: str, name: str) -> None:
    where = importlib.import_module(f"partial_rollout.{module}")
    found = doctest.DocTestFinder(recurse=False).find(reduce(getattr, name.split("."), where), name, where)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found[0], out=report.append)
    assert found[0].examples
    assert not report, "".join(report)


def test_who_is_met_first_has_an_example() -> None:
    assert CAST - {f"{module}.{name}" for module, name in examples()} == set()
