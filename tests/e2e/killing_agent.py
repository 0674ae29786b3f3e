"""An agent loop that crashes, and the process with it."""

from __future__ import annotations

import os
import signal
from typing import Any

from benchmarks.trace_agent import LengthTraceAgentLoop


class KillingAgentLoop(LengthTraceAgentLoop):
    """Generates as recorded, and then ends its worker."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Return nothing."""
        await super().run(sampling_params, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
