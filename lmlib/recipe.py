"""Creation of a model's weights, and their dtypes: float32 if they train."""

import dataclasses
import functools
from collections.abc import Callable, Set
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from lmlib.models.matrices.int8 import Int8, in_int8
from lmlib.models.matrices.lora import has_adapters, with_bases, without_adapters
from lmlib.models.matrices.mxfp4 import Mxfp4, in_mxfp4
from lmlib.models.matrices.nf4 import Nf4, in_nf4
from lmlib.models.weights import creator, quick_to_compile
from lmlib.optim.trainable import Groups, grouped
from lmlib.parallel.axes import M, PartError, Weight, map_weights
from lmlib.parallel.layout import storage_spec
from lmlib.parallel.matrix import Matrix, dense

# Kinds of frozen matrices beside arrays, by `frozen_dtype`.
MATRICES: dict[str, tuple[Any, Callable[[Weight, Any], Any]]] = {
    "int8": (Int8, in_int8),
    "nf4": (Nf4, in_nf4),
    "mxfp4": (Mxfp4, in_mxfp4),
}

_dense = jax.jit(dense)  # otherwise each step would make an array of the whole matrix


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The creation of a model's weights, and their dtypes.

    Args:
      model, seed: `model(key=jax.random.key(seed))` makes new weights.
      groups: the weights that train; `None`: all; an empty mapping: none.
      frozen_dtype: dtype of weights that do not train; see `kept`.
    """

    model: Callable[..., Any]
    seed: int
    groups: Groups | None
    frozen_dtype: str

    def make(self) -> Any:
        """Returns the model with new weights, each in its stored dtype."""
        return self._make_from(self.seed)

    def new_model(self, mesh: Mesh) -> Any:
        """`make` on `mesh`, laid out from the start, with one program for all seeds."""
        made = self.abstract_model  # not under the mesh, whose axes would be in its types
        with jax.set_mesh(mesh):
            return creator(self._make_from, mesh, made)(np.uint32(self.seed % 2**32))

    def _make_from(self, seed: int | Array) -> Any:
        return map_weights(self.kept, self.model(key=jax.random.key(seed)))

    def kept(self, weight: Weight, array: Any) -> Any:
        """Converts `array` of `weight`, or a matrix from a file, to the form that the run stores.

        Weights that train stay the same. Others have the dtype that they declare, else
        `frozen_dtype`. A kind of `MATRICES` stores them in 8 or 4 bits if its function supports
        them, else in bfloat16.
        """
        frozen = self.trained is not None and weight.path not in self.trained
        kind, convert = MATRICES.get(self.frozen_dtype, (None, None))
        if frozen and kind is not None and isinstance(array, kind):
            return array
        if isinstance(array, Matrix):
            array = _dense(array)
        if not frozen:
            return array
        if weight.declaration.dtype is not None:
            return array.astype(weight.declaration.dtype)
        if convert is None:
            return array.astype(self.frozen_dtype)
        return convert(weight, array.astype("bfloat16") if kind is Int8 else array)

    @functools.cached_property
    def shapes(self) -> Any:
        """Shapes of the model as `model` makes it, without 8-bit weights.

        Raises:
          PartError: if the class of a part or a model lacks methods or attributes.
        """
        try:
            return jax.eval_shape(lambda: self.model(key=jax.random.key(self.seed)))
        except TypeError as error:
            if "abstract class" not in str(error):  # the wording of Python and of Equinox
                raise
            raise PartError(
                f"{str(error).splitlines()[0]}; define them in the class. "
                "docs/your-own-architecture.md shows a whole part and a whole model"
            ) from None

    @functools.cached_property
    def abstract_model(self) -> Any:
        """Shapes and dtypes of the result of `make`."""
        return jax.eval_shape(functools.partial(map_weights, self.kept), self.shapes)

    @functools.cached_property
    def group_of(self) -> dict[str, str] | None:
        """The group of each weight that trains, by its path; `None`: all train."""
        if self.groups is None:
            return None
        return grouped(self.shapes, self.groups) if self.groups else {}

    @property
    def trained(self) -> Set[str] | None:
        """The paths of the weights that train; `None`: all do."""
        return None if self.group_of is None else self.group_of.keys()

    @property
    def bare(self) -> Any:
        """Shapes of the model without adapters and without 8-bit weights."""
        return without_adapters(self.shapes)

    def completed(self, weights: M, mesh: Mesh) -> M:
        """Returns the model on `mesh`, with `weights` and new adapters.

        Args:
          weights: the weights of `bare`, each in the form that `kept` returns, in the stored
            layout. Their buffers are donated. Without heads of multi-token prediction, or a reward
            model's score, these are new too.
        """
        more = "score" if hasattr(self.shapes, "score") else "predictors"
        lacks_more = hasattr(self.shapes, more) and getattr(weights, more, None) is None
        if not has_adapters(self.shapes) and not lacks_more:
            return weights

        def complete(weights: Any) -> Any:
            made = self.model(key=jax.random.key(self.seed))
            if lacks_more:
                new = map_weights(self.kept, without_adapters(made))
                weights = type(new)(weights, getattr(new, more))
            return with_bases(made, weights)

        placed = map_weights(
            lambda weight, array: storage_spec(weight, array.shape, mesh), self.abstract_model
        )
        layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), placed)
        options = quick_to_compile(self.abstract_model, mesh.devices.flat[0].platform)
        with jax.set_mesh(mesh):
            made = jax.sharding.auto_axes(complete, out_sharding=placed)
            return jax.jit(made, out_shardings=layout, donate_argnums=0, compiler_options=options)(
                weights
            )
