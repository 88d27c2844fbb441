"""Evaluates models on data sets."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

from lmlib.evaluate.documents import DocumentsEvaluation, evaluate_documents
from lmlib.evaluate.scoring import Scorer
from lmlib.evaluate.suite.suite import Suite
from lmlib.evaluate.windows import Packing
from lmlib.models.model import check_length
from lmlib.terminal.quantities import count_text, duration_text
from runner.config.stages import longest_row
from runner.errors import ConfigError, chosen_sizes, user_errors
from runner.evaluation.data_sets import DataSet
from runner.inference.loaded import Loaded
from runner.inference.telling import now_and_then

LONGEST = 2048  # default row length in tokens, if the model's own is unknown
SMALLER = "give a smaller --sequence_length or --batch_size"  # advice when memory runs out
_BATCH_TOKENS = 16_384


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings for batching documents.

    Args:
      sequence_length: tokens per row; `None`: the run's, or else the model's maximum up to 2,048.
      batch_size: rows per batch; `None`: about 16,384 tokens per batch.
      overlap: tokens of context at the start of each window of a long document, except the first.
      packed: True to put several documents into a row.
    """

    sequence_length: int | None = None
    batch_size: int | None = None
    overlap: int = 0
    packed: bool = True


@dataclasses.dataclass(frozen=True)
class Measured:
    """The result of a model on a data set.

    Attributes:
      model: the source of the weights: `WORKDIR@STEP`, or a folder.
      step: step of the run's checkpoint, if it is one.
      data: name of the data set.
      sequence_length: tokens per row, which is the longest context of a target.
    """

    model: str
    step: int | None
    data: str
    sequence_length: int
    evaluation: DocumentsEvaluation


class Measuring:
    """Evaluates models, compiling once per model shape."""

    def __init__(self, settings: Settings, show: Callable[[str], None]):
        """Sets up the evaluation; `show` is called with progress lines."""
        self._settings, self._show = settings, show
        self._scorer = functools.lru_cache(Scorer)

    def __call__(self, loaded: Loaded, data_sets: Sequence[DataSet]) -> Iterator[Measured]:
        """Yields the result of each data set."""
        length = self._settings.sequence_length or default_length(loaded)
        scorer = self._scorer(loaded.mesh, loaded.compute)
        with user_errors(), chosen_sizes(SMALLER):
            packing = Packing(self._rows(length, scorer.divisor), length, self._settings.packed)
            check_length(loaded.model, length, loaded.compute)
        for data in data_sets:
            evaluation = self._evaluated(loaded, data, scorer, packing)
            yield Measured(loaded.name, loaded.step, data.name, length, evaluation)

    def _evaluated(
        self, loaded: Loaded, data: DataSet, scorer: Scorer, packing: Packing
    ) -> DocumentsEvaluation:
        began, name = time.perf_counter(), f"{loaded.name} on {data.name}"
        of = "" if data.tokens is None else f" of {count_text(data.tokens)}"
        show = now_and_then(self._show)

        def tell(documents: int, targets: int) -> None:
            show(lambda: f"{name}: {count_text(targets)}{of} tokens, {documents:,} documents")

        try:
            evaluation = evaluate_documents(
                loaded.model,
                data.documents(loaded),
                scorer,
                packing,
                self._settings.overlap,
                tell,
            )
        except ConfigError:
            raise
        except (ValueError, OSError) as error:
            raise ConfigError(f"{data.name}: {error}") from error
        took = time.perf_counter() - began
        self._show(
            f"{name}: loss {evaluation.loss.value:.4f} nats per token; "
            f"{count_text(evaluation.targets)} tokens in {duration_text(took)}, "
            f"{count_text(evaluation.targets / took)} tokens per second"
        )
        return evaluation

    def _rows(self, length: int, divisor: int) -> int:
        rows = self._settings.batch_size
        if rows is None:
            return divisor * max(1, _BATCH_TOKENS // (length * divisor))
        if rows % divisor:
            raise ConfigError(
                f"--batch_size={rows} cannot be split over these devices: give a multiple of "
                f"{divisor}"
            )
        return rows


def default_length(loaded: Loaded) -> int:
    """Returns the sequence length of the run, or else of the model's longest input up to 2,048."""
    trained = longest_row(loaded.cfg) if loaded.cfg is not None and loaded.step else None
    return trained or min(loaded.longest or LONGEST, LONGEST)


def measure_suite(
    loaded: Loaded, suite: Suite, sequence_length: int | None = None
) -> tuple[str, dict[str, float]]:
    """Returns the name of `loaded` and its scores; every process must call it.

    Raises ConfigError if the model cannot compute sequences of this length.

    Args:
      sequence_length: tokens per row; `None`: `Suite.length` of the default length.
    """
    length = sequence_length or suite.length(default_length(loaded))
    with user_errors(), chosen_sizes(SMALLER):
        check_length(loaded.model, length, loaded.compute)
        evaluator = suite.evaluator(
            loaded.mesh, loaded.compute, loaded.model.vocab, loaded.codec, length
        )
    return loaded.name, evaluator(loaded.model)
