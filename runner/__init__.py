"""Runs experiments: `python -m runner`, or from Python `from runner import fit`."""

import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.training.fit import Result, fit
    from runner.training.options import Options

__all__ = ["Options", "Result", "fit"]
IMPORTED_AT = time.time()  # seconds since the epoch; on the command line, when the process started


def __getattr__(name: str) -> Any:
    """Imports `fit` when it is first asked for: a process that only supervises does without."""
    if name in __all__:
        home = "runner.training.options" if name == "Options" else "runner.training.fit"
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
