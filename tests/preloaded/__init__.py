"""Ray's worker processes as forks of one process that has imported torch, vLLM and verl once.

A training job has eight worker processes of Ray, each of which imports the same 7,000 modules: half of what a short
job computes. Ray starts `client.py` where it would start `python` (the public option `py_executable` of its runtime
environment). The first client starts `nursery.py`, which imports everything and then forks a process for each client;
a client stands in for its process: the one ends when the other ends. The driver and vLLM's engine processes are
started as always.
"""
