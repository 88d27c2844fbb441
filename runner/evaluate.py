"""Evaluates models on texts, on tasks of lm-eval, or with a suite for small models.

    python -m runner.evaluate --from=WORKDIR --data=FLAT_TOKENS_OR_TEXT
    python -m runner.evaluate --from=WORKDIR --all_checkpoints --data=TEXT.jsonl --json=FILE
    python -m runner.evaluate --from=WORKDIR --tasks=arc_easy,lambada_openai
    python -m runner.evaluate --from=WORKDIR --suite

Each document is evaluated separately. docs/evaluation.md says how tokens are counted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags

from runner.command_line.command import run, show, take_flags
from runner.command_line.exit_status import FINISHED
from runner.command_line.flags import DTYPES, MOST, loading, model_flags
from runner.command_line.paths import check_can_be_made
from runner.errors import ConfigError, user_errors

_FROM = flags.DEFINE_multi_string("from", [], "RUN, RUN@STEP, Hugging Face folder, or Hub name.")
_DATA = flags.DEFINE_multi_string(
    "data",
    [],
    "Folder of flat tokens, or file or folder of text, JSON lines or Parquet; repeatable; default: "
    "the run's validation data.",
)
_TASKS = flags.DEFINE_list("tasks", [], "Comma-separated tasks of lm-eval; * is a wildcard.")
_INCLUDE_PATH = flags.DEFINE_string("include_path", None, "Folder with more tasks, as YAML.")
_NUM_FEWSHOT = flags.DEFINE_integer("num_fewshot", None, "Examples per question.", 0)
_LIMIT = flags.DEFINE_float(
    "limit", None, "Questions per task; below 1: a fraction of them.", 0, MOST
)
_CHAT = flags.DEFINE_bool("chat", False, "Apply the chat template to tasks.")
_SUITE = flags.DEFINE_bool(
    "suite", False, "Measure bits per byte by kind of text, copying, induction."
)
_SPLIT = flags.DEFINE_string("split", "validation", "Split of flat tokens.")
_TEXT_COLUMN = flags.DEFINE_string("text_column", "text", "Text column of JSON lines and Parquet.")
_ALL_CHECKPOINTS = flags.DEFINE_bool("all_checkpoints", False, "Evaluate all checkpoints of a run.")
_JSON = flags.DEFINE_string("json", None, "JSON file for all numbers and standard errors.")
_SEQUENCE_LENGTH = flags.DEFINE_integer(
    "sequence_length", None, "Tokens per row; default: as in the run.", 1, MOST
)
_OVERLAP = flags.DEFINE_integer("overlap", 0, "Tokens of context at the start of a window.", 0)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", None, "Rows per batch; default: 16,384 tokens.", 1, MOST
)
_PACKED = flags.DEFINE_bool("packed", True, "Put several separate documents into a row.")
_DTYPE = flags.DEFINE_enum("dtype", None, DTYPES, "Compute dtype; default: as in the run.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder of another tokenizer than the model's.")
model_flags()

if __name__ == "__main__":
    take_flags()  # the imports below take seconds

from lmlib.checkpoint import RemovedCheckpointError
from lmlib.checkpoint.folders import reading, steps_in
from lmlib.evaluate.suite.suite import Suite
from lmlib.storage.atomic_file import write_atomically
from runner.config.references import RunReference, resolve
from runner.evaluation.data_sets import data_set, validation_of
from runner.evaluation.measuring import (
    Measured,
    Settings,
    json_text,
    measure,
    measure_suite,
    suite_json,
    suite_table,
    tables,
)
from runner.evaluation.tasks import Tasks, evaluate_tasks, tasks_json, tasks_table
from runner.inference.loaded import Loaded, load
from runner.jax_settings.devices import start_devices

_T = TypeVar("_T")


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    if arguments or not _FROM.value:
        raise ConfigError("give --from and --data, as in: --from=WORKDIR --data=TEXT; see --help")
    start_devices()
    settings = Settings(
        _SEQUENCE_LENGTH.value, _BATCH_SIZE.value, _OVERLAP.value, packed=_PACKED.value
    )
    if _JSON.value is not None:
        check_can_be_made(Path(_JSON.value))
    if sum(map(bool, (_DATA.value, _TASKS.value, _SUITE.value))) > 1:
        raise ConfigError("--data, --tasks and --suite are three evaluations: give one of them")
    if _SUITE.value:
        length = _SEQUENCE_LENGTH.value
        scored = (measure_suite(loaded, Suite(), length) for loaded in _each_loaded())
        _report(scored, suite_table, suite_json)
    elif _TASKS.value:
        _report(_answered(), tasks_table, tasks_json)
    else:
        _report(_measured(settings), tables, lambda found: json_text(found, settings))
    return FINISHED


def _report(
    found: Iterable[_T], table: Callable[[list[_T]], str], as_json: Callable[[list[_T]], str]
) -> None:
    """Writes each new result to --json, and finally prints all, even if one failed."""
    kept: list[_T] = []
    try:
        for each in found:
            kept.append(each)
            if _JSON.value is not None:
                with user_errors():
                    write_atomically(Path(_JSON.value), as_json(kept))
    finally:
        if kept:
            print(table(kept))


def _measured(settings: Settings) -> Iterator[Measured]:
    with user_errors():
        given = [data_set(path, _SPLIT.value, _TEXT_COLUMN.value) for path in _DATA.value]
    for loaded in _each_loaded():
        with user_errors():
            data_sets = given or validation_of(loaded)
        if not data_sets:
            raise ConfigError(f"{loaded.name} has no flat tokens that it validated on: give --data")
        yield from measure(loaded, data_sets, settings, show)


def _answered() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each model's name with its results from lm-eval."""
    tasks = Tasks(
        tuple(_TASKS.value), _INCLUDE_PATH.value, _NUM_FEWSHOT.value, _LIMIT.value, _CHAT.value
    )
    for loaded in _each_loaded():
        length = _SEQUENCE_LENGTH.value
        yield loaded.name, evaluate_tasks(loaded, tasks, length, show, log_samples=False)


def _each_loaded() -> Iterator[Loaded]:
    """Loads the models of --from; with --all_checkpoints, every checkpoint of each run."""
    for reference in _FROM.value:
        if _ALL_CHECKPOINTS.value:
            yield from _each_checkpoint(reference)
        else:
            yield _load(reference)


def _each_checkpoint(reference: str) -> Iterator[Loaded]:
    """Loads each checkpoint of a run, skipping those removed meanwhile.

    If all of them are gone, loads the newest checkpoint at that time.
    """
    with user_errors():
        found = resolve(reference)
        if not isinstance(found, RunReference) or found.step is not None:
            raise ConfigError(f"--all_checkpoints is for a run, WORKDIR, not {reference}")
        steps = steps_in(found.folder)
    read = 0
    for step in steps:
        try:
            with reading(found.folder / str(step)):
                loaded = _load(f"{reference}@{step}")
        except RemovedCheckpointError as error:
            show(str(error))
        else:
            read += 1
            yield loaded
    if not read:
        yield _load(reference)


def _load(reference: str) -> Loaded:
    return load(reference, dtype=_DTYPE.value, tokenizer=_TOKENIZER.value, **loading(), show=show)


if __name__ == "__main__":
    run(main)
