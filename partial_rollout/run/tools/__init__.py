"""Tools for verl's multi-turn agent loop."""
