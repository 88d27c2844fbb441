"""A checkpoint that was read back."""

import dataclasses
from typing import Any

from jaxtyping import PyTree

from lmlib.checkpoint.manifest import DamagedCheckpointError


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `restore_newest` found.

    Attributes:
      step: the step of the newest sound checkpoint.
      state: as the target says.
      notes: what was saved with it.
      damaged: what is wrong with each newer checkpoint, newest first.
    """

    step: int
    state: PyTree
    notes: dict[str, Any]
    damaged: tuple[DamagedCheckpointError, ...]
