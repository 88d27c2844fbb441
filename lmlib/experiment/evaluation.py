"""Settings for the evaluation of a run's model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from jax.sharding import Mesh

from lmlib.compute import Compute
from lmlib.data.text import TextCodec


@runtime_checkable
class Suite(Protocol):
    """Further measurements of a model, such as `lmlib.evaluate.suite.suite.Suite`."""

    def length(self, trained: int | None) -> int:
        """Returns the sequence length for a model trained on sequences of `trained` tokens."""

    def metrics(self, length: int, codec: TextCodec | None) -> tuple[str, ...]:
        """Returns the names of the metrics, measured on sequences of `length` tokens."""

    def evaluator(
        self, mesh: Mesh, compute: Compute, vocab: int, codec: TextCodec | None, length: int
    ) -> Callable[[Any], dict[str, float]]:
        """Returns a function from a model to its metrics; every process calls it."""


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Settings for evaluating a run's model on its `validation` data.

    Args:
      every: steps from one evaluation to the next; the last step is evaluated too.
      batches: batches of each source per evaluation; `None` for all. After the last step, a finite
        source is evaluated completely.
      weights: weight of each named source in the total; `None` weights by the counted targets.
      suite: further measurements per evaluation, at the cost of 10,000 to 40,000 tokens; `None` for
        none.
    """

    every: int = 1_000
    batches: int | None = None
    weights: Mapping[str, float] | None = None
    suite: Suite | None = None
