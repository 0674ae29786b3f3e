"""When `dying_schedulers` end an engine core; apart from them, since they need vLLM."""

STEP = 3
NUM_DEATHS = 9
"""One more than an engine is started again within a step."""
