"""Transformations of optax's on stacked layers, with the updates of the same layers apart.

One that takes an array's norm, factors its moments or orthogonalises it must get one layer's array.
"""

from collections.abc import Callable
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
# The first layer's gradients are multiplied by these, step by step: what moves between layers shows
# above any threshold, and after NaN even if it has not moved yet.
_FACTORS = (1.0, 1.0, 1e4, 1e-3, np.nan, 1.0)
_ROUNDING = 1e-3  # of a layer's largest number


def layer_by_layer(
    transformation: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`transformation`, mapped over stacked layers by `jax.vmap`.

    Weights whose stacked axes have equal sizes form a group. The state is a tuple with the state of
    each group, whose arrays have the stacked axes in front.
    """

    def init(model: Any) -> tuple[Any, ...]:
        groups = _groups(model)
        return tuple(_mapped(transformation.init, n)(eqx.filter(model, of)) for n, of in groups)

    def update(
        updates: Any, state: tuple[Any, ...], model: Any = None, **others: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        made = [
            _mapped(transformation.update, n)(eqx.filter(updates, of), each, eqx.filter(model, of))
            for (n, of), each in zip(_groups(model), state, strict=True)
        ]
        updated, states = zip(*made, strict=True)
        return eqx.combine(*updated), states

    return optax.GradientTransformationExtraArgs(init, update)


def _groups(model: Any) -> list[tuple[int, Any]]:
    """The number of stacked axes of each group, and the mask of its weights."""
    sizes: dict[str, tuple[int, ...]] = {}
    map_weights(lambda one, array: sizes.update({one.path: array.shape[: one.stacked]}), model)

    def mask(of_group: tuple[int, ...]) -> Any:
        return map_weights(lambda one, _: sizes[one.path] == of_group, model)

    return [(len(of_group), mask(of_group)) for of_group in sorted({*sizes.values()})]


def _mapped(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    for _ in range(times):
        function = jax.vmap(function)
    return function


class _Small(eqx.Module):
    matrix: Float[Array, "embed mlp"] = weight(fan_in("embed"))
    absent: None = None  # as in the models of groups


def small_model() -> Any:
    """Shapes of two stacked layers."""
    return jax.eval_shape(jax.vmap(_Small), jnp.zeros(_SHAPE))


def acts_on_each_layer(transformation: optax.GradientTransformation) -> bool:
    """Whether `layer_by_layer(transformation)` makes the updates that `transformation` makes of
    layers apart, as tried on two; if not, `transformation` makes them of stacked layers too.

    The latter holds if numbers of all weights count, such as a norm, and each array is updated
    number by number. Random numbers differ between the forms: what adds them must update number by
    number.

    Raises:
      ValueError: if neither form makes them.
    """
    random = np.random.default_rng(0)
    weights, mean = random.normal(size=(2, *_SHAPE)).astype("f")
    gradients = mean + 0.1 * random.normal(size=(len(_FACTORS), *_SHAPE)).astype("f")
    wild = gradients.copy()
    wild[:, 0] *= np.reshape(_FACTORS, (-1, 1, 1))
    together, apart = jax.vmap(_Small), lambda weights: tuple(map(_Small, weights))

    def updates(form: Any, model_of: Any, gradients: Any) -> np.ndarray:
        def step(carry: Any, gradient: Any) -> Any:
            model, state = carry
            made, state = form.update(model_of(gradient), state, model)
            each = jnp.reshape(jnp.stack(jax.tree.leaves(made)), _SHAPE)
            return (optax.apply_updates(model, made), state), each

        def run(weights: Any, gradients: Any) -> Any:
            model = model_of(weights)
            return jax.lax.scan(step, (model, form.init(model)), gradients)[1]

        with jax.default_matmul_precision("highest"):
            return np.asarray(jax.jit(run)(weights, gradients))

    expected = updates(transformation, apart, wild)
    if _agree(updates(layer_by_layer(transformation), together, wild), expected):
        return True
    of_all, of_calm = (updates(transformation, together, each) for each in (wild, gradients))
    if _agree(of_all, expected) or _agree(of_all[:, 1], of_calm[:, 1]):
        return False
    raise ValueError(
        "its updates of stacked layers differ from those of the layers apart, whether it gets one "
        "layer or all. It combines numbers of one array with numbers of all, or with random ones: "
        "leave one of them out (from_optax itself clips by the norm of all)"
    )


def _agree(some: np.ndarray, others: np.ndarray) -> bool:
    """Whether they are equal up to rounding, with NaN in the same places."""
    size = np.nanmax(np.abs(others), axis=(-2, -1), keepdims=True, initial=0)
    return np.allclose(some, others, rtol=0, atol=_ROUNDING * size, equal_nan=True)
