"""The model that weights are read for, and how far what is there may differ from it."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import Mesh

from lmlib.data.batch import Source
from lmlib.models.differences import differences
from lmlib.models.matrices.adapted import Adapted, map_adapted
from lmlib.parallel.axes import Weight
from lmlib.recipe import Recipe
from runner.errors import ConfigError

_SHOWN = 6  # differences


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A model as an experiment makes it, to be filled with weights that are there.

    Args:
      recipe: how it is made and kept.
      mesh: the devices that it is laid out on.
      data: whose ids the model must know; `None`: any.
      allowed_changes: "data": its tokenizer may be another than the data's. "model": settings of
        the model may be others, where its weights fit.
    """

    recipe: Recipe
    mesh: Mesh
    data: Source | None = None
    allowed_changes: Collection[str] = ()

    def check_model(self, theirs: Any) -> None:
        """Raises ConfigError if the weights of the model `theirs`, without adapters, do not fit, or
        settings differ that may not."""
        different = list(differences(theirs, self.recipe.bare))
        of_weights = [each for each in different if each.of_weights]
        if not different or (not of_weights and "model" in self.allowed_changes):
            return
        shown = [
            f"{each.where or 'the model'}: {each.one}, here {each.other}"
            for each in different[:_SHOWN]
        ]
        more = len(different) - len(shown)
        raise ConfigError(
            f"its model is not this experiment's ({'; '.join(shown)}"
            f"{f'; and {more} more' if more else ''}): experiments/from_hf takes the architecture "
            "from a folder, experiments/lora from a run too"
            + ("" if of_weights else ", --allow_change=model its weights alone")
        )

    def check_adapters(self, theirs: Any) -> None:
        """Raises ConfigError if the adapters of the model `theirs` have other sizes."""
        one, other = _sizes(theirs), _sizes(self.recipe.shapes)
        if one != other:
            path = next(path for path in one | other if one.get(path) != other.get(path))
            raise ConfigError(
                f"its adapters are not this experiment's ({path}: {one.get(path, 'none')}, here "
                f"{other.get(path, 'none')})"
            )

    def check_tokenizer(self, problem: str | None) -> None:
        """Raises ConfigError if there is a `problem` with the tokenizer of the data."""
        if problem is not None and "data" not in self.allowed_changes:
            raise ConfigError(
                f"it was trained on other data: {problem}, so its ids mean other texts; to go on "
                "all the same give --allow_change=data"
            )


class Keeping:
    """`Recipe.kept`, which notes whether it rounds values; int8, which is asked for, is no news."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._rounds = recipe, False

    def __call__(self, weight: Weight, array: jax.Array) -> Any:
        made = self._recipe.kept(weight, array)
        by_dtype = self._recipe.frozen_dtype != "int8" and weight.declaration.dtype is None
        if by_dtype and made.dtype != array.dtype and not self._rounds:
            self._rounds = not _same(made, array)
        return made

    def tell(self, name: str, show: Callable[[str], None]) -> None:
        """Shows a line if values were rounded."""
        if self._rounds:
            show(
                f"the frozen weights of {name} are rounded to {self._recipe.frozen_dtype}: "
                "--fdl.compute.dtype=float32 keeps them, and computes, in float32"
            )


@jax.jit
def _same(one: jax.Array, other: jax.Array) -> jax.Array:
    return (one.astype(other.dtype) == other).all()


def _sizes(model: Any) -> dict[str, str]:
    """The adapters of a model, in words."""
    found: dict[str, str] = {}

    def note(path: str, one: Adapted) -> None:
        of = " of √rank" if one.rank_stabilized else ""
        found[path] = f"rank {one.rank} and alpha {one.alpha:g}{of}"

    map_adapted(note, model)
    return found
