"""The tree of errors is drawn at the head of errors.py as it is."""

from __future__ import annotations

import inspect
import re

from partial_rollout import errors

BRANCH = re.compile(r"^(?P<indent>[│ ]*)[├└]── (?P<name>\w+)")
INDENT = len("│   ")


def drawn() -> set[tuple[str, str]]:
    """(class, base) of every branch of the drawing."""
    path, found = ["PartialRolloutError"], set()
    for branch in map(BRANCH.match, (errors.__doc__ or "").splitlines()):
        if branch:
            depth = len(branch["indent"]) // INDENT
            path[depth + 1 :] = [branch["name"]]
            found.add((branch["name"], path[depth]))
    return found


def test_the_drawing_has_every_error_below_its_base() -> None:
    classes = [item for _, item in inspect.getmembers(errors, inspect.isclass) if item.__module__ == errors.__name__]
    real = {(item.__name__, item.__bases__[0].__name__) for item in classes if item is not errors.PartialRolloutError}
    assert drawn() == real
