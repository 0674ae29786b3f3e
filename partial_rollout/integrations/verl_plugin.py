"""Loaded by verl in every process through the entry-point group `verl.plugins`.

The plugin does nothing unless `VERL_PLATFORM=cpu`. If a plugin fails, verl logs it at debug level and goes on; much
later the run fails with an error about an unknown platform. So a failure here ends the process and says its reason.
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
    except Exception as error:  # noqa: BLE001 - whatever it is, it is printed and ends the process
        traceback.print_exc(file=sys.stderr)
        raise SystemExit(f"partial_rollout: {PLATFORM_VARIABLE}=cpu, but the CPU platform failed: {error!r}") from error


load()
