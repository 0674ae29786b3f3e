"""Steps in which `hanging_loss` hangs; apart from it, since who imports it gives verl another loss."""

RANK_IN, QUEUE_IN = 2, 3
