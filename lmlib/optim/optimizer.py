"""The interface of optimizers, and code that lmlib's optimizers share."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from lmlib.optim.schedules import MakeSchedule
from lmlib.parallel.axes import Weight, map_weights

Decays = Callable[[Weight], bool]
Hyperparameters = Mapping[str, Any]


class Optimizer(NamedTuple):
    """Computes updates from gradients.

    `hyperparameters` are extra arguments of `transformation.update` (as in optax) and of
    `learning_rate`, by name. Numbers in them, which may be leaves of trees, are arguments of the
    compiled step: different numbers do not need another program.
    """

    transformation: optax.GradientTransformation
    learning_rate: Callable[..., Array]  # the rate at a step
    decays: Decays  # True for a weight that decays
    # Float32 scalars by name, from the transformation's state after a step.
    metrics: Callable[[optax.OptState], dict[str, Array]] = lambda state: {}
    hyperparameters: Hyperparameters = MappingProxyType({})


def as_declared(weight: Weight) -> bool:
    """True if a weight decays, as its module declares: matrices and tables, usually."""
    return weight.declaration.decays


def scaled_adam(
    b1: float, b2: float, epsilon: float, scaled: Any, dtype: str = "float32", **fractions: float
) -> optax.GradientTransformation:
    """Adam's direction, with the factors of a `lmlib.optim.transfer.Scaled` or `None`."""
    check_adam(b1, b2, epsilon, **fractions)
    adam = optax.scale_by_adam(b1, b2, epsilon, mu_dtype=dtype)
    if b1 == 0:  # needs no first moment
        adam = optax.scale_by_rms(b2, epsilon, eps_in_sqrt=False, bias_correction=True)
    return adam if scaled is None else scaled.of_adam(adam)


def check_adam(b1: float, b2: float, epsilon: float, **fractions: float) -> None:
    """Raises ValueError if epsilon is not positive, or another number not in [0, 1)."""
    for name, fraction in {"b1": b1, "b2": b2, **fractions}.items():
        if not 0 <= fraction < 1:
            raise ValueError(f"{name} must be at least 0 and less than 1, got {fraction}")
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be a positive number, got {epsilon}")


def with_decoupled_decay(
    direction: optax.GradientTransformation, steps: int, peak_lr: float, schedule: MakeSchedule,
    weight_decay: float, clip_norm: float | None, decays: Decays, cautious: bool, scaled: Any,
) -> Optimizer:  # fmt: skip
    """Updates of -rate · (direction + weight_decay · weight), after clipping by global norm.

    `direction` is computed from clipped gradients; other arguments are as in `adamw`. The
    hyperparameters are `weight_decay` and the schedule's numbers. Raises ValueError for a number
    that is out of range. Source: Loshchilov & Hutter 2019, arXiv:1711.05101, equation 12.
    """
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be a number of at least 0, got {weight_decay}")
    made, clip = rates_and_clipping(steps, peak_lr, schedule, clip_norm)
    if scaled is not None:
        clip = optax.chain(scaled.before_clipping(), clip)

    def chain(learning_rate: optax.Schedule, weight_decay: Any) -> optax.GradientTransformation:
        decayed = _decay(weight_decay, decays, cautious)
        return optax.chain(clip, direction, decayed, optax.scale_by_learning_rate(learning_rate))

    def update(
        updates: Any, state: Any, model: Any = None, *, learning_rate: optax.Schedule = made,
        weight_decay: Any = weight_decay, **others: Any,
    ) -> tuple[Any, optax.OptState]:  # fmt: skip
        return chain(learning_rate, weight_decay).update(updates, state, model)

    def rate(step: Any, *, learning_rate: optax.Schedule = made, **others: Any) -> Array:
        return jnp.asarray(learning_rate(step))

    return Optimizer(
        optax.GradientTransformationExtraArgs(chain(made, weight_decay).init, update),
        rate,
        decays,
        hyperparameters={"learning_rate": made, "weight_decay": float(weight_decay)},
    )


def rates_and_clipping(
    steps: int, peak_lr: float, schedule: MakeSchedule, clip_norm: float | None
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """Returns the schedule, and clipping by global norm; ValueError for a number out of range."""
    if steps < 1 or not 0 < peak_lr < math.inf:
        raise ValueError(f"steps and peak_lr must be positive, got {steps} and {peak_lr}")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be positive, or None, got {clip_norm}")
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    return schedule(peak_lr, steps), clip


def by_weight(factor: Callable[[Weight], float]) -> optax.GradientTransformation:
    """Multiplies the update of each weight by the weight's own factor."""

    def update(updates: Any, state: optax.EmptyState, model: Any = None) -> tuple[Any, Any]:
        def multiplied(weight: Weight, update: Array) -> Array:
            of_weight = factor(weight)
            return update if of_weight == 1 else update * of_weight

        return map_weights(multiplied, updates), state

    return optax.GradientTransformation(lambda model: optax.EmptyState(), update)


def _decay(weight_decay: Any, decays: Decays, cautious: bool) -> optax.GradientTransformation:
    """Adds weight_decay · weight to the direction of descent.

    If `cautious`, only where the direction has the weight's sign (Chen et al. 2025,
    arXiv:2510.12402).
    """

    def update(updates: Any, state: Any, model: Any = None) -> tuple[Any, Any]:
        def decayed(weight: Weight, update: Array, array: Array) -> Array:
            if not decays(weight):
                return update
            shrunk = weight_decay * array
            return update + (jnp.where(update * array > 0, shrunk, 0) if cautious else shrunk)

        named = map_weights(lambda weight, _: weight, updates)
        return jax.tree.map(decayed, named, updates, model), state

    return optax.GradientTransformation(lambda model: optax.EmptyState(), update)


def arrays_of(
    hyperparameters: Hyperparameters, mesh: Mesh, abstract: bool = False
) -> Hyperparameters:
    """Puts the numbers among the leaves, int32 or float32, on every device of `mesh`.

    Other leaves become `None`. If `abstract`, returns only shapes, dtypes and shardings. Raises
    OverflowError if an integer does not fit.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(number: Any) -> Any:
        value = np.asarray(number, jax.dtypes.canonicalize_dtype(np.asarray(number).dtype))
        if abstract:
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=everywhere)
        return jax.make_array_from_callback(value.shape, everywhere, lambda _: value)

    return jax.tree.map(placed, eqx.filter(dict(hyperparameters), eqx.is_array_like))


def with_arrays(hyperparameters: Hyperparameters, arrays: Hyperparameters) -> Hyperparameters:
    """Replaces the numbers of `hyperparameters` by `arrays`, which `arrays_of` returned."""
    return eqx.combine(arrays, eqx.filter(dict(hyperparameters), eqx.is_array_like, inverse=True))
