"""Language-model pretraining in JAX: what a notebook needs."""

from lmlib.compute import Compute
from lmlib.describe import describe
from lmlib.experiment import Experiment
from lmlib.generate import sample
from lmlib.losses import Objective, batch_loss
from lmlib.models.decoder import Decoder
from lmlib.models.families.llama import llama
from lmlib.models.protocol import Context, whole_rows
from lmlib.optim import adamw
from lmlib.parallel.mesh import make_mesh

__all__ = [
    "Compute",
    "Context",
    "Decoder",
    "Experiment",
    "Objective",
    "adamw",
    "batch_loss",
    "describe",
    "llama",
    "make_mesh",
    "sample",
    "whole_rows",
]
