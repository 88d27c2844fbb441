"""Every model on every data set, one after the other."""

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

LONGEST = 2048  # tokens of a row, where nothing says how long the model's sequences were
SMALLER = "give a smaller --sequence_length or --batch_size"  # where memory is short
_BATCH_TOKENS = 16_384


@dataclasses.dataclass(frozen=True)
class Settings:
    """How documents are put into batches; `None` chooses.

    Args:
      sequence_length: tokens of a row; `None`: as long as the run's were, else as the model takes,
        up to 2,048.
      batch_size: rows of a batch; `None`: of about 16,384 tokens in all.
      overlap: tokens of context that each window of a long document but its first begins with.
      packed: whether a row holds several documents.
    """

    sequence_length: int | None = None
    batch_size: int | None = None
    overlap: int = 0
    packed: bool = True


@dataclasses.dataclass(frozen=True)
class Measured:
    """What came out for a model and a data set.

    Attributes:
      model: whose weights: `WORKDIR@STEP`, or a folder.
      step: of the run's checkpoint, if it is one.
      data: the name of the data set.
      sequence_length: tokens of a row; no target has more context.
    """

    model: str
    step: int | None
    data: str
    sequence_length: int
    evaluation: DocumentsEvaluation


class Measuring:
    """Evaluates models; those of one shape are compiled once."""

    def __init__(self, settings: Settings, show: Callable[[str], None]):
        """`show` gets a line now and then."""
        self._settings, self._show = settings, show
        self._scorer = functools.lru_cache(Scorer)

    def __call__(self, loaded: Loaded, data_sets: Sequence[DataSet]) -> Iterator[Measured]:
        """Yields the result of each data set.

        Raises:
          ConfigError: if the model cannot be evaluated on one of them.
        """
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
    """Returns the tokens of the run's own sequences; without a run, of the longest that the model
    takes, up to 2,048."""
    trained = longest_row(loaded.cfg) if loaded.cfg is not None and loaded.step else None
    return trained or min(loaded.longest or LONGEST, LONGEST)


def measure_suite(
    loaded: Loaded, suite: Suite, sequence_length: int | None = None
) -> tuple[str, dict[str, float]]:
    """Returns the name of `loaded` and its scores; every process must call it.

    Args:
      sequence_length: tokens of a row; `None`: `Suite.length` of what it was trained on.

    Raises:
      ConfigError: if the model cannot compute sequences so long.
    """
    length = sequence_length or suite.length(default_length(loaded))
    with user_errors(), chosen_sizes(SMALLER):
        check_length(loaded.model, length, loaded.compute)
        evaluator = suite.evaluator(
            loaded.mesh, loaded.compute, loaded.model.vocab, loaded.codec, length
        )
    return loaded.name, evaluator(loaded.model)
