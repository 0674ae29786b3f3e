"""Version checks: one pin, one readable error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from partial_rollout.errors import VersionError
from partial_rollout.integrations import verl_compat
from partial_rollout.integrations.verl_compat import Requirement

if TYPE_CHECKING:
    from pathlib import Path

FITTING = {"verl": "0.9.1", "vllm": "0.24.0", "TransferQueue": "0.1.11", "tensordict": "0.10.0", "ray": "2.60.0"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions a test can change; a fitting GPU installation at first."""
    versions = dict(FITTING)
    monkeypatch.setattr(verl_compat, "installed_version", versions.get)
    return versions


def test_verl_is_pinned_by_the_file_at_the_root(repository: Path):
    pin = (repository / verl_compat.REQUIREMENT_FILE).read_text(encoding="utf-8").strip()
    assert pin == f"verl=={verl_compat.required_verl().prefix}"


def test_verl_is_pinned_nowhere_else(repository: Path):
    lists = [*(repository / "requirements").glob("*.txt"), repository / "pyproject.toml"]
    assert [path.name for path in lists if "verl==" in path.read_text(encoding="utf-8")] == []


def test_a_fitting_installation_passes(installed: dict[str, str]):
    assert verl_compat.check_versions() == installed


def test_the_cpu_build_has_its_own_vllm(installed: dict[str, str]):
    installed["vllm"] = "0.28.0+cpu"
    assert verl_compat.check_versions()["vllm"] == "0.28.0+cpu"


@pytest.mark.parametrize(
    ("name", "found", "wanted"),
    [
        ("verl", "0.9.0", "0.9.1"),
        ("verl", "0.9.10", "0.9.1"),
        ("vllm", "0.28.0", "0.24"),
        ("vllm", "0.24.0+cpu", "0.28"),
        ("TransferQueue", "0.1.10", "0.1.11"),
        ("tensordict", "0.11.0", "0.10"),
        ("ray", "3.0.0", "2"),
    ],
)
def test_another_version_is_refused_with_the_way_out(installed: dict[str, str], name: str, found: str, wanted: str):
    installed[name] = found
    with pytest.raises(VersionError, match=f"found {name} .*{found.split('+')[0]}.* needs {name} {wanted}; install it"):
        verl_compat.check_versions()


def test_a_missing_package_is_named(installed: dict[str, str]):
    del installed["TransferQueue"]
    with pytest.raises(VersionError, match=r"\(not installed\).*: pip install TransferQueue"):
        verl_compat.check_versions()


@pytest.mark.parametrize(
    ("prefix", "version", "accepted"),
    [("0.24", "0.24.1", True), ("0.24", "0.240.0", False), ("0.28.0", "0.28.0+cpu", True), ("2", "20.1", False)],
)
def test_versions_are_compared_by_parts(prefix: str, version: str, accepted: bool):
    assert Requirement("x", prefix, "").accepts(version) is accepted


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = verl_compat.Nothing
