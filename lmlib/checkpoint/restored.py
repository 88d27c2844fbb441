"""The result of restoring a checkpoint."""

import dataclasses
from typing import Any

from jaxtyping import PyTree

from lmlib.checkpoint.manifest import DamagedCheckpointError


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of `restore_newest`.

    Attributes:
      step: the step of the newest sound checkpoint.
      state: laid out like the target.
      notes: its notes.
      damaged: an error for each newer checkpoint, newest first.
    """

    step: int
    state: PyTree
    notes: dict[str, Any]
    damaged: tuple[DamagedCheckpointError, ...]
