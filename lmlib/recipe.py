"""How a run makes the weights of its model, and keeps them: in float32 if they train."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Set
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from lmlib.models.adapted import without_adapters
from lmlib.models.int8 import in_int8
from lmlib.parallel.axes import M, Weight, map_weights
from lmlib.parallel.layout import stored
from lmlib.trainable import Groups, grouped


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
    def made(self) -> Any:
        """Shapes and dtypes of what `make` makes."""
        return self.shapes if self.trained is None else jax.eval_shape(self.make)

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

        placed = map_weights(lambda weight, array: stored(weight, array.shape, mesh), self.made)
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


def resting(model: M, trained: Collection[str], dtype: str) -> M:
    """`model` with the weights that do not train in `dtype`; of "int8" in bfloat16, and those that
    `lmlib.models.int8.in_int8` can make so in 8 bits."""

    def frozen(weight: Weight) -> bool:
        return weight.path not in trained

    float_dtype = "bfloat16" if dtype == "int8" else dtype
    model = map_weights(lambda w, x: x.astype(float_dtype) if frozen(w) else x, model)
    return in_int8(model, frozen) if dtype == "int8" else model
