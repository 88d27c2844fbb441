"""Evaluates models on data sets; shows the results as tables and JSON."""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lmlib.evaluate.documents import DocumentsEvaluation, evaluate_documents
from lmlib.evaluate.ratio import Estimate
from lmlib.evaluate.scoring import Scorer
from lmlib.evaluate.suite.suite import Suite
from lmlib.evaluate.windows import Packing
from lmlib.models.model import check_length
from lmlib.terminal.quantities import count_text, duration_text
from lmlib.terminal.table import columns
from runner.config.configs import longest_row
from runner.errors import ConfigError, chosen_sizes, user_errors
from runner.evaluation.data_sets import DataSet
from runner.inference.loaded import Loaded
from runner.monitoring.progress_line import now_and_then

LONGEST = 2048  # default row length in tokens, if the model's own is unknown
SMALLER = "give a smaller --sequence_length or --batch_size"  # advice when memory runs out
_BATCH_TOKENS = 16_384


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings for batching documents."""

    # tokens per row; `None`: the run's, or else the model's maximum up to 2,048
    sequence_length: int | None = None
    batch_size: int | None = None  # rows per batch; `None`: about 16,384 tokens per batch
    # tokens of context at the start of each window of a long document, except the first
    overlap: int = 0
    packed: bool = True  # True to put several documents into a row


@dataclasses.dataclass(frozen=True)
class Measured:
    """The result of a model on a data set."""

    model: str  # the source of the weights: `WORKDIR@STEP`, or a folder
    step: int | None  # step of the run's checkpoint, if it is one
    data: str  # name of the data set
    sequence_length: int  # tokens per row, which is the longest context of a target
    evaluation: DocumentsEvaluation


_scorer_of = functools.lru_cache(maxsize=1)(Scorer)  # models of one shape share its programs


def measure(
    loaded: Loaded, data_sets: Sequence[DataSet], settings: Settings, show: Callable[[str], None]
) -> Iterator[Measured]:
    """Yields the result on each data set; `show` is called with progress lines."""
    length, rows = settings.sequence_length or default_length(loaded), settings.batch_size
    scorer = _scorer_of(loaded.mesh, loaded.compute)
    divisor = scorer.divisor
    if rows is not None and rows % divisor:
        raise ConfigError(
            f"--batch_size={rows} cannot be split over these devices: give a multiple of {divisor}"
        )
    with user_errors(), chosen_sizes(SMALLER):
        rows = rows or divisor * max(1, _BATCH_TOKENS // (length * divisor))
        packing = Packing(rows, length, settings.packed)
        check_length(loaded.model, length, loaded.compute)
    for data in data_sets:
        began, name = time.perf_counter(), f"{loaded.name} on {data.name}"
        of = "" if data.tokens is None else f" of {count_text(data.tokens)}"
        tell = now_and_then(show)

        def progress(documents: int, targets: int) -> None:
            tell(lambda: f"{name}: {count_text(targets)}{of} tokens, {documents:,} documents")  # noqa: B023

        try:
            evaluation = evaluate_documents(
                loaded.model, data.documents(loaded), scorer, packing, settings.overlap, progress
            )
        except ConfigError:
            raise
        except (ValueError, OSError) as error:
            raise ConfigError(f"{data.name}: {error}") from error
        took = time.perf_counter() - began
        show(
            f"{name}: loss {evaluation.loss.value:.4f} nats per token; "
            f"{count_text(evaluation.targets)} tokens in {duration_text(took)}, "
            f"{count_text(evaluation.targets / took)} tokens per second"
        )
        yield Measured(loaded.name, loaded.step, data.name, length, evaluation)


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


SuiteScores = tuple[str, dict[str, float]]  # a model's name, and its metrics

_MOST_COLUMNS = 6  # of the table by position
_UNITS = {
    "loss": "nats per token",
    "perplexity": "1",
    "bits_per_byte": "bits per byte",
    "bits_per_character": "bits per character",
}


def tables(found: Sequence[Measured]) -> str:
    """Returns a row for each model and data set; a few results also get the loss by position."""
    which, named, title = _models(found)
    rows = [
        (
            *which, "data", "documents", "tokens", "loss, nats per token", "perplexity",
            "bits per byte", "bits per character",
        )
    ]  # fmt: skip
    for each, name in zip(found, named, strict=True):
        evaluation = each.evaluation
        rows.append(
            (
                *([name] if which else ()),
                each.data,
                f"{evaluation.documents:,}",
                f"{evaluation.targets:,}",
                *(_shown(getattr(evaluation, name)) for name in _UNITS),
            )
        )
    shown = [columns(rows)]
    if len(found) <= _MOST_COLUMNS:
        names = [
            f"{'step ' * (which == ['step'])}{name}, {each.data}" if which else each.data
            for each, name in zip(found, named, strict=True)
        ]
        shown.append(_by_position(found, names))
    if any("±" in table for table in shown):  # absent for a single document
        shown.insert(1, "± is one standard error over documents")
    return "\n\n".join([title, *shown])


def _models(found: Sequence[Measured]) -> tuple[list[str], list[str], str]:
    """Returns the heading and entries of the model column, and the title of the table."""
    models = list(dict.fromkeys(each.model for each in found))
    lengths = sorted({each.sequence_length for each in found})
    of = f"sequences of {' to '.join(f'{length:,}' for length in lengths)} tokens"
    names = [each.model for each in found]
    if len(models) == 1:
        return [], names, f"{models[0]}, {of}"
    runs = {model.rpartition("@")[0] for model in models}
    if len(runs) == 1 and all(each.step is not None for each in found):  # one run over its steps
        return ["step"], [f"{each.step:,}" for each in found], f"{runs.pop()}, {of}"
    return ["model"], names, of[0].upper() + of[1:]


def json_text(found: Sequence[Measured], settings: Settings) -> str:
    """Returns all numbers with units and standard errors; non-finite numbers are strings."""
    counts = ("documents", "targets", "bytes", "characters")
    results = [
        {
            **{name: getattr(each, name) for name in ("model", "step", "data", "sequence_length")},
            **{name: getattr(each.evaluation, name) for name in counts},
            **{n: _number(getattr(each.evaluation, n), unit) for n, unit in _UNITS.items()},
            "loss_by_position": [
                {
                    **{name: getattr(at, name) for name in ("first", "last", "targets")},
                    **_number(at.loss, "nats per token"),
                }
                for at in each.evaluation.by_position
            ],
        }
        for each in found
    ]
    content = {"overlap": settings.overlap, "packed": settings.packed, "results": results}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _number(estimate: Estimate | None, unit: str) -> Any:
    if estimate is None:
        return None
    numbers = dataclasses.asdict(estimate).items()
    strict = {k: v if v is None or math.isfinite(v) else str(v) for k, v in numbers}
    return {**strict, "unit": unit}


def _shown(estimate: Estimate | None) -> str:
    if estimate is None:
        return "unknown"
    if estimate.standard_error is None:
        return f"{estimate.value:.4f}"
    return f"{estimate.value:.4f} ± {estimate.standard_error:.4f}"


def _by_position(found: Sequence[Measured], names: Sequence[str]) -> str:
    places = sorted({(at.first, at.last) for each in found for at in each.evaluation.by_position})
    rows = [("position", *names)]
    for place in places:
        cells = []
        for each in found:
            here = [at.loss for at in each.evaluation.by_position if (at.first, at.last) == place]
            cells.append(_shown(here[0]) if here else "")
        rows.append((f"{place[0]:,}–{place[1]:,}", *cells))
    title = "Loss by position, nats per token: tokens of context before the one that predicts"
    return f"{title}\n{columns(rows)}"


def suite_table(found: Sequence[SuiteScores]) -> str:
    """Returns a table with a row for each measurement and a column for each model."""
    names = dict.fromkeys(name for _, metrics in found for name in metrics)
    rows = [("measurement", *(model for model, _ in found))]
    for name in names:
        cells = (f"{metrics[name]:.4f}" if name in metrics else "" for _, metrics in found)
        rows.append((name.removeprefix("suite/"), *cells))
    return columns(rows)


def suite_json(found: Sequence[SuiteScores]) -> str:
    content: list[Any] = [{"model": model, "results": metrics} for model, metrics in found]
    return json.dumps(content, indent=1) + "\n"
