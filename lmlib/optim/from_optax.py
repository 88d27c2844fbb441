"""Any optimizer of optax's, applied layer by layer, with its state laid out as the weights are."""

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
from optax import contrib

from lmlib.optim.layer_by_layer import acts_on_each_layer, layer_by_layer
from lmlib.optim.optimizer import Decays, Optimizer, as_declared
from lmlib.optim.schedules import MakeSchedule, warmup_cosine
from lmlib.optim.state_layout import state_layout
from lmlib.optim.whole_matrices import APART, matrices_of
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.selection import named_weights

_MASKS = ("mask", "weight_decay_mask")  # what optax's optimizers call which weights decay
_MATRICES = "muon_weight_dimension_numbers"  # and what Muon calls the sides of its matrices
_LEFT = (None, True, inspect.Parameter.empty)  # what optax has for these, or nothing


def from_optax(
    steps: int,
    peak_lr: float,
    make: Callable[..., optax.GradientTransformation],
    schedule: MakeSchedule = warmup_cosine,
    clip_norm: float | None = 1.0,
    decays: Decays = as_declared,
) -> Optimizer:
    """An optimizer of optax's, such as `optax.lion`, after clipping by global norm.

    It updates each stacked layer as if its arrays were by themselves (`lmlib.optim.layer_by_layer`)
    and each array of its state is split as its weight is (`lmlib.optim.state_layout`). XLA decides
    what is sent for an update that takes more than each weight's own numbers.

    Args:
      steps: length of the schedule; the run supplies it.
      peak_lr: the schedule's highest learning rate.
      make: `make(learning_rate=…)` makes it; its other settings are given by a partial, as
        `functools.partial(optax.lion, b1=0.95)`, and stay in the program. A mask that is None or
        True, and the `muon_weight_dimension_numbers` of `optax.contrib.muon`, follow from what
        weights declare. A function of weights in it gets one layer of those that are stacked.
      schedule: as in `lmlib.optim.adamw.adamw`: its numbers are the hyperparameters.
      clip_norm: largest global gradient norm; `None` does not clip.
      decays: which weights decay, if `make` takes a mask of them; optax's without one decay all, if
        any.

    Raises:
      ValueError: for a number that is out of range, or a `make` without `learning_rate`; if an
        update needs more than gradients, state and weights, or differs from that of layers apart.
        When the state is made: if it cannot be laid out, or is Muon's without its argument.
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
    filled = {*_MASKS, _MATRICES} & {each for each in known if known[each].default in _LEFT}
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    made = schedule(peak_lr, steps)

    def transformation(learning_rate: Any, decays: Decays = as_declared) -> Any:
        given = {each: functools.partial(map_weights, lambda w, _: decays(w)) for each in _MASKS}
        given[_MATRICES] = functools.partial(map_weights, _muon_numbers)
        made = make(learning_rate=learning_rate, **{each: given[each] for each in filled})
        return optax.with_extra_args_support(made)

    try:
        trial = transformation(lambda count: 0.1)
    except TypeError as error:
        raise ValueError(f"{name} cannot be made of a schedule: {error}") from error
    apart = _tried(name, acts_on_each_layer, trial)

    def chain(learning_rate: Any, model: Any) -> optax.GradientTransformationExtraArgs:
        weights = named_weights(model)  # with their stacked axes
        each = transformation(learning_rate, lambda weight: decays(weights[weight.path]))
        return optax.chain(clip, layer_by_layer(each) if apart else each)

    def init(model: Any) -> optax.OptState:
        whole, weights = chain(made, model), _shapes(model)
        state = _tried(name, jax.eval_shape, whole.init, weights)
        _tried(name, jax.eval_shape, whole.update, weights, state, weights)
        if _MATRICES not in known and optax.tree.get_all_with_path(state, "MuonState"):
            raise ValueError(
                f"{name} has Muon in it, which would orthogonalize tables and heads, and no matrix "
                f"of three axes: let {name} take {_MATRICES} and give it to optax.contrib.muon"
            )
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
            return chain(eqx.combine(numbers, rest), model).update(updates, state, model)

        if not jax.sharding.get_abstract_mesh().empty:
            layout = _partitions(model), _partitions(state)
            updated = jax.sharding.auto_axes(updated, out_sharding=layout)
        return updated(updates, state, model, numbers)

    def rate(step: Any, *, learning_rate: optax.Schedule = made, **others: Any) -> Array:
        return jnp.asarray(learning_rate(step))

    return Optimizer(
        optax.GradientTransformationExtraArgs(init, update),
        rate,
        decays if filled.intersection(_MASKS) else (lambda weight: False),
        hyperparameters={"learning_rate": made},
    )


def _named(make: Callable[..., Any]) -> str:
    make = make.func if isinstance(make, functools.partial) else make
    return getattr(make, "__name__", repr(make))


def _tried(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # optax's and JAX's
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{name} cannot be used here, where updates follow from gradients, state and weights "
            f"alone: {reason}"
        ) from error


def _shapes(tree: Any) -> Any:
    """Shapes and dtypes alone."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _partitions(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, tree)


def _muon_numbers(weight: Weight, array: Any) -> contrib.MuonDimensionNumbers | None:
    """The axes of a matrix for Muon; `None`: Adam updates the weight."""
    form = matrices_of(weight, array.shape, APART)
    if form is None:
        return None
    kept = form.columns if form.summed == form.rows else form.rows
    return contrib.MuonDimensionNumbers(form.summed, kept)
