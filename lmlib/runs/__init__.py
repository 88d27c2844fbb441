"""Runs as they lie on the disk: what was set, what was measured, how it ended. Needs no JAX."""

from lmlib.runs.run import Run, find_runs, read_run, runs

__all__ = ["Run", "find_runs", "read_run", "runs"]
