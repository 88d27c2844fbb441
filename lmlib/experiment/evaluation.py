"""When and how a run evaluates its model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from jax.sharding import Mesh

from lmlib.compute import Compute
from lmlib.data.text import TextCodec


@runtime_checkable
class Suite(Protocol):
    """Measurements of a model besides its loss, such as `lmlib.evaluate.suite.suite.Suite`."""

    def length(self, trained: int | None) -> int:
        """Tokens of a sequence, for a model trained on sequences of `trained` tokens."""

    def metrics(self, length: int, codec: TextCodec | None) -> tuple[str, ...]:
        """The names of the metrics, measured on sequences of `length` tokens."""

    def evaluator(
        self, mesh: Mesh, compute: Compute, vocab: int, codec: TextCodec | None, length: int
    ) -> Callable[[Any], dict[str, float]]:
        """Returns a function from a model to its metrics; every process calls it."""


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """When a run evaluates its model on its `validation` data.

    Args:
      every: steps from one evaluation to the next; the last step is evaluated too.
      batches: how many of each source an evaluation sees; `None` for all. After the last step a
        finite source is seen whole.
      weights: of each named source in the total of all; `None`: the targets counted.
      suite: more measurements for each evaluation, at the cost of 10,000 to 40,000 tokens; `None`
        for none.
    """

    every: int = 1_000
    batches: int | None = None
    weights: Mapping[str, float] | None = None
    suite: Suite | None = None
