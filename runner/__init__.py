"""Runs experiments: `python -m runner`, or from Python `from runner import fit, load`."""

import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.inference.loaded import load
    from runner.training.fit import Result, fit
    from runner.training.options import Options

__all__ = ["Options", "Result", "fit", "load"]
_HOMES = {
    "Options": "runner.training.options",
    "Result": "runner.training.fit",
    "fit": "runner.training.fit",
    "load": "runner.inference.loaded",
}
IMPORTED_AT = time.time()  # seconds since the epoch; on the command line, when the process started


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used, so that a supervising process stays light.

    In a notebook, JAX has not started its devices yet; plugins without hardware are turned off.
    """
    if name in _HOMES:
        from lmlib.hardware.detection import use_cpu_if_alone

        use_cpu_if_alone()
        found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
