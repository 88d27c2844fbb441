"""Texts that a run lets its model continue."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SampleSettings:
    """Texts that a run lets its model continue.

    Args:
      prompts: they are continued at the end of the run.
      every: besides, every so many steps; `None`: not.
    """

    prompts: tuple[str, ...] = ()
    every: int | None = None
