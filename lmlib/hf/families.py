"""Every family whose folders are read and written."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jaxtyping import PRNGKeyArray

from lmlib.hf.folder import read_json
from lmlib.models.decoder import Decoder
from lmlib.models.differences import differences
from lmlib.models.experts.router import without_load
from lmlib.models.families import (
    gemma,
    gpt2,
    gpt_neox,
    granite,
    mistral,
    olmo,
    phi,
    qwen,
    smollm,
    starcoder,
)
from lmlib.models.families.experts import deepseek, gpt_oss, mixtral, olmoe, qwen3_moe
from lmlib.models.families.hugging_face import shared
from lmlib.models.families.hugging_face.family import Family
from lmlib.models.families.hugging_face.settings import FolderError, Settings

FAMILIES: tuple[Family, ...] = (
    shared.LLAMA,
    *mistral.FAMILIES,
    *qwen.FAMILIES,
    *gemma.FAMILIES,
    *olmo.FAMILIES,
    *phi.FAMILIES,
    *gpt2.FAMILIES,
    *starcoder.FAMILIES,
    *smollm.FAMILIES,
    *granite.FAMILIES,
    *gpt_neox.FAMILIES,
    *mixtral.FAMILIES,
    *qwen3_moe.FAMILIES,
    *olmoe.FAMILIES,
    *deepseek.FAMILIES,
    *gpt_oss.FAMILIES,
)


@dataclasses.dataclass(frozen=True)
class Described:
    """A family and the arguments of its `build`, as the config.json `where` states them."""

    family: Family
    arguments: dict[str, Any]
    where: str = dataclasses.field(compare=False)

    @functools.cached_property
    def shapes(self) -> Decoder:
        """The shapes of the model's weights.

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


def described(folder: Path, families: Sequence[Family] = FAMILIES) -> Described:
    """Reads `folder`/config.json, which is one of `families`.

    Raises:
      FolderError: if there is none, it has a key or a value that is not known here, or there is
        no such model.
    """
    file = folder / "config.json"
    found = described_by(read_json(file), str(file), families)
    found.shapes  # noqa: B018 - refuses sizes that do not go together
    return found


def described_by(
    content: dict[str, Any], where: str, families: Sequence[Family] = FAMILIES
) -> Described:
    """As `described`, for the content of a config.json; `shapes` raises where no model has it."""
    kind = content.get("model_type")
    family = next((each for each in families if each.model_type == kind), None)
    if family is None:
        known = ", ".join(each.model_type for each in families)
        raise FolderError(
            f"{where}: model_type {kind!r:.200} is not supported; there are {known}. One of your "
            "own is passed as families=, or to commands with --trust_module=MODULE"
        )
    text, mesh = json.dumps(content, sort_keys=True), jax.sharding.get_abstract_mesh()
    return _described(family, text, where, mesh)


@functools.lru_cache(maxsize=64)  # tracing a model for its shapes takes up to a second
def _described(family: Family, content: str, where: str, mesh: AbstractMesh) -> Described:
    """As `described_by`; the shapes are those under `mesh`, which is the current one."""
    settings = Settings(json.loads(content), where)
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


def family_of(
    model: Decoder, model_type: str | None = None, families: Sequence[Family] = FAMILIES
) -> tuple[Family, dict[str, Any]]:
    """The family of a model (arrays or shapes), and the config.json that describes it exactly: a
    model built from that has the same parts, settings and shapes, except for settings that only
    training reads.

    Args:
      model_type: of the family, where several have such a model; `None`: the first of them.

    Raises:
      ValueError: if no family has such a model.
    """
    chosen = [each for each in families if model_type in (None, each.model_type)]
    reasons = set[str]()
    for family in chosen:
        try:
            content = {"model_type": family.model_type, **family.settings(model)}
            shapes = described_by(content, "config.json", [family]).shapes
        except ValueError as error:  # it has no such part, or no config.json says such a thing
            reasons.add(str(error))
            continue
        differing = list(differences(shapes, without_load(model)))
        if not differing:
            return family, content
        where, one, other, _ = differing[0]
        reasons.add(f"its {where} is {other}, where a config.json can say {one}")
    raise ValueError(
        f"none of {', '.join(each.model_type for each in chosen)} is this model: "
        + (
            reasons.pop()
            if len(reasons) == 1
            else "it has parts or settings that no config.json of theirs describes"
        )
    )
