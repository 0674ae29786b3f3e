"""When `dying_schedulers` end an engine core; apart from them, since they need vLLM."""

STEP = 3
NUM_DEATHS = 11
"""More than an engine is started again within a step; what brings it back after the first ones is the step before."""
