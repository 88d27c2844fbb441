"""What a family declares, for both ways between its models and folders."""

import dataclasses
from collections.abc import Callable
from typing import Any

from lmlib.hf.names import Names
from lmlib.hf.settings import Settings
from lmlib.models.architecture import Architecture


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of folder.

    Args:
      model_type: of config.json.
      transformers_class: which class of transformers computes it.
      build: makes a model; of `lmlib.models.families`.
      names: of its tensors.
      arguments: of `build`, out of a config.json.
      settings: of a config.json, out of a model; what `arguments` reads.
    """

    model_type: str
    transformers_class: str
    build: Callable[..., Any]
    names: Names
    arguments: Callable[[Settings], dict[str, Any]]
    settings: Callable[[Architecture], dict[str, Any]]
