"""Language-model pretraining in JAX: the names that a notebook needs.

Names and modules of lmlib are imported on first use, so that programs that only read data start
without JAX.
"""

import functools
import importlib
import pkgutil
from typing import Any

_NAMES = {
    "compute": "Compute",
    "experiment": "Experiment",
    "generate": "Generator Sampling",
    "inspect": "Inspector",
    "inspect.description": "describe",
    "losses.distillation": "Distillation",
    "losses.dpo": "DPO",
    "losses.next_token": "NextToken batch_loss",
    "models.context": "Context whole_rows",
    "models.decoder": "Decoder",
    "models.families.llama": "llama",
    "optim.adamw": "adamw",
    "parallel.mesh": "make_mesh",
    "state": "Training new_state",
    "train": "make_step",
}
_HOMES = {name: f"lmlib.{home}" for home, names in _NAMES.items() for name in names.split()}
__all__ = [*_HOMES]
_MODULES = frozenset(module.name for module in pkgutil.iter_modules(__path__))


@functools.cache
def _choose_devices() -> None:
    """Disables plugins without hardware, quietly, before JAX starts them."""
    from lmlib.hardware.detection import use_cpu_if_alone

    use_cpu_if_alone()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        _choose_devices()
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"lmlib.{name}")
    raise AttributeError(f"module 'lmlib' has no attribute {name!r}")


def __dir__() -> list[str]:
    """All names and modules, imported or not, for tab completion."""
    return sorted({*__all__, *_MODULES})
