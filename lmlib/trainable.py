"""Which weights of a model train, and how those that do not are kept."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from lmlib.models.adapted import DOWN_RANK, UP_RANK, is_adapted, without_adapters
from lmlib.models.int8 import in_int8
from lmlib.optim import Decays, Optimizer
from lmlib.parallel.axes import M, Weight, map_weights
from lmlib.parallel.layout import stored
from lmlib.parallel.selection import SelectionError, named_weights, selected


@dataclasses.dataclass(frozen=True)
class Group:
    """Weights that train alike.

    Args:
      paths, axes: which, as of `lmlib.parallel.selection.selected`.
      learning_rate: factor of the optimizer's.
      decays: whether weight decay shrinks them; `None`: as each declares.

    Raises:
      ValueError: if the factor is not positive.
    """

    paths: Sequence[str] = ()
    axes: Sequence[str] = ()
    learning_rate: float = 1.0
    decays: bool | None = None

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(
                f"learning_rate of a group must be positive, got {self.learning_rate}: weights "
                "that are in no group do not train"
            )


Groups = Mapping[str, Group]


def adapters(learning_rate_of_up: float = 1.0) -> Groups:
    """For `Experiment.trainable`: the adapters of a model, and nothing else.

    Args:
      learning_rate_of_up: factor for the matrices that start at zero (LoRA+: Hayou et al. 2024,
        arXiv:2402.12354, has 16).
    """
    if learning_rate_of_up == 1:
        return {"adapters": Group(axes=(DOWN_RANK, UP_RANK))}
    up = Group(axes=(UP_RANK,), learning_rate=learning_rate_of_up)
    return {"down": Group(axes=(DOWN_RANK,)), "up": up}


def grouped(model: Any, groups: Groups) -> dict[str, str]:
    """The group of each weight that trains, by its path.

    Raises:
      SelectionError: if a pattern or an axis means no weight, a weight is in two groups, a group is
        empty, or the base of an adapter is in one.
    """
    weights, found = named_weights(model), dict[str, str]()
    bases = _bases(model)
    for name, group in groups.items():
        try:
            chosen = selected(weights, group.paths, group.axes)
        except SelectionError as error:
            raise SelectionError(f"trainable[{name!r}]: {error}") from None
        if not chosen:
            raise SelectionError(f"trainable[{name!r}] names no weights: give it paths or axes")
        for path in chosen:
            if path in found:
                raise SelectionError(
                    f"{path} is in trainable[{found[path]!r}] and in trainable[{name!r}]: make "
                    "their paths or axes narrower"
                )
            if path in bases:
                raise SelectionError(
                    f"trainable[{name!r}] has {path}, the base of an adapter, which gets no "
                    f"gradient: name what trains of it ({path.removesuffix('base')}down, …up), or "
                    "do not adapt it"
                )
            found[path] = name
    if not found:
        raise SelectionError("trainable names no group, so nothing would train; None trains all")
    return found


def _bases(model: Any) -> set[str]:
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_adapted)
    return {
        jax.tree_util.keystr(keys, simple=True, separator=".") + ".base"
        for keys, node in nodes
        if is_adapted(node)
    }


def resting(model: M, trained: Collection[str], dtype: str) -> M:
    """`model` with the weights that do not train in `dtype`; of "int8" in bfloat16, and those that
    `lmlib.models.int8.in_int8` can make so in 8 bits."""

    def frozen(weight: Weight) -> bool:
        return weight.path not in trained

    float_dtype = "bfloat16" if dtype == "int8" else dtype
    model = map_weights(lambda w, x: x.astype(float_dtype) if frozen(w) else x, model)
    return in_int8(model, frozen) if dtype == "int8" else model


def flops_per_token(model: Any, groups: Groups | None, sequence_length: int, causal: bool) -> float:
    """FLOPs for a token of a step that trains `groups` of `model`, which has its weights as
    `Experiment.model` makes them: those of `Model.flops_per_token`, less two for each frozen
    parameter that multiplies activations, whose gradient is not made."""
    flops = model.flops_per_token(sequence_length, causal)
    if groups is None:
        return flops
    trained, weights = grouped(model, groups), named_weights(model)
    tied = not any(one.declaration.multiplied and "vocab" in one.axes for one in weights.values())

    def count(weight: Weight, array: Any) -> None:
        nonlocal flops
        unembeds = tied and "vocab" in weight.axes
        if weight.path not in trained and (weight.declaration.multiplied or unembeds):
            flops -= 2.0 * array.size

    map_weights(count, model)
    return flops


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a run makes the weights of its model, and keeps them.

    Args:
      model, seed: `model(key=jax.random.key(seed))` makes new weights.
      groups: what trains; `None`: everything; an empty mapping: nothing.
      frozen_dtype: of what does not; see `resting`.
    """

    model: Callable[..., Any]
    seed: int
    groups: Groups | None
    frozen_dtype: str

    def make(self) -> Any:
        """The model with new weights, each as it is kept."""
        model = self.model(key=jax.random.key(self.seed))
        return model if self.trained is None else resting(model, self.trained, self.frozen_dtype)

    @functools.cached_property
    def shapes(self) -> Any:
        """Shapes of the model as `model` makes it: nothing in 8 bits."""
        return jax.eval_shape(lambda: self.model(key=jax.random.key(self.seed)))

    @functools.cached_property
    def group_of(self) -> dict[str, str] | None:
        """The group of each weight that trains, by its path; `None`: all do."""
        if self.groups is None:
            return None
        return grouped(self.shapes, self.groups) if self.groups else {}

    @property
    def trained(self) -> Set[str] | None:
        """The paths of the weights that train; `None`: all do."""
        return None if self.group_of is None else self.group_of.keys()

    @property
    def given(self) -> Any:
        """Shapes and dtypes of the weights that `completed` takes: there are no adapters, and what
        is frozen is in its float dtype."""
        if self.trained is None:
            return self.shapes
        float_dtype = "bfloat16" if self.frozen_dtype == "int8" else self.frozen_dtype
        kept = jax.eval_shape(
            lambda model: resting(model, self.trained or (), float_dtype), self.shapes
        )
        return without_adapters(kept)

    def completed(self, weights: M, mesh: Mesh) -> M:
        """The model, laid out on `mesh`, with `weights` and new adapters.

        Args:
          weights: as `given` says, but in float32 perhaps, laid out as they are stored. Their
            buffers are taken.
        """
        if self.trained is None:
            return weights
        by_path = {weight.path: array for weight, array in _arrays(weights)}

        def complete(by_path: dict[str, Array]) -> Any:
            model = self.model(key=jax.random.key(self.seed))
            given = map_weights(
                lambda w, new: by_path.get(w.path.removesuffix(".base"), new), model
            )
            return resting(given, self.trained or (), self.frozen_dtype)

        placed = map_weights(
            lambda weight, array: stored(weight, array.shape, mesh), jax.eval_shape(self.make)
        )
        layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), placed)
        with jax.set_mesh(mesh):
            made = jax.sharding.auto_axes(complete, out_sharding=placed)
            return jax.jit(made, out_shardings=layout, donate_argnums=0)(by_path)


