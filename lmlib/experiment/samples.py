"""Texts that a run lets its model continue."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SampleSettings:
    """Texts that a run lets its model continue.

    Args:
      prompts: the texts, continued at the end of the run.
      every: steps between further continuations; `None` for none.
    """

    prompts: tuple[str, ...] = ()
    every: int | None = None
