"""Runs on the disk: their settings, numbers and states. Needs no JAX."""

from lmlib.runs.run import Run, find_runs, read_run, runs

__all__ = ["Run", "find_runs", "read_run", "runs"]
