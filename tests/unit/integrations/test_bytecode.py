"""Whether Python would compile a package anew in each process."""

from __future__ import annotations

import compileall
import os
import sys
from typing import TYPE_CHECKING

import pytest

from partial_rollout.integrations import bytecode
from partial_rollout.integrations.bytecode import compiled_each_time

if TYPE_CHECKING:
    from pathlib import Path

NAME = "a_large_package"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('it is not to be imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    return folder


def test_a_package_whose_bytecode_will_be_stored_is_compiled_once(package: Path) -> None:
    assert compiled_each_time([NAME, "no_package_at_all"]) == {}


def test_one_is_compiled_in_each_process_where_nothing_may_be_stored(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert compiled_each_time([NAME]) == {NAME: package}
    monkeypatch.setattr(bytecode, "compiled_each_time", lambda: {NAME: package})
    assert f"each process compiles {NAME} anew" in bytecode.remark()
    assert bytecode.remark().endswith(f" -m compileall -q {package}")
    assert "PYTHONDONTWRITEBYTECODE is set" in bytecode.remark()


def test_one_is_compiled_in_each_process_where_its_folder_cannot_be_written(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda folder, _: folder != package)
    assert compiled_each_time([NAME]) == {NAME: package}


def test_bytecode_that_is_there_is_enough(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compileall.compile_dir(package, quiet=1)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert compiled_each_time([NAME]) == {}
    monkeypatch.setattr(bytecode, "compiled_each_time", lambda: compiled_each_time([NAME]))
    assert not bytecode.remark()
