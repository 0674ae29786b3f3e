"""A small task, tokenizer, starting checkpoint and reward that train in minutes on a CPU."""
