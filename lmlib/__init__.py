"""Language-model pretraining in JAX: the names that a notebook needs.

Names and modules of lmlib are imported on first use, so that programs that only read data start
without JAX.
"""

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmlib.compute import Compute as Compute
    from lmlib.experiment import Experiment as Experiment
    from lmlib.generate import Generator as Generator
    from lmlib.generate import Sampling as Sampling
    from lmlib.inspect import Inspector as Inspector
    from lmlib.inspect.description import describe as describe
    from lmlib.losses.distillation import Distillation as Distillation
    from lmlib.losses.dpo import DPO as DPO
    from lmlib.losses.next_token import NextToken as NextToken
    from lmlib.losses.next_token import batch_loss as batch_loss
    from lmlib.losses.preferences.cpo import CPO as CPO
    from lmlib.losses.preferences.ipo import IPO as IPO
    from lmlib.losses.preferences.kto import KTO as KTO
    from lmlib.losses.preferences.orpo import ORPO as ORPO
    from lmlib.losses.preferences.simpo import SimPO as SimPO
    from lmlib.models.decoder import Decoder as Decoder
    from lmlib.models.families.llama import llama as llama
    from lmlib.models.forward_context import ForwardContext as ForwardContext
    from lmlib.models.forward_context import single_document_context as single_document_context
    from lmlib.optim.adamw import adamw as adamw
    from lmlib.parallel.mesh import make_mesh as make_mesh
    from lmlib.state import Training as Training
    from lmlib.state import new_state as new_state
    from lmlib.train import make_step as make_step

_HOMES = {
    "CPO": "lmlib.losses.preferences.cpo",
    "DPO": "lmlib.losses.dpo",
    "IPO": "lmlib.losses.preferences.ipo",
    "KTO": "lmlib.losses.preferences.kto",
    "ORPO": "lmlib.losses.preferences.orpo",
    "SimPO": "lmlib.losses.preferences.simpo",
    "Compute": "lmlib.compute",
    "ForwardContext": "lmlib.models.forward_context",
    "Decoder": "lmlib.models.decoder",
    "Distillation": "lmlib.losses.distillation",
    "Experiment": "lmlib.experiment",
    "Generator": "lmlib.generate",
    "Inspector": "lmlib.inspect",
    "NextToken": "lmlib.losses.next_token",
    "Sampling": "lmlib.generate",
    "Training": "lmlib.state",
    "adamw": "lmlib.optim.adamw",
    "batch_loss": "lmlib.losses.next_token",
    "describe": "lmlib.inspect.description",
    "llama": "lmlib.models.families.llama",
    "make_mesh": "lmlib.parallel.mesh",
    "make_step": "lmlib.train",
    "new_state": "lmlib.state",
    "single_document_context": "lmlib.models.forward_context",
}
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
