"""Any optimizer of optax's, with its state laid out as the weights are."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from lmlib.optim.optimizer import Decays, Optimizer, as_declared, decay_mask
from lmlib.optim.schedules import MakeSchedule, warmup_cosine
from lmlib.optim.state_layout import state_layout

_MASKS = ("mask", "weight_decay_mask")  # what optax's optimizers call which weights decay


def from_optax(
    steps: int,
    peak_lr: float,
    make: Callable[..., optax.GradientTransformation],
    schedule: MakeSchedule = warmup_cosine,
    clip_norm: float | None = 1.0,
    decays: Decays = as_declared,
) -> Optimizer:
    """An optimizer of optax's, such as `optax.lion`, after clipping by global norm.

    Each array of its state is split as its weight is: see `lmlib.optim.state_layout`. XLA decides
    what is sent for an update that takes more than each weight's own numbers.

    Args:
      steps: length of the schedule; the run supplies it.
      peak_lr: the schedule's highest learning rate.
      make: `make(learning_rate=…)` makes it; its other settings are given by a partial, as
        `functools.partial(optax.lion, b1=0.95)`, and stay in the program.
      schedule: as in `lmlib.optim.adamw.adamw`: its numbers are the hyperparameters.
      clip_norm: largest global gradient norm; `None` does not clip.
      decays: which weights decay, if `make` takes a mask of them; optax's without one decay all, if
        any.

    Raises:
      ValueError: for a number that is out of range, or a `make` without `learning_rate`. When the
        state is made: if it cannot be laid out, or an update needs more than gradients, state and
        weights.
    """
    if steps < 1 or not 0 < peak_lr < math.inf:
        raise ValueError(f"steps and peak_lr must be positive, got {steps} and {peak_lr}")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be positive, or None, got {clip_norm}")
    name, known = _named(make), inspect.signature(make).parameters
    if "learning_rate" not in known:
        raise ValueError(
            f"{name} takes no learning_rate: give from_optax a function of one, such as optax.lion"
        )
    masked = [mask for mask in _MASKS if mask in known and known[mask].default is None]
    masks = {mask: functools.partial(decay_mask, decays=decays) for mask in masked}
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    made = schedule(peak_lr, steps)

    def chain(learning_rate: Any) -> optax.GradientTransformationExtraArgs:
        return optax.chain(clip, make(learning_rate=learning_rate, **masks))

    try:
        whole = chain(made)
    except TypeError as error:
        raise ValueError(f"{name} cannot be made of a schedule: {error}") from error

    def init(model: Any) -> optax.OptState:
        weights = _shapes(model)
        state = _checked_state(name, whole, weights)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return whole.init(model)
        layout = state_layout(state, model, mesh)
        return jax.sharding.auto_axes(whole.init, out_sharding=layout)(model)

    def update(
        updates: Any,
        state: optax.OptState,
        model: Any = None,
        *,
        learning_rate: optax.Schedule = made,
        **others: Any,
    ) -> tuple[Any, optax.OptState]:
        # A function is no argument of a program; the numbers of a schedule are.
        numbers, rest = eqx.partition(learning_rate, eqx.is_array_like)
        numbers = jax.tree.map(jnp.asarray, numbers)

        def updated(updates: Any, state: Any, model: Any, numbers: Any) -> tuple[Any, Any]:
            return chain(eqx.combine(numbers, rest)).update(updates, state, model)

        if not jax.sharding.get_abstract_mesh().empty:
            layout = _partitions(model), _partitions(state)
            updated = jax.sharding.auto_axes(updated, out_sharding=layout)
        return updated(updates, state, model, numbers)

    def rate(step: Any, *, learning_rate: optax.Schedule = made, **others: Any) -> Array:
        return jnp.asarray(learning_rate(step))

    return Optimizer(
        optax.GradientTransformationExtraArgs(init, update),
        rate,
        decays if masked else (lambda weight: False),
        hyperparameters={"learning_rate": made},
    )


def _named(make: Callable[..., Any]) -> str:
    make = make.func if isinstance(make, functools.partial) else make
    return getattr(make, "__name__", repr(make))


def _shapes(tree: Any) -> Any:
    """Shapes and dtypes alone."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _partitions(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, tree)


def _checked_state(
    name: str, transformation: optax.GradientTransformationExtraArgs, weights: Any
) -> Any:
    """Shapes and dtypes of the state for `weights`.

    Raises ValueError if it cannot be made, an update cannot, or that leaves another kind of state.
    """
    doing = "to make its state"
    try:
        state = jax.eval_shape(transformation.init, weights)
        doing = "to update by gradients, its state and the weights alone"
        _, after = jax.eval_shape(transformation.update, weights, state, weights)
    except Exception as error:  # optax's and JAX's
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name} cannot be used here: {doing} fails: {reason}") from error
    if _shapes(after) != _shapes(state):
        raise ValueError(
            f"{name} cannot be used here: an update changes the shapes or dtypes of its state, and "
            "so a compiled step could not make the next"
        )
    return state
