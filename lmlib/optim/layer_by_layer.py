"""Transformations of optax's on stacked layers, with the updates of the same layers apart.

One that takes an array's norm, factors its moments or orthogonalises it must get one layer's array.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from lmlib.models.weights import fan_in, weight
from lmlib.parallel.axes import map_weights

_SHAPE = (2, 4, 3)  # of what is tried: layers, rows, columns
# Of the first layer's gradients, step by step: NaN shows what moves between layers.
_FACTORS = (1.0, 1.0, 1e4, 1e-3, np.nan, 1.0)


def layer_by_layer(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """`transformation`, mapped by `jax.vmap` over the layers of each group of weights with equal
    stacked axes. The state is a tuple of the groups' states, with those axes in front."""

    def init(model: Any) -> tuple[Any, ...]:
        groups = _groups(model)
        return tuple(_mapped(transformation.init, n)(eqx.filter(model, of)) for n, of in groups)

    def update(updates: Any, state: Any, model: Any = None) -> tuple[Any, tuple[Any, ...]]:
        made = [
            _mapped(transformation.update, n)(eqx.filter(updates, of), each, eqx.filter(model, of))
            for (n, of), each in zip(_groups(model), state, strict=True)
        ]
        updated, states = zip(*made, strict=True)
        return eqx.combine(*updated), states

    return optax.GradientTransformation(init, update)


def _groups(model: Any) -> list[tuple[int, Any]]:
    """The number of stacked axes of each group, and the mask of its weights."""
    sizes: dict[str, tuple[int, ...]] = {}
    map_weights(lambda one, array: sizes.update({one.path: array.shape[: one.stacked]}), model)

    def mask(of: tuple[int, ...]) -> Any:
        return map_weights(lambda one, _: sizes[one.path] == of, model)

    return [(len(of), mask(of)) for of in sorted({*sizes.values()})]


def _mapped(function: Any, times: int) -> Any:
    return _mapped(jax.vmap(function), times - 1) if times else function


class _Small(eqx.Module):
    matrix: Float[Array, "embed mlp"] = weight(fan_in("embed"))
    absent: None = None  # as weights of other groups are


def acts_on_each_layer(transformation: optax.GradientTransformation) -> bool:
    """True if `layer_by_layer(transformation)` makes the updates that `transformation` makes of
    layers apart, as tried on two; false if `transformation` makes them of stacked layers.

    The latter holds if numbers of all weights count, such as a norm, and each array is updated
    number by number; or if it adds random numbers, which differ, and updates number by number.

    Raises:
      ValueError: if neither form makes them.
    """
    random = np.random.default_rng(0)
    weights, mean = random.normal(size=(2, *_SHAPE))
    calm = mean + 0.1 * random.normal(size=(len(_FACTORS), *_SHAPE))
    wild = calm * np.stack([_FACTORS, np.ones(len(_FACTORS))], axis=1)[..., None, None]

    def updates(form: Any, gradients: Any, apart: bool = False) -> np.ndarray:
        def model_of(arrays: Any) -> Any:
            return tuple(map(_Small, arrays)) if apart else jax.vmap(_Small)(arrays)

        def step(carry: Any, gradient: Any) -> Any:
            model, state = carry
            made, after = form.update(model_of(gradient), state, model)
            if _shapes(made) != _shapes(model) or _shapes(after) != _shapes(state):
                raise ValueError("updates have other shapes than weights, or change the state's")
            each = jnp.reshape(jnp.stack(jax.tree.leaves(made)), _SHAPE)
            return (optax.apply_updates(model, made), after), each

        model = model_of(jnp.asarray(weights))
        run = jax.jit(lambda: jax.lax.scan(step, (model, form.init(model)), gradients)[1])
        with jax.default_matmul_precision("highest"):
            return np.asarray(run())

    expected = updates(transformation, wild, apart=True)
    if _agree(updates(layer_by_layer(transformation), wild), expected):
        return True
    together = updates(transformation, wild)
    if _agree(together, expected) or _agree(together[:, 1], updates(transformation, calm)[:, 1]):
        return False
    raise ValueError(
        "its updates of stacked layers are not those of layers apart, whether it gets one layer or "
        "all. It combines numbers of one array with numbers of all, or with random ones: leave one "
        "of them out (from_optax itself clips by the norm of all)"
    )


def _shapes(tree: Any) -> Any:
    return [x.shape for x in jax.tree.leaves(tree)]


def _agree(some: np.ndarray, others: np.ndarray) -> bool:
    """True if arrays are equal up to rounding, with NaN in the same places."""
    size = np.nanmax(np.abs(others), axis=(-2, -1), keepdims=True, initial=0)
    return np.allclose(some, others, rtol=0, atol=1e-3 * size, equal_nan=True)
