"""Upcycling: turns a dense model into an equivalent mixture whose experts copy its MLPs.

Source: Komatsuzaki et al. 2023, arXiv:2212.05055, §3.

Shapes: X experts, E embed, F mlp.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.mlps import Gate, GatedExperts, geglu, swiglu
from lmlib.models.matrices.lora import has_adapters
from lmlib.models.parts.mlp import Activation, GatedMLP, silu
from lmlib.models.parts.ungated_mlp import gelu_tanh
from lmlib.models.weights import fold_in_name
from lmlib.parallel.axes import M
from lmlib.parallel.mesh import on_mesh_of

GATES: Mapping[Activation, Gate] = {silu: swiglu, gelu_tanh: geglu}


def upcycled(
    of: Callable[..., Any], experts: int = 8, top: int = 2, *, key: PRNGKeyArray, **sizes: int
) -> Any:
    """Makes a model with `of(key=…)` and upcycles it, for `Experiment.model`.

    model=fdl.Partial(upcycled, of=fdl.Partial(llama, …), experts=8, top=2)
    """
    return upcycle(of(key=key, **sizes), experts, top, key=fold_in_name(key, "upcycled"))


def upcycle(model: M, experts: int = 8, top: int = 2, *, key: PRNGKeyArray) -> M:
    """Replaces each gated MLP of `model` by a `Mixture` of copies of it.

    Routers get new weights. A token's shares add up to 1, so the result computes the same as
    `model`.

    Raises ValueError if the model is a mixture already, has adapters or no gated MLP, `top` is
    below 2, or `experts` and `top` do not fit.
    """
    if top < 2:
        raise ValueError(
            f"top must be at least 2, got {top}: shares add up to 1, so that of a single expert is "
            "always 1, and its router would get no gradient from the loss"
        )
    if has_adapters(model):
        raise ValueError("the model has adapters: merge them first (`lmlib.adapters.merged`)")
    mlps = [one for one in jax.tree.leaves(model, is_leaf=_is_mlp) if _is_mlp(one)]
    if any(isinstance(one, Mixture) for one in mlps):
        raise ValueError("the model is a mixture of experts already")
    if not any(isinstance(one, GatedMLP) for one in mlps):
        raise ValueError("the model has no gated mlps, of which experts could be copies")

    def visit(keys: Any, one: Any) -> Any:
        if not isinstance(one, GatedMLP):
            return one
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        return _mixture(one, experts, top, fold_in_name(key, path))

    with on_mesh_of(model):
        return jax.tree_util.tree_map_with_path(visit, model, is_leaf=_is_mlp)


def _is_mlp(node: Any) -> bool:
    return isinstance(node, GatedMLP | Mixture)


def _mixture(mlp: GatedMLP, experts: int, top: int, key: PRNGKeyArray) -> Mixture:
    if mlp.activation not in GATES:
        raise ValueError(
            f"its mlps have {mlp.activation.__name__}, and experts one of "
            f"{', '.join(activation.__name__ for activation in GATES)}"
        )
    *stacked, embed, size = mlp.gate.shape

    def make(key: PRNGKeyArray) -> Mixture:
        mlps = functools.partial(GatedExperts, gated=GATES[mlp.activation])
        scale = mlp.residual_scale
        return Mixture(embed, size, scale, experts=experts, top=top, mlps=mlps, key=key)

    def of_layers(function: Callable[[PRNGKeyArray], Any]) -> Callable[[PRNGKeyArray], Any]:
        return functools.reduce(lambda each, _: jax.vmap(each), stacked, function)

    def copies(w_EF: Float[Array, "..."]) -> Float[Array, "..."]:
        shape = (*w_EF.shape[:-2], experts, *w_EF.shape[-2:])
        return jnp.broadcast_to(jnp.expand_dims(w_EF, -3), shape)

    keys = jax.random.split(key, tuple(stacked))
    shapes = jax.eval_shape(of_layers(make), keys)
    router = of_layers(lambda key: make(key).router)(keys)
    return eqx.tree_at(
        lambda one: (one.router, one.experts.gate, one.experts.up, one.experts.down),
        shapes,
        (router, *map(copies, (mlp.gate, mlp.up, mlp.down))),
    )
