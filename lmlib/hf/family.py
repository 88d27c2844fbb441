"""What a family declares, for both ways between its models and folders."""

import dataclasses
from collections.abc import Callable
from typing import Any

from lmlib.hf.names import Names
from lmlib.hf.settings import Settings
from lmlib.models.decoder import Decoder


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """One kind of folder.

    Args:
      model_type: of config.json.
      transformers_class: which class of transformers computes it.
      build: makes a model; of `lmlib.models.families`.
      names: of its tensors.
      arguments: of `build`, out of a config.json.
      settings: of a config.json, out of a model whose arrays may be shapes; what `arguments` reads.
        It raises ValueError where the model has parts that the family has not (`lmlib.hf.parts`).
        Whether the config.json describes the model exactly is checked afterwards.
    """

    model_type: str
    transformers_class: str
    build: Callable[..., Any]
    names: Names
    arguments: Callable[[Settings], dict[str, Any]]
    settings: Callable[[Decoder], dict[str, Any]]
