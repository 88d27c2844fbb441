"""Settings for sample texts during a run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SampleSettings:
    """Prompts that a run's model continues.

    Args:
      prompts: the texts, continued at the end of the run.
      every: steps between further continuations; `None` for none.
    """

    prompts: tuple[str, ...] = ()
    every: int | None = None
