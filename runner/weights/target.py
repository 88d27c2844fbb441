"""Options for reading weights, and the model that receives them."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

from jax.sharding import Mesh

from lmlib.data.batch import Source
from lmlib.models.differences import differences
from lmlib.models.families.hugging_face.family import Family
from lmlib.models.matrices.dora import DoRAMatrix
from lmlib.models.matrices.lora import LoRAMatrix, map_adapted
from lmlib.models.multi_token import without_heads
from lmlib.models.reward import RewardModel
from lmlib.recipe import Recipe
from runner.config.references import known_families
from runner.errors import ConfigError

_SHOWN = 6  # differences in a message


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """Options for reading saved weights."""

    # modules that a run's config.json may refer to, and whose families are known.
    trusted: Collection[str] = ()
    # the new place of the weights that a run began with and did not train, or of the base of
    # adapters in a folder; `None`: their original place
    init_from: str | None = None
    # the run's weight average, or its last weights; `None`: as the run evaluated itself
    average: bool | None = None
    show: Callable[[str], None] = lambda line: None  # called with progress lines and warnings

    @functools.cached_property
    def families(self) -> tuple[Family, ...]:
        """The known families; raises as `known_families` does."""
        return known_families(self.trusted)


PLAIN = LoadOptions()


@dataclasses.dataclass(frozen=True)
class LoadTarget:
    """A model of an experiment, to be filled with saved weights."""

    recipe: Recipe  # how the experiment makes and keeps its weights
    mesh: Mesh  # the devices for the model
    data: Source | None = None  # batches whose token ids the model must know; `None`: any
    # "data": the data may have another tokenizer. "model": settings of the model may differ if its
    # weights fit.
    allowed_changes: Collection[str] = ()

    def check_model(self, theirs: Any) -> None:
        """Raises ConfigError unless `theirs`, without adapters, has the same shapes and settings.

        With the change "model", only the shapes must be the same. Heads of multi-token prediction
        may be on one side only, and `theirs` may be the language model of a reward model.
        """
        ours = without_extra_heads(self.recipe.bare, theirs)
        if isinstance(ours, RewardModel) and not isinstance(theirs, RewardModel):
            theirs = RewardModel(theirs, None)
        found = list(differences(without_extra_heads(theirs, ours), ours))
        other_shapes = any(each.of_weights for each in found)
        if not found or (not other_shapes and "model" in self.allowed_changes):
            return
        shown = "; ".join(
            f"{each.where or 'the model'}: {each.one}, here {each.other}" for each in found[:_SHOWN]
        )
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ConfigError(
            f"its model differs from this experiment's ({shown}{more}): use its architecture, as "
            "experiments/from_hf and experiments/lora do"
            + ("" if other_shapes else ", or give --allow_change=model to take only its weights")
        )

    def check_adapters(self, theirs: Any) -> None:
        """Raises ConfigError if the adapters of the model `theirs` have other sizes."""
        one, other = _adapter_sizes(theirs), _adapter_sizes(self.recipe.shapes)
        for path in one | other:
            was, now = one.get(path, "none"), other.get(path, "none")
            if was != now:
                raise ConfigError(
                    f"its adapters differ from this experiment's ({path}: {was}, here {now})"
                )

    def check_tokenizer(self, problem: str | None) -> None:
        """Raises ConfigError if there is a `problem` with the tokenizer of the data."""
        if problem is not None and "data" not in self.allowed_changes:
            raise ConfigError(
                f"it was trained on other data: {problem}, so its ids mean other texts; to "
                "continue anyway, give --allow_change=data"
            )


def without_extra_heads(model: Any, other: Any) -> Any:
    """Returns `model` without its multi-token heads, or its score, if `other` has none."""
    if isinstance(model, RewardModel):
        return model if isinstance(other, RewardModel) else RewardModel(model, None)
    return model if hasattr(other, "predictors") else without_heads(model)


def _adapter_sizes(model: Any) -> dict[str, str]:
    found: dict[str, str] = {}

    def note(path: str, one: LoRAMatrix) -> None:
        scaled = " of √rank" if one.rank_stabilized else ""
        magnitude = ", with magnitudes" if isinstance(one, DoRAMatrix) else ""
        found[path] = f"rank {one.rank} and alpha {one.alpha:g}{scaled}{magnitude}"

    map_adapted(note, model)
    return found
