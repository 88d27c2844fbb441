"""Every family whose folders are read and written."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from lmlib.hf.families import gemma, gpt2, llama, olmo, phi, qwen, starcoder
from lmlib.hf.family import Family
from lmlib.hf.folder import FolderError, read_json
from lmlib.hf.settings import Settings
from lmlib.models.architecture import architecture
from lmlib.models.decoder import Decoder
from lmlib.models.differences import differences

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *qwen.FAMILIES,
    *gemma.FAMILIES,
    *olmo.FAMILIES,
    *phi.FAMILIES,
    *gpt2.FAMILIES,
    *starcoder.FAMILIES,
)


@dataclasses.dataclass(frozen=True)
class Described:
    """What a config.json, `where`, says: a family and the arguments of its `build`."""

    family: Family
    arguments: dict[str, Any]
    where: str = dataclasses.field(compare=False)

    @functools.cached_property
    def shapes(self) -> Decoder:
        """Of the model's weights.

        Raises:
          FolderError: if there is no model of these sizes and settings.
        """
        try:
            return jax.eval_shape(lambda: self.build(jax.random.key(0)))
        except ValueError as error:
            raise FolderError(f"{self.where}: {error}") from None

    def build(self, key: PRNGKeyArray) -> Decoder:
        """The model, with new weights."""
        return self.family.build(**self.arguments, key=key)


def described(folder: Path) -> Described:
    """Reads `folder`/config.json.

    Raises:
      FolderError: if there is none, it has a key or a value that is not known here, or there is
        no such model.
    """
    file = folder / "config.json"
    found = described_by(read_json(file), str(file))
    found.shapes  # noqa: B018 - refuses sizes that do not go together
    return found


def described_by(content: dict[str, Any], where: str) -> Described:
    """As `described`, of the content of a config.json; whether there is such a model, its `shapes`
    tell."""
    kind = content.get("model_type")
    family = next((each for each in FAMILIES if each.model_type == kind), None)
    if family is None:
        known = ", ".join(each.model_type for each in FAMILIES)
        raise FolderError(f"{where}: model_type {kind!r:.200} is not supported; there are {known}")
    settings = Settings(content, where)
    try:
        arguments = family.arguments(settings)
    except FolderError:
        raise
    except ValueError as error:  # of a part that has no such settings
        raise FolderError(f"{where}: {error}") from None
    except ArithmeticError as error:
        raise FolderError(f"{where}: its numbers make no sense together: {error}") from None
    settings.done()
    return Described(family, arguments, where)


def family_of(model: Decoder, model_type: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The family of a model (arrays or shapes), and the config.json that describes exactly it:
    what is built from that has the same parts, settings and shapes.

    Args:
      model_type: of the family, where several have such a model; `None`: the first of them.

    Raises:
      ValueError: if no family has such a model.
    """
    read = architecture(model)
    families = [each for each in FAMILIES if model_type in (None, each.model_type)]
    for family in families:
        content = {"model_type": family.model_type, **family.settings(read)}
        try:
            shapes = described_by(content, "the model").shapes
        except FolderError:  # no config.json of this family says such a thing
            continue
        if not any(differences(shapes, model)):
            return family, content
    raise ValueError(
        f"none of {', '.join(each.model_type for each in families)} is this model: it has parts or "
        "settings that no config.json of theirs describes"
    )
