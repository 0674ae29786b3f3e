"""How benchmarks store what they measure: as `partial_rollout.advise` does."""

from partial_rollout.advise.result import about_run, circumstances, devices, raw_path, read_result, store, versions

__all__ = ["about_run", "circumstances", "devices", "raw_path", "read_result", "store", "versions"]
