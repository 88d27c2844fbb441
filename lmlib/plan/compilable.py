"""An experiment that can be compiled with what is installed here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from lmlib.experiment import Experiment
from lmlib.plan.targets import Target

_NO_CUDNN = (
    "cuDNN is not installed here: planned with attention='blockwise' in its place, which is slower "
    "than what will run; pip install nvidia-cudnn-cu12"
)


def compilable(experiment: Experiment, target: Target) -> tuple[Experiment, tuple[str, ...]]:
    """`experiment`, or one as near to it as can be compiled, and remarks on what differs."""
    if target.accelerator.platform != "cuda" or _has_cudnn():
        return experiment, ()
    if experiment.abstract_model().attention not in ("auto", "cudnn"):
        return experiment, ()
    model = functools.partial(experiment.model, attention="blockwise")
    return dataclasses.replace(experiment, model=model), (_NO_CUDNN,)


def _has_cudnn() -> bool:
    """Whether JAX finds the library, which it needs to compile for absent GPUs too."""
    query = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(attend, query, query, query)
    except RuntimeError:
        return False
    return True
