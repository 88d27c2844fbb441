"""Runs experiments: `python -m runner`, or from Python `from runner import fit`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.fitting import Result, fit

__all__ = ["Result", "fit"]


def __getattr__(name: str) -> Any:
    """Imports `fit` when it is first asked for: a process that only supervises does without."""
    if name in __all__:
        return getattr(importlib.import_module("runner.fitting"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