def _arrays(model: Any) -> list[tuple[Weight, Any]]:
    found: list[tuple[Weight, Any]] = []
    map_weights(lambda weight, array: found.append((weight, array)), model)
    return found


class Parts(NamedTuple):
    """A model twice, with `None` in place of what is in the other one."""

    trained: Any
    frozen: Any


def parted(model: Any, trained: Set[str] | None) -> Parts:
    """`model` as what trains, the weights whose paths are in `trained`, and the rest; `None`:
    everything trains, and `frozen` is `None`."""
    if trained is None:
        return Parts(model, None)
    mask = map_weights(lambda weight, _: weight.path in trained, model)
    return Parts(*eqx.partition(model, mask))


def with_groups(optimizer: Optimizer, model: Any, groups: Groups) -> Optimizer:
    """`optimizer` with the learning rates of `groups`: its updates are multiplied."""
    group_of = grouped(model, groups)
    if all(group.learning_rate == 1 for group in groups.values()):
        return optimizer

    def scaled(updates: Any, state: optax.EmptyState, model: Any = None) -> tuple[Any, Any]:
        def scale(weight: Weight, update: Array) -> Array:
            return update * groups[group_of[weight.path]].learning_rate

        return map_weights(scale, updates), state

    by_group = optax.GradientTransformation(lambda model: optax.EmptyState(), scaled)
    return optimizer._replace(transformation=optax.chain(optimizer.transformation, by_group))


def decays_by(groups: Groups, model: Any, otherwise: Decays) -> Decays:
    """Which weights decay: as their group says, else as `otherwise` does."""
    group_of = grouped(model, groups)

    def decays(weight: Weight) -> bool:
        said = groups[group_of[weight.path]].decays if weight.path in group_of else None
        return otherwise(weight) if said is None else said

    return decays
