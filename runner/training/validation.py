"""Validation: on part of each set during training, on all of it at the end."""

from collections.abc import Callable, Mapping
from typing import Any

from lmlib.data.batch import Source
from lmlib.data.flat_tokens import FlatTokens
from lmlib.evaluate.validation import Evaluation, Evaluator, bits_per_byte, validation_metrics
from lmlib.experiment import Experiment
from lmlib.optim.average import evaluated_model
from lmlib.runs.validation import StoredSet, StoredValidation
from lmlib.state import State


class Validation:
    """Evaluates the objective's metrics on an experiment's validation sets."""

    def __init__(self, experiment: Experiment):
        self._sets = experiment.validation_sets
        self._named = isinstance(experiment.validation, Mapping)
        self._weights = experiment.evaluation.weights
        self._batches = experiment.evaluation.batches
        self._objective = experiment.objective
        self._last = experiment.steps
        self._evaluator = Evaluator(experiment.mesh, experiment.compute, experiment.objective)
        self._suite: Callable[[Any], dict[str, float]] | None = None
        if (suite := experiment.evaluation.suite) is not None:
            vocab, length = experiment.data.max_token_id + 1, experiment.suite_length
            self._suite = suite.evaluator(
                experiment.mesh, experiment.compute, vocab, experiment.text_codec, length
            )

    @property
    def units(self) -> Mapping[str, str]:
        """The unit of each metric that `whole` returns, by its name."""
        return validation_metrics(self._objective, self._sets, self._named, "validation")

    def metrics(self, state: State) -> dict[str, float]:
        """Returns `Experiment.evaluation_metrics`, measured on the same batches each time."""
        metrics = self._metrics(self._measured(state, whole=False), "evaluation")
        return metrics if self._suite is None else metrics | self._suite(evaluated_model(state))

    def whole(self, state: State) -> tuple[dict[str, float], StoredValidation]:
        """Evaluates on all batches of each set (some of an endless set), without the suite.

        Returns the metrics (`validation_loss`, …), and the sums over batches behind them.
        """
        found = self._measured(state, whole=True)
        weights, sets = self._weights or {}, {}
        for name, each in found.items():
            weight = float(weights[name]) if name in weights else None
            in_text = self._sets[name].bytes_per_target
            sets[name] = StoredSet(each.digest, in_text, weight, each.counts, each.sums)
        stored = StoredValidation(
            step=self._last, cross_entropy=self._objective.cross_entropy, sets=sets
        )
        return self._metrics(found, "validation"), stored

    def text(self, metrics: Mapping[str, float]) -> str:
        """Formats the evaluation as a line, with units and the evaluated batches."""
        objective = self._objective
        shown = [name for name, metric in objective.metrics.items() if metric.shown]
        parts = []
        for name in ("loss", *shown):
            words = objective.loss_name if name == "loss" else name.replace("_", " ")
            key, unit = f"evaluation_{name}", objective.metrics[name].unit
            each = (f"{one} {metrics[f'{key}/{one}']:.4f}" for one in self._sets if self._named)
            of_sets = f" ({', '.join(each)})" if self._named else ""
            parts.append(f"{words} {metrics[key]:.4f} {unit}{of_sets}")
        if (bits := metrics.get("evaluation_bits_per_byte")) is not None:
            parts.append(f"{bits:.3f} bits per byte")
        return f"evaluation {'  '.join(parts)}  over {self.seen(whole=False)}"

    def seen(self, whole: bool) -> str:
        """Describes the batches that the method `whole`, or else `metrics`, evaluates."""
        ends = [source.batches for source in self._sets.values()]
        counts = [self._count(source, whole) for source in self._sets.values()]
        everything = "the whole split" if len(ends) == 1 else "the whole of each set"
        if counts == ends:
            return everything
        if len(ends) == 1:
            of = "" if ends[0] is None else f" of {ends[0]:,}"
            return f"the first {counts[0]:,}{of} batches"
        first = f"the first {self._batches:,} batches"
        return f"{everything}, of one that never ends {first}" if whole else f"{first} of each set"

    @property
    def compressed_bits_per_byte(self) -> dict[str, float]:
        """The bits per byte of compressors on the validation set.

        Empty if there are several sets, or if the objective has no bits per byte.
        """
        if len(self._sets) > 1 or self._objective.cross_entropy is None:
            return {}
        (source,) = self._sets.values()
        return source.compressed_bits_per_byte if isinstance(source, FlatTokens) else {}

    def _measured(self, state: State, whole: bool) -> dict[str, Evaluation]:
        model, reference_model = evaluated_model(state), state.reference_model
        return {
            name: self._evaluator(model, source, self._count(source, whole), reference_model)
            for name, source in self._sets.items()
        }

    def _metrics(self, found: Mapping[str, Evaluation], begin: str) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for metric in self._objective.metrics:
            values = {name: each.metrics[metric] for name, each in found.items()}
            counts = {name: float(each.count) for name, each in found.items()}
            metrics |= self._lines(f"{begin}_{metric}", values, counts)
        bits, sizes = dict[str, float](), dict[str, float]()
        for name, each in found.items():
            size, nats = self._sets[name].bytes_per_target, self._objective.cross_entropy
            if nats is not None and size is not None:
                bits[name] = bits_per_byte(each.metrics[nats], size)
                sizes[name] = each.count * size
        return metrics | self._lines(f"{begin}_bits_per_byte", bits, sizes)

    def _lines(
        self, metric: str, values: Mapping[str, float], counts: Mapping[str, float]
    ) -> dict[str, float]:
        """Returns the total of a metric, followed by its value on each set if sets have names.

        The total is the mean weighted by `evaluation.weights`, or by `counts` if there are no
        weights. It is left out unless all sets have a value.
        """
        each = {f"{metric}/{name}": value for name, value in values.items()} if self._named else {}
        if len(values) < len(self._sets):
            return each
        if len(values) == 1:  # exact: a weighted mean could round
            return {metric: next(iter(values.values())), **each}
        weights = self._weights or counts
        total = sum(weights[name] * value for name, value in values.items())
        return {metric: total / sum(weights.values()), **each}

    def _count(self, source: Source, whole: bool) -> int:
        """Returns the number of batches of `source` to evaluate."""
        some, end = self._batches, source.batches
        if end is None:
            assert some is not None  # ensured by Experiment.check
            return some
        return end if whole or some is None else min(some, end)
