"""Optimizers, schedules, and which weights train at which rate."""

from lmlib.optim.adamw import adamw
from lmlib.optim.average import WeightAverage
from lmlib.optim.from_optax import from_optax
from lmlib.optim.muon import muon
from lmlib.optim.optimizer import Optimizer, as_declared, decay_mask
from lmlib.optim.power import warmup_power_decay
from lmlib.optim.schedules import (
    Schedule,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_stable_decay,
)
from lmlib.optim.transfer import CompleteP

__all__ = [
    "CompleteP",
    "Optimizer",
    "Schedule",
    "WeightAverage",
    "adamw",
    "as_declared",
    "decay_mask",
    "from_optax",
    "muon",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
    "warmup_power_decay",
    "warmup_stable_decay",
]
