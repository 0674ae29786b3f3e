"""Who waits how long in a weight update, as shares of `weights.timeout_s`, which is an engine's own patience.

Ranks gather every tensor together, so while one of them waits, the healthy engines of the others wait too. Whatever a
rank can wait for in a row must therefore be shorter than what an engine bears, or it would fail with its neighbour.
"""

SENDER_SHARE = 0.5
"""A rank waits for its engine's worker: its hello, a free buffer, its confirmation."""
ANSWER_SHARE = 0.25
"""A rank waits for its server: to tell its address, to wake the engine up, to take notice of a lost update."""
