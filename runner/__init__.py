"""Runs experiments: `python -m runner`, or from Python `from runner import fit`."""

from runner.fitting import Result, fit

__all__ = ["Result", "fit"]
