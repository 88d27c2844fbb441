"""When and how a run evaluates its model."""

import dataclasses
from collections.abc import Mapping

from lmlib.evaluate.suite.suite import Suite


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """When and how a run evaluates its model on its `validation` data.

    Args:
      every: steps from one evaluation to the next; the last step is evaluated too.
      batches: how many of each source an evaluation sees; `None` for all. After the last step a
        finite source is seen whole.
      weights: of each named source in the total of all; `None`: the targets counted.
      suite: what each evaluation measures besides, at the cost of 10,000 to 40,000 tokens; `None`
        for nothing.
    """

    every: int = 1_000
    batches: int | None = None
    weights: Mapping[str, float] | None = None
    suite: Suite | None = None
