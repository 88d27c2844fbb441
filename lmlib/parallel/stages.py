"""What all devices along `stage` compute at once, each with layers of its own.

Arrays of stages have a leading axis that lies along `stage`. `each_stage` maps a function over it
(`jax.vmap`), which sees what one stage has. Layouts within do not name `stage`, and functions of
one device (`lmlib.parallel.collectives`) get its stage's part.
"""

from collections.abc import Callable
from typing import Any

import jax

_MAPPED = "stages"  # the axis that `jax.vmap` maps; the mesh's is another


def each_stage(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of each stage's part of its arguments, whose leading axes lie along `stage`."""
    return jax.vmap(function, axis_name=_MAPPED)


def again(in_a_stage_before: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, traced as what one stage computes, if it was so before: the rules of
    `jax.custom_vjp` are called when JAX has forgotten it."""
    if not in_a_stage_before or in_a_stage():
        return function
    return jax.vmap(function, in_axes=None, out_axes=None, axis_size=1, axis_name=_MAPPED)


def in_a_stage() -> bool:
    """Whether what is being traced is what one stage computes."""
    return is_mapped(_MAPPED)


def is_mapped(axis: str) -> bool:
    """Whether collectives may name `axis` in what is being traced."""
    try:
        jax.lax.axis_size(axis)
    except NameError:  # that JAX raises for an axis that nothing maps
        return False
    return True
