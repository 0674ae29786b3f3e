"""Tools for this repository: set-up, documents."""
