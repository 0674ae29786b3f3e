"""What the documents say of the processes of a run is what the code does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from partial_rollout.runtime.processes import KINDS, Kind, Then, table

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.role)
def test_the_documents_say_what_becomes_of_a_run_without_it(kind: Kind, repository: Path) -> None:
    _, _, below = (repository / "docs/troubleshooting.md").read_text().partition("| process | killed |")
    lines = below.partition("\n\n")[0].splitlines()
    (row,) = [line for line in lines if line.startswith((f"| {kind.role} |", f"| {kind.role} ("))]
    _, _, killed, lost, _ = row.split("|")
    assert killed.strip().startswith(kind.then.value)
    assert lost.strip() == kind.lost


def test_the_roles_are_different() -> None:
    assert len({kind.role for kind in KINDS}) == len(KINDS)
    assert {kind.then for kind in KINDS} == set(Then)


def test_the_documents_say_who_notices_a_death_and_within_how_long(repository: Path) -> None:
    assert "\n".join(["", *table(), ""]) in (repository / "docs/troubleshooting.md").read_text()
