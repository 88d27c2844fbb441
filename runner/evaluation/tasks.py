"""Tasks of lm-eval, EleutherAI's evaluation harness."""

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmlib.terminal.table import columns
from runner.errors import ConfigError, did_you_mean, user_errors
from runner.evaluation.answering import Answering
from runner.evaluation.generation_settings import GenerationSettings
from runner.inference.hugging_face_tokenizer import hugging_face_tokenizer
from runner.inference.loaded import Loaded
from runner.processes.agreement import agreed

_LENGTH = 2048  # tokens, if the maximum is unknown; as in `hf`


@dataclass(frozen=True)
class Tasks:
    """The tasks to run.

    Args:
      names: tasks, groups of tasks and tags; `*` stands for any characters.
      include_path: a folder with more tasks, as YAML.
      num_fewshot: examples before each question; `None`: the default of each task.
      limit: the number of questions of each task, from the first; below 1 a fraction; `None`: all.
      chat: True to apply the tokenizer's chat template.
    """

    names: tuple[str, ...]
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: float | None = None
    chat: bool = False


def evaluate_tasks(
    loaded: Loaded,
    tasks: Tasks,
    sequence_length: int | None = None,
    show: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> dict[str, Any] | None:
    """Runs `lm_eval.simple_evaluate`, which also gets `settings`.

    Every process must call it. Returns the results on the first process and `None` on the others.

    Raises ConfigError if the extra `eval` is not installed, there is no such task, its data is not
    available, or the model cannot answer it.

    Args:
      sequence_length: maximum length of the model's input in tokens; `None`: the longest training
        sequence, or 2,048 if that is unknown.
    """
    with agreed(), user_errors():
        try:
            import lm_eval.tasks

            from runner.evaluation.lm_eval_model import LmEvalModel
        except ImportError as error:
            raise ConfigError(
                f"--tasks needs lm-eval: pip install 'lmlib[eval]' ({error})"
            ) from error

        tokenizer = hugging_face_tokenizer(loaded)
        end_ids = {*loaded.end_ids, tokenizer.eos_token_id} - {None}
        length = sequence_length or loaded.longest or _LENGTH
        answering = Answering(loaded, tokenizer.decode, sorted(end_ids), length, show)
        generation = GenerationSettings(loaded.generation_settings, loaded.name)
        model = LmEvalModel(answering, tokenizer, generation, show)

        def found() -> dict[str, Any]:
            manager = _manager(tasks.include_path, _files(tasks.include_path))
            chosen = []
            for name in tasks.names:
                matching = manager.match_tasks([name])
                if not matching:
                    near = did_you_mean(name, manager.all_tasks)
                    raise ConfigError(f"there is no task {name}. {near:.300}")
                chosen += matching
            # lm-eval would fork processes for standard errors, which can deadlock with JAX's
            # threads.
            os.environ.setdefault("DISABLE_MULTIPROC", "1")
            try:
                return lm_eval.simple_evaluate(
                    model,
                    tasks=chosen,
                    num_fewshot=tasks.num_fewshot,
                    limit=tasks.limit,
                    apply_chat_template=tasks.chat,
                    task_manager=manager,
                    **settings,
                )
            # raised by `datasets` and `huggingface_hub`, for instance without a network
            except OSError as error:
                raise ConfigError(
                    f"the data of {', '.join(chosen)} cannot be had: {' '.join(str(error).split())}"
                    "; without a network, use tasks from local files (--include_path)"
                ) from error

        return answering.ask(found)


@functools.lru_cache(maxsize=2)  # lm-eval reads 13,000 files for it, in many seconds
def _manager(include_path: str | None, files: Sequence[tuple[str, int]]) -> Any:
    """Returns the manager of lm-eval's tasks and of the tasks in a folder with these files."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path)


def _files(folder: str | None) -> tuple[tuple[str, int], ...]:
    """Returns the files in a folder, with their modification times."""
    files = () if folder is None else (file for file in Path(folder).rglob("*") if file.is_file())
    return tuple(sorted((str(file), file.stat().st_mtime_ns) for file in files))


def task_rows(results: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Returns task, metric, value and standard error of each number.

    A metric's filter follows a comma, unless it is "none".
    """
    rows = []
    for task, numbers in results["results"].items():
        for key, value in numbers.items():
            metric, _, filtered = key.partition(",")
            if not isinstance(value, float | int) or metric.endswith("_stderr") or not filtered:
                continue
            error = numbers.get(f"{metric}_stderr,{filtered}")
            shown_error = f"{error:.4f}" if isinstance(error, float) else ""
            name = metric if filtered == "none" else f"{metric}, {filtered}"
            rows.append((task, name, f"{value:.4f}", shown_error))
    return rows


def tasks_table(found: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Returns a table with a row for each number of each model."""
    rows = [("model", "task", "metric", "value", "standard error")]
    for model, results in found:
        rows += [(model, *row) for row in task_rows(results)]
    return columns(rows)


def tasks_json(found: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Returns the results of lm-eval as JSON, without single questions."""
    kept = [
        {"model": model, **{key: value for key, value in results.items() if key != "samples"}}
        for model, results in found
    ]
    return json.dumps(kept, indent=1, default=str) + "\n"
