"""Every model on every data set, one after the other."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from jax.sharding import Mesh

from lmlib.compute import Compute
from lmlib.evaluate.documents import DocumentsEvaluation, evaluate_documents
from lmlib.evaluate.scoring import Scorer
from lmlib.evaluate.windows import Packing
from lmlib.models.model import check_length
from lmlib.terminal.quantities import count_text, duration_text
from runner.config.stages import longest_row
from runner.errors import ConfigError, chosen_sizes, user_errors
from runner.evaluation.data_sets import DataSet
from runner.inference.loaded import Loaded

LONGEST = 2048  # tokens of a row, where nothing says how long the model's sequences were
SMALLER = "give a smaller --sequence_length or --batch_size"  # where memory is short
_BATCH_TOKENS = 16_384
_TOLD_SECONDS = 10.0


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
        self._settings = settings
        self._show = show
        self._scorers: dict[tuple[Mesh, Compute], Scorer] = {}

    def __call__(self, loaded: Loaded, data_sets: Sequence[DataSet]) -> Iterator[Measured]:
        """Each data set's result as it is there.

        Raises:
          ConfigError: if the model cannot be evaluated on one of them.
        """
        length = self._settings.sequence_length or default_length(loaded)
        scorer = self._scorers.setdefault(
            (loaded.mesh, loaded.compute), Scorer(loaded.mesh, loaded.compute)
        )
        with user_errors(), chosen_sizes(SMALLER):
            packing = Packing(self._rows(length, scorer.divisor), length, self._settings.packed)
            check_length(loaded.model, length, loaded.compute)
        for data in data_sets:
            began = time.perf_counter()
            try:
                evaluation = evaluate_documents(
                    loaded.model,
                    data.documents(loaded),
                    scorer,
                    packing,
                    self._settings.overlap,
                    self._telling(loaded, data),
                )
            except ConfigError:
                raise
            except (ValueError, OSError) as error:
                raise ConfigError(f"{data.name}: {error}") from error
            took = time.perf_counter() - began
            self._show(
                f"{loaded.name} on {data.name}: loss {evaluation.loss.value:.4f} nats per token; "
                f"{count_text(evaluation.targets)} tokens in {duration_text(took)}, "
                f"{count_text(evaluation.targets / took)} tokens per second"
            )
            yield Measured(loaded.name, loaded.step, data.name, length, evaluation)

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

    def _telling(self, loaded: Loaded, data: DataSet) -> Callable[[int, int], None]:
        last = time.monotonic()

        def tell(documents: int, targets: int) -> None:
            nonlocal last
            if (now := time.monotonic()) - last >= _TOLD_SECONDS:
                last = now
                of = "" if data.tokens is None else f" of {count_text(data.tokens)}"
                self._show(
                    f"{loaded.name} on {data.name}: {count_text(targets)}{of} tokens, "
                    f"{documents:,} documents"
                )

        return tell


def default_length(loaded: Loaded) -> int:
    """Tokens of the run's own sequences; without a run, of the longest that the model takes, up to
    2,048."""
    if loaded.cfg is not None and loaded.step:
        trained = longest_row(loaded.cfg)
        if trained is not None:
            return trained
    return min(loaded.longest or LONGEST, LONGEST)
