"""Validation as an experiment sets it: in part while training goes on, whole at its end."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lmlib.data.batch import Source
from lmlib.data.flat_tokens import FlatTokens
from lmlib.evaluate.mean_loss import Evaluation, Evaluator
from lmlib.evaluate.scoring import Scorer
from lmlib.evaluate.suite.suite import SuiteEvaluator
from lmlib.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class Validated:
    """A loss in nats per token, and in bits per byte where the data is made of text."""

    loss: float
    bits_per_byte: float | None


class Validation:
    """Evaluates on an experiment's validation sets."""

    def __init__(self, experiment: Experiment):
        self._sets = experiment.validation_sets
        self._named = isinstance(experiment.validation, Mapping)
        self._weights = experiment.evaluation.weights
        self._batches = experiment.evaluation.batches
        self._evaluator = Evaluator(experiment.mesh, experiment.compute)
        self._suite = _suite(experiment)

    def metrics(self, model: Any) -> dict[str, float]:
        """`Experiment.evaluation_metrics`; losses are over the first `evaluation.batches` of each
        set, the same ones each time."""
        found = self._evaluated(model, whole=False)
        lines = {"": self._total(found)}
        if self._named:
            lines |= {f"/{name}": self._validated(name, each) for name, each in found.items()}
        metrics: dict[str, float] = {}
        for name, each in lines.items():
            metrics[f"validation_loss{name}"] = each.loss
            if each.bits_per_byte is not None:
                metrics[f"validation_bits_per_byte{name}"] = each.bits_per_byte
        return metrics if self._suite is None else {**metrics, **self._suite(model)}

    def whole(self, model: Any) -> tuple[Validated, dict[str, Validated]]:
        """The total over all batches, and by the names of the sets, if they have some. Of a set
        that never ends it is over `evaluation.batches`."""
        found = self._evaluated(model, whole=True)
        by_name = {name: self._validated(name, each) for name, each in found.items()}
        return self._total(found), by_name if self._named else {}

    def seen(self, whole: bool) -> str:
        """What `whole`, or else `metrics`, evaluates on, in words."""
        ends = [source.batches for source in self._sets.values()]
        parts = [self._count(source, whole) for source in self._sets.values()]
        everything = "the whole split" if len(ends) == 1 else "the whole of each set"
        if parts == ends:
            return everything
        if len(ends) == 1:
            of = "" if ends[0] is None else f" of {ends[0]:,}"
            return f"the first {parts[0]:,}{of} batches"
        first = f"the first {self._batches:,} batches"
        if whole and any(ends):
            return f"{everything}, of one that never ends {first}"
        return f"{first} of each set"

    def _total(self, found: Mapping[str, Evaluation]) -> Validated:
        """The mean over the sets by `evaluation.weights`: without them each target counts once,
        and in bits per byte each byte."""
        each = {name: self._validated(name, evaluation) for name, evaluation in found.items()}
        if len(found) == 1:
            return next(iter(each.values()))
        tokens = {name: float(evaluation.tokens) for name, evaluation in found.items()}
        loss = _mean({name: one.loss for name, one in each.items()}, self._weights or tokens)
        bits = {n: one.bits_per_byte for n, one in each.items() if one.bits_per_byte is not None}
        if len(bits) < len(each):
            return Validated(loss, None)
        in_bytes = {n: count * (self._sets[n].bytes_per_target or 0) for n, count in tokens.items()}
        return Validated(loss, _mean(bits, self._weights or in_bytes))

    @property
    def gzip_bits_per_byte(self) -> float | None:
        """What `gzip -9` needs for the same texts, if that was measured; of a single set."""
        if len(self._sets) > 1:
            return None
        (source,) = self._sets.values()
        return source.gzip_bits_per_byte if isinstance(source, FlatTokens) else None

    def _evaluated(self, model: Any, whole: bool) -> dict[str, Evaluation]:
        return {
            name: self._evaluator(model, source, self._count(source, whole))
            for name, source in self._sets.items()
        }

    def _count(self, source: Source, whole: bool) -> int:
        """The batches of `source` that are evaluated, none past its end."""
        some, end = self._batches, source.batches
        if end is None:
            assert some is not None  # Experiment.check saw to it
            return some
        return end if whole or some is None else min(some, end)

    def _validated(self, name: str, evaluation: Evaluation) -> Validated:
        in_bytes = self._sets[name].bytes_per_target
        bits = None if in_bytes is None else evaluation.bits_per_byte(in_bytes)
        return Validated(evaluation.loss, bits)


def _suite(experiment: Experiment) -> SuiteEvaluator | None:
    if experiment.evaluation.suite is None:
        return None
    return SuiteEvaluator(
        experiment.evaluation.suite,
        Scorer(experiment.mesh, experiment.compute),
        experiment.data.max_token_id + 1,
        experiment.text_codec,
        experiment.suite_length,
    )


def _mean(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return sum(weights[name] * value for name, value in values.items()) / sum(weights.values())
