"""Any optax optimizer, applied layer by layer, with its state laid out like the weights.

A transformation that takes an array's norm, factors its moments or orthogonalises it must receive
one layer's array at a time.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float
from optax import contrib

from lmlib.models.weights import fan_in, weight
from lmlib.optim.matrices.whole_matrices import APART, matrices_of
from lmlib.optim.optimizer import Decays, Optimizer, as_declared, rates_and_clipping
from lmlib.optim.schedules import MakeSchedule, warmup_cosine
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.selection import named_weights

_SHAPE = (2, 4, 3)  # shape of the trial's weights: layers, rows, columns
# Factors of the first layer's gradients in each step: NaN shows any flow between layers.
_FACTORS = (1.0, 1.0, 1e4, 1e-3, np.nan, 1.0)


def layer_by_layer(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Maps `transformation` over stacked layers with `jax.vmap`.

    Each group of weights with equal stacked axes is mapped separately. The state is a tuple of the
    groups' states, with these axes in front.
    """

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
    absent: None = None  # like the weights of other groups


def acts_on_each_layer(transformation: optax.GradientTransformation) -> bool:
    """True if `layer_by_layer(transformation)` makes the same updates as for separate layers.

    False if `transformation` itself makes them from stacked layers, elementwise, with statistics of
    all weights, such as a norm, or random numbers. A trial with two layers decides. Raises
    ValueError if neither form makes them.
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
            if _sizes_of(made) != _sizes_of(model) or _sizes_of(after) != _sizes_of(state):
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


def _sizes_of(tree: Any) -> Any:
    return [x.shape for x in jax.tree.leaves(tree)]


def _agree(some: np.ndarray, others: np.ndarray) -> bool:
    """True if arrays are equal up to rounding, with NaN in the same places."""
    size = np.nanmax(np.abs(others), axis=(-2, -1), keepdims=True, initial=0)
    return np.allclose(some, others, rtol=0, atol=1e-3 * size, equal_nan=True)


_FEW = 4_096  # size that every device may hold: counts, keys, statistics of a whole model

_Keys = tuple[Any, ...]


def state_layout(state: Any, model: Any, mesh: AbstractMesh) -> Any:
    """Returns the partitions of all arrays of an optimizer's abstract `state` on `mesh`.

    An array whose path contains the path of a weight of `model` is split like it, along the axes
    that both have: factored moments lack some. Everything else is whole on each device. Raises
    ValueError if a large array would be whole although the weights are split.
    """
    leaves = jax.tree_util.tree_leaves_with_path(model)
    weights = {tuple(keys): jax.typeof(weight) for keys, weight in leaves}
    layout = {keys: weight.sharding.spec for keys, weight in weights.items()}

    def place(keys: _Keys, leaf: Any) -> PartitionSpec:
        own = own_weight(keys, weights)
        if own is not None:
            weight = weights[own]
            if (found := _along(leaf.shape, weight.shape, layout[own])) is not None:
                return found
        whole = own is not None and not any(layout[own])
        if leaf.size > _FEW and mesh.size > 1 and not whole:
            name = jax.tree_util.keystr(keys, simple=True, separator=".")
            of = "no weight" if own is None else f"no part of its weight's {weights[own].shape}"
            raise ValueError(
                f"{name} of the optimizer's state is {leaf.dtype}{[*leaf.shape]}, the shape of "
                f"{of}, so it would be whole on each of {mesh.size} devices: take another "
                "optimizer, or one device"
            )
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(place, state)


def own_weight(keys: _Keys, weights: Mapping[_Keys, Any]) -> _Keys | None:
    """The longest path of a weight that is a part of `keys`."""
    for length in range(len(keys), 0, -1):
        for start in range(len(keys) - length + 1):
            if keys[start : start + length] in weights:
                return keys[start : start + length]
    return None


def _along(
    shape: Sequence[int], of_weight: Sequence[int], layout: PartitionSpec
) -> PartitionSpec | None:
    """The partition of an array that has some of a weight's axes, or all of them among others.

    The axes must be in the weight's order; an axis may have size 1 instead. `None` if the array
    does not match.
    """
    if math.prod(shape) == 1:
        return PartitionSpec()
    places, common = dict(enumerate(layout)), min(len(shape), len(of_weight))
    own = [*itertools.combinations(range(len(shape)), common)][::-1]  # usually in front
    for axes in itertools.product(own, itertools.combinations(range(len(of_weight)), common)):
        pairs = list(zip(*axes, strict=True))
        if all(shape[i] in (1, of_weight[j]) for i, j in pairs):
            split = {i: places.get(j) for i, j in pairs if shape[i] == of_weight[j]}
            return PartitionSpec(*map(split.get, range(len(shape))))
    return None


_MASKS = ("mask", "weight_decay_mask")  # optax's names of the mask of decaying weights
_MATRICES = "muon_weight_dimension_numbers"  # Muon's name of the sides of its matrices
_LEFT = (None, True, inspect.Parameter.empty)  # optax's defaults for these arguments


def from_optax(
    steps: int,
    peak_lr: float,
    make: Callable[..., optax.GradientTransformation],
    schedule: MakeSchedule = warmup_cosine,
    clip_norm: float | None = 1.0,
    decays: Decays = as_declared,
) -> Optimizer:
    """An optax optimizer, such as `optax.lion`, after clipping by global norm.

    It updates each stacked layer as if its arrays were separate, and each array of its state is
    split like its weight (`lmlib.optim.from_optax`). XLA chooses the communication for updates that
    need more than each weight's own numbers.

    Args:
      steps: length of the schedule; set by the run.
      peak_lr: the schedule's highest learning rate.
      make: `make(learning_rate=…)` makes the optimizer. Set other arguments with a partial, such as
        `functools.partial(optax.lion, b1=0.95)`; they are constants of the program. A mask that is
        None or True, and the `muon_weight_dimension_numbers` of `optax.contrib.muon`, are filled in
        from the weights' declarations. A function of weights among the arguments gets one of the
        stacked layers.
      schedule, clip_norm: as in `lmlib.optim.adamw.adamw`.
      decays: True for weights that decay, if `make` takes a mask for them. Optimizers of optax
        without a mask decay all weights, if any.

    Raises:
      ValueError: if an update needs more than gradients, state and weights, or differs from the
        update of separate layers; later, if the state cannot be laid out, or is Muon's without its
        argument.
    """
    made, clip = rates_and_clipping(steps, peak_lr, schedule, clip_norm)
    name, known = _named(make), inspect.signature(make).parameters
    if "learning_rate" not in known:
        raise ValueError(
            f"{name} takes no learning_rate: give from_optax a function of one, such as optax.lion"
        )
    filled = {*_MASKS, _MATRICES} & {each for each in known if known[each].default in _LEFT}

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
        # A function cannot be an argument of a program, but the numbers of a schedule can.
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
    """Shapes and dtypes only."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _partitions(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, tree)


def _muon_numbers(weight: Weight, array: Any) -> contrib.MuonDimensionNumbers | None:
    """The axes of a matrix for Muon; `None` if Adam updates the weight."""
    form = matrices_of(weight, array.shape, APART)
    if form is None:
        return None
    kept = form.columns if form.summed == form.rows else form.rows
    return contrib.MuonDimensionNumbers(form.summed, kept)
