"""All supported families."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jaxtyping import PRNGKeyArray

from lmlib.hf.classifiers import classifier, is_classifier
from lmlib.hf.folder import read_json
from lmlib.hf.four_bit import reads
from lmlib.hf.names import heads_in
from lmlib.hf.tensor_files import tensor_names
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
from lmlib.models.families.hugging_face.multi_token_prediction import HEADS
from lmlib.models.families.hugging_face.settings import FolderError, Settings
from lmlib.models.families.hybrid import (
    bamba,
    granite_hybrid,
    kimi_linear,
    lfm2,
    olmo_hybrid,
    qwen3_next,
)
from lmlib.models.multi_token import without_heads
from lmlib.models.reward import RewardModel

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
    *kimi_linear.FAMILIES,
    *lfm2.FAMILIES,
    *olmo_hybrid.FAMILIES,
    *bamba.FAMILIES,
    *granite_hybrid.FAMILIES,
    *qwen3_next.FAMILIES,
)


@dataclasses.dataclass(frozen=True)
class Described:
    """A family and the arguments of its `build`, read from the config.json `where`."""

    family: Family
    arguments: dict[str, Any]
    where: str = dataclasses.field(compare=False)

    @functools.cached_property
    def shapes(self) -> Decoder:
        """Shapes of the model's weights.

        Raises FolderError if the family does not support these sizes and settings.
        """
        try:
            return jax.eval_shape(lambda: self.build(jax.random.key(0)))
        except ValueError as error:
            raise FolderError(f"{self.where}: {error}") from None

    def build(self, key: PRNGKeyArray) -> Decoder:
        """Makes the model with new weights."""
        return self.family.build(**self.arguments, key=key)


def described(folder: Path, families: Sequence[Family] = FAMILIES) -> Described:
    """Reads `folder`/config.json, which must describe one of `families`.

    The model has the heads of multi-token prediction whose tensors the folder, or its index, has.
    Raises FolderError if the file is missing, it has an unknown key or value, or its model is not
    possible.
    """
    file = folder / "config.json"
    content = read_json(file)
    if reads(content):  # tensors in 4 bits, which are read whatever the settings are
        del content["quantization_config"]
    names = [each.names for each in families if each.model_type == content.get("model_type")]
    layers = content.get("num_hidden_layers")
    if names and names[0].heads and type(layers) is int:
        # transformers writes 1 for folders without heads too.
        content[HEADS] = len(heads_in(tensor_names(folder), names[0], layers))
    found = described_by(content, str(file), families)
    found.shapes  # noqa: B018 - refuses sizes that do not go together
    return found


def described_by(
    content: dict[str, Any], where: str, families: Sequence[Family] = FAMILIES
) -> Described:
    """Like `described`, for a config.json's content; `shapes` raises if no such model exists."""
    kind = content.get("model_type")
    family = next((each for each in families if each.model_type == kind), None)
    if family is None:
        known = ", ".join(each.model_type for each in families)
        raise FolderError(
            f"{where}: model_type {kind!r:.200} is not supported; there are {known}. One of your "
            "own is passed as families=, or to commands with --trust_module=MODULE"
        )
    if is_classifier(content):
        family = classifier(family)
    text, mesh = json.dumps(content, sort_keys=True), jax.sharding.get_abstract_mesh()
    return _described(family, text, where, mesh)


@functools.lru_cache(maxsize=64)  # tracing a model for its shapes takes up to a second
def _described(family: Family, content: str, where: str, mesh: AbstractMesh) -> Described:
    """Like `described_by`, with shapes under `mesh`, which is the current mesh."""
    settings = Settings(json.loads(content), where)
    try:
        arguments = family.arguments(settings)
    except FolderError:
        raise
    except ValueError as error:  # raised by parts that do not support a setting
        raise FolderError(f"{where}: {error}") from None
    except ArithmeticError as error:
        raise FolderError(f"{where}: its numbers contradict each other: {error}") from None
    settings.done()
    return Described(family, arguments, where)


def family_of(
    model: Decoder, model_type: str | None = None, families: Sequence[Family] = FAMILIES
) -> tuple[Family, dict[str, Any]]:
    """Returns a model's family, and a config.json that describes the model exactly.

    A model built from it has the same parts, settings and shapes, except for settings that only
    training reads, and for heads of multi-token prediction if the family has no tensors for them.
    Raises ValueError if the model belongs to no family.

    Args:
      model: its arrays may be shapes.
      model_type: chooses between several families with this model; `None`: the first of them.
    """
    chosen = [each for each in families if model_type in (None, each.model_type)]
    reasons = set[str]()
    for family in chosen:
        own = model if family.names.heads else without_heads(model)
        try:
            family = classifier(family) if isinstance(model, RewardModel) else family
            content = {"model_type": family.model_type, **family.settings(own)}
            shapes = described_by(content, "config.json", [family]).shapes
        except ValueError as error:  # the family lacks a part, or config.json cannot say this
            reasons.add(str(error))
            continue
        differing = list(differences(shapes, without_load(own)))
        if not differing:
            return family, content
        where, one, other, _ = differing[0]
        reasons.add(f"its {where} is {other}, where a config.json can say {one}")
    raise ValueError(
        f"none of {', '.join(each.model_type for each in chosen)} is this model: "
        + (
            reasons.pop()
            if len(reasons) == 1
            else "no config.json can describe its parts and settings"
        )
    )
