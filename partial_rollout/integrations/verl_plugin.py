"""Loaded by verl in every process through the entry-point group `verl.plugins`."""
