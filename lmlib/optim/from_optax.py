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

from lmlib.optim.layer_by_layer import acts_on_each_layer, layer_by_layer, small_model
from lmlib.optim.optimizer import Decays, Optimizer, as_declared
from lmlib.optim.schedules import MakeSchedule, warmup_cosine
from lmlib.optim.state_layout import state_layout
from lmlib.optim.whole_matrices import APART, matrices_of
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.selection import named_weights

_MASKS = ("mask", "weight_decay_mask")  # what optax's optimizers call which weights decay
_MATRICES = "muon_weight_dimension_numbers"  # what Muon calls which weights are matrices


def from_optax(
    steps: int,
    peak_lr: float,
    make: Callable[..., optax.GradientTransformation],
    schedule: MakeSchedule = warmup_cosine,
    clip_norm: float | None = 1.0,
    decays: Decays = as_declared,
) -> Optimizer:
    """An optimizer of optax's, such as `optax.lion`, after clipping by global norm.

    Each stacked layer is updated as if its arrays were by themselves: see
    `lmlib.optim.layer_by_layer`. Each array of the state is split as its weight is: see
    `lmlib.optim.state_layout`. XLA decides what is sent for an update that takes more than each
    weight's own numbers.

    Args:
      steps: length of the schedule; the run supplies it.
      peak_lr: the schedule's highest learning rate.
      make: `make(learning_rate=…)` makes it; its other settings are given by a partial, as
        `functools.partial(optax.lion, b1=0.95)`, and stay in the program. A mask that it takes, and
        the `muon_weight_dimension_numbers` of `optax.contrib.muon`, follow from what the weights
        declare. A function of weights in it gets one layer of those that are stacked.
      schedule: as in `lmlib.optim.adamw.adamw`: its numbers are the hyperparameters.
      clip_norm: largest global gradient norm; `None` does not clip.
      decays: which weights decay, if `make` takes a mask of them; optax's without one decay all, if
        any.

    Raises:
      ValueError: for a number that is out of range, or a `make` without `learning_rate`; if an
        update needs more than gradients, state and weights, or differs from that of layers apart;
        for Muon in a `make` without `muon_weight_dimension_numbers`. When the state is made: if it
        cannot be laid out.
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
    filled = [each for each in (*_MASKS, _MATRICES) if each in known and _is_open(known[each])]
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    made = schedule(peak_lr, steps)

    def transformation(learning_rate: Any, decays: Callable[[Weight], bool]) -> Any:
        given = {each: functools.partial(map_weights, lambda w, _: decays(w)) for each in _MASKS}
        given[_MATRICES] = functools.partial(map_weights, _muon_numbers)
        made = make(learning_rate=learning_rate, **{each: given[each] for each in filled})
        return optax.with_extra_args_support(made)

    try:
        trial = transformation(lambda count: 0.1, as_declared)
    except TypeError as error:
        raise ValueError(f"{name} cannot be made of a schedule: {error}") from error
    state = _checked_state(name, trial, small_model(), " of a small model")
    nodes = jax.tree.leaves(state, is_leaf=_is_muon)
    if _MATRICES not in known and any(map(_is_muon, nodes)):
        raise ValueError(
            f"{name} has Muon in it, which would orthogonalize tables and heads, and no matrix of "
            f"three axes: let {name} take {_MATRICES}=None and give it to optax.contrib.muon"
        )
    try:
        apart = acts_on_each_layer(trial)
    except Exception as error:  # optax's and JAX's
        raise ValueError(f"{name} cannot be used here: {error}") from error

    def chain(learning_rate: Any, model: Any) -> optax.GradientTransformationExtraArgs:
        weights = named_weights(model)  # with their stacked axes
        each = transformation(learning_rate, lambda weight: decays(weights[weight.path]))
        return optax.chain(clip, layer_by_layer(each) if apart else each)

    def init(model: Any) -> optax.OptState:
        whole = chain(made, model)
        state = _checked_state(name, whole, _shapes(model))
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
        decays if {*_MASKS} & {*filled} else (lambda weight: False),
        hyperparameters={"learning_rate": made},
    )


def _named(make: Callable[..., Any]) -> str:
    make = make.func if isinstance(make, functools.partial) else make
    return getattr(make, "__name__", repr(make))


def _is_muon(node: Any) -> bool:
    return isinstance(node, contrib.MuonState)


def _is_open(argument: inspect.Parameter) -> bool:
    """Whether it has no value, or one that may be optax's default."""
    return any(argument.default is value for value in (None, True, inspect.Parameter.empty))


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


def _checked_state(
    name: str,
    transformation: optax.GradientTransformationExtraArgs,
    weights: Any,
    of: str = "",
) -> Any:
    """Shapes and dtypes of the state for `weights`.

    Raises ValueError if it cannot be made, an update cannot, or that leaves another kind of state
    or has other shapes than the weights.
    """
    doing = f"to make its state{of}"
    try:
        state = jax.eval_shape(transformation.init, weights)
        doing = f"to update{of} by gradients, its state and the weights alone"
        updates, after = jax.eval_shape(transformation.update, weights, state, weights)
    except Exception as error:  # optax's and JAX's
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name} cannot be used here: {doing} fails: {reason}") from error
    if _shapes(after) != _shapes(state):
        raise ValueError(
            f"{name} cannot be used here: an update changes the shapes or dtypes of its state, and "
            "so a compiled step could not make the next"
        )
    if [x.shape for x in jax.tree.leaves(updates)] != [x.shape for x in jax.tree.leaves(weights)]:
        raise ValueError(f"{name} cannot be used here: its updates have other shapes than weights")
    return state
