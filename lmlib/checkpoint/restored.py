"""A checkpoint that was read back."""

import dataclasses
from typing import Any

from jaxtyping import PyTree

from lmlib.checkpoint.manifest import DamagedCheckpointError


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of `restore_newest`.

    Attributes:
      step: the step of the newest sound checkpoint.
      state: laid out as the target says.
      notes: its notes.
      damaged: an error for each newer checkpoint, newest first.
    """

    step: int
    state: PyTree
    notes: dict[str, Any]
    damaged: tuple[DamagedCheckpointError, ...]
