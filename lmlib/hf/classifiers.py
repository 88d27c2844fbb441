"""Reward models as transformers' sequence classifiers of one label."""

import dataclasses
import functools
from typing import Any

from lmlib.models.families.hugging_face.family import Family, Tensor
from lmlib.models.families.hugging_face.settings import FolderError, Settings
from lmlib.models.reward import reward_model

ENDING = "ForSequenceClassification"
# Families whose classifier in transformers is its GenericForSequenceClassification.
_KNOWN = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "smollm3",
    "starcoder2", "mixtral", "qwen3_moe",
)  # fmt: skip
_SCORE = Tensor("score.weight", {"score": ("", "embed")})


def is_classifier(content: dict[str, Any]) -> bool:
    """True if a config.json describes a sequence classifier."""
    found = content.get("architectures")
    return isinstance(found, list) and any(str(each).endswith(ENDING) for each in found)


@functools.cache
def classifier(family: Family) -> Family:
    """Returns the reward models of `family`; raises FolderError if it has none here."""
    if family.model_type not in _KNOWN:
        raise FolderError(
            f"reward models of {family.model_type} cannot be read or written; there are "
            f"{', '.join(_KNOWN)}"
        )

    def reads(settings: Settings, found: dict[str, Any]) -> dict[str, Any]:
        more = {} if family.reads is None else family.reads(settings, found)
        return {**more, "of": family.build}

    return dataclasses.replace(
        family,
        transformers_class=family.transformers_class.replace("ForCausalLM", ENDING),
        build=reward_model,
        reads=reads,
        names=dataclasses.replace(family.names, outside=(*family.names.outside, _SCORE)),
        written={**family.written, "num_labels": 1},
    )
