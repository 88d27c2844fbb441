"""Validation as an experiment sets it: in part while training goes on, whole at its end."""

from typing import Any

from lmlib.data.batch import Source
from lmlib.data.flat_tokens import FlatTokens
from lmlib.evaluate.mean_loss import Evaluation, Evaluator
from lmlib.experiment import Experiment


class Validation:
    """Evaluates on an experiment's validation source."""

    def __init__(self, source: Source, experiment: Experiment):
        every, whole = experiment.validation_batches, source.batches
        batches = every or whole
        assert batches is not None  # Experiment.check saw to it
        self._source = source
        self._evaluator = Evaluator(source, experiment.mesh, experiment.compute)
        self._batches = batches
        self._all_batches = whole or batches

    def metrics(self, model: Any) -> dict[str, float]:
        """What an evaluation step adds to its line of metrics.jsonl: the first
        `validation_batches`, the same ones each time."""
        evaluation = self._evaluator(model, self._batches)
        bits = self.bits_per_byte(evaluation)
        metrics = {"validation_loss": evaluation.loss}
        return metrics if bits is None else {**metrics, "validation_bits_per_byte": bits}

    def whole(self, model: Any) -> Evaluation:
        """The loss over all batches; over `validation_batches` if the source never ends."""
        return self._evaluator(model, self._all_batches)

    def bits_per_byte(self, evaluation: Evaluation) -> float | None:
        """`None` where the source is not made of text."""
        in_bytes = self._source.bytes_per_target
        return None if in_bytes is None else evaluation.bits_per_byte(in_bytes)

    @property
    def gzip_bits_per_byte(self) -> float | None:
        """What `gzip -9` needs for the same texts, if that was measured."""
        source = self._source
        return source.gzip_bits_per_byte if isinstance(source, FlatTokens) else None
