"""Language-model pretraining in JAX: what a notebook needs.

Each name is imported when it is first asked for, so that what only reads data starts without JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmlib.compute import Compute
    from lmlib.description import describe
    from lmlib.experiment import Experiment
    from lmlib.generate import Generator, Sampling
    from lmlib.losses import DPO, Distillation, NextToken, batch_loss
    from lmlib.models.decoder import Decoder
    from lmlib.models.families.llama import llama
    from lmlib.models.protocol import Context, whole_rows
    from lmlib.optim import adamw
    from lmlib.parallel.mesh import make_mesh

__all__ = [
    "DPO",
    "Compute",
    "Context",
    "Decoder",
    "Distillation",
    "Experiment",
    "Generator",
    "NextToken",
    "Sampling",
    "adamw",
    "batch_loss",
    "describe",
    "llama",
    "make_mesh",
    "whole_rows",
]

_HOMES = {
    "DPO": "lmlib.losses",
    "Compute": "lmlib.compute",
    "Context": "lmlib.models.protocol",
    "Decoder": "lmlib.models.decoder",
    "Distillation": "lmlib.losses",
    "Experiment": "lmlib.experiment",
    "Generator": "lmlib.generate",
    "NextToken": "lmlib.losses",
    "Sampling": "lmlib.generate",
    "adamw": "lmlib.optim",
    "batch_loss": "lmlib.losses",
    "describe": "lmlib.description",
    "llama": "lmlib.models.families.llama",
    "make_mesh": "lmlib.parallel.mesh",
    "whole_rows": "lmlib.models.protocol",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lmlib' has no attribute {name!r}")
