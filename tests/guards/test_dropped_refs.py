"""No actor call and no task is started without somebody who observes its failure."""

from __future__ import annotations

import ast

import pytest

from tests.guards.source import PACKAGE, Source, parse, sources

TASK_STARTERS = ("create_task", "ensure_future", "run_coroutine_threadsafe")


def _called_name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def dropped(source: Source) -> list[str]:
    """Statements that are only such a call, or assign it to `_`."""
    found = []
    for node in ast.walk(source.tree):
        value = node.value if isinstance(node, ast.Expr | ast.Assign) else None
        if isinstance(node, ast.Assign) and not all(isinstance(t, ast.Name) and t.id == "_" for t in node.targets):
            continue
        if isinstance(value, ast.List | ast.Tuple | ast.Set):
            calls = [item for item in value.elts if isinstance(item, ast.Call)]
        elif isinstance(value, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            calls = [value.elt] if isinstance(value.elt, ast.Call) else []
        else:
            calls = [value] if isinstance(value, ast.Call) else []
        for call in calls:
            if _called_name(call) in ("remote", *TASK_STARTERS):
                found.append(f"{source.name}:{call.lineno} starts {ast.unparse(call.func)} and drops it")
    return found


def test_nothing_is_dropped():
    assert [line for source in sources() for line in dropped(source)] == []


@pytest.mark.parametrize(
    "text",
    [
        "actor.ping.remote()",
        "actor.method.options(num_returns=1).remote(1)",
        "_ = actor.ping.remote()",
        "[a.ping.remote() for a in actors]",
        "import asyncio\nasync def f():\n    asyncio.create_task(g())",
        "loop.create_task(g())",
        "asyncio.run_coroutine_threadsafe(g(), loop)",
    ],
)
def test_the_guard_sees_it(text: str):
    assert len(dropped(parse(PACKAGE / "x.py", text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "ref = actor.ping.remote()",
        "async def f():\n    await actor.ping.remote()",
        "refs = [a.ping.remote() for a in actors]",
        "group.create_task",
        "ray.get(actor.ping.remote())",
    ],
)
def test_the_guard_lets_pass(text: str):
    assert dropped(parse(PACKAGE / "x.py", text)) == []
