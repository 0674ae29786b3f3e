"""Loaded by verl in every process through the entry-point group `verl.plugins`.

Does nothing unless `VERL_PLATFORM=cpu`. verl logs a failing plugin at debug level and goes on, which ends much later
in an error about an unknown platform; so a failure here ends the process with its reason instead.
"""

import os
import sys
import traceback

PLATFORM_VARIABLE = "VERL_PLATFORM"


def load() -> None:
    """Install the CPU platform when it was asked for; end the process when that fails."""
    if os.environ.get(PLATFORM_VARIABLE, "").strip().lower() != "cpu":
        return
    try:
        from partial_rollout.integrations import cpu_platform

        cpu_platform.install()
    except Exception as error:  # noqa: BLE001 - reported and fatal, whatever it is
        traceback.print_exc(file=sys.stderr)
        raise SystemExit(f"partial_rollout: {PLATFORM_VARIABLE}=cpu, but the CPU platform failed: {error!r}") from error


load()
