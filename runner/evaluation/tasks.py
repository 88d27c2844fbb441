"""Tasks of lm-eval, EleutherAI's evaluation harness, with a model's generation_config.json."""

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import ConfigError, did_you_mean, user_errors
from runner.evaluation.answering import Answering
from runner.inference.hugging_face_tokenizer import hugging_face_tokenizer
from runner.inference.loaded import Loaded

FILE = "generation_config.json"
# The defaults of `transformers`, for settings that are neither in the task nor in the file.
_USUAL = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
SAMPLING = tuple(_USUAL)
_NEW_TOKENS = "max_new_tokens"

_LENGTH = 2048  # tokens, if the maximum is unknown; as in `hf`
# Keys that do not affect the answers, and keys that lm-eval always sets itself.
_WITHOUT_EFFECT = {
    "max_length", "do_sample", "use_cache",  # set by lm-eval
    "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id",
    "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory",
    "compile_config", "disable_compile", "continuous_batching_config", "renormalize_logits",
    "remove_invalid_values", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "return_dict_in_generate", "transformers_version",
    "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "early_stopping",
    "length_penalty", "diversity_penalty", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "assistant_ensemble_weight", "target_lookbehind", "max_matching_ngram_size", "speculation_type",
}  # fmt: skip
_ONLY_DRAWN = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}
# Values of other keys that change nothing.
_NEUTRAL: dict[str, Any] = {
    "min_length": 0, "min_new_tokens": 0, "num_beams": 1, "num_beam_groups": 1,
    "num_return_sequences": 1, "no_repeat_ngram_size": 0, "guidance_scale": 1.0,
    "token_healing": False, "use_mtp": False, **_ONLY_DRAWN,
}  # fmt: skip


@dataclass(frozen=True)
class GenerationSettings:
    """The settings in a generation_config.json.

    Raises ValueError if a value that is used is not a number.
    """

    content: Mapping[str, Any]  # the JSON object; empty if there is no file
    name: str  # name of the model, for errors

    def __post_init__(self) -> None:
        for key in (*SAMPLING, _NEW_TOKENS):
            value = self.content.get(key)
            whole = key in ("top_k", _NEW_TOKENS)
            if type(value) not in ((int, type(None)) if whole else (int, float, type(None))):
                raise ValueError(
                    f"{FILE} of {self.name} has {key}={value!r:.40}: it must be a "
                    f"{'whole ' * whole}number"
                )
        most = self.max_new_tokens
        if most is not None and not 0 < most < 2**31:
            raise ValueError(
                f"{FILE} of {self.name} has {_NEW_TOKENS}={most}: it must be from 1 to 2^31 - 1"
            )

    @property
    def max_new_tokens(self) -> int | None:
        """The maximum number of new tokens, overriding the task; `None`: the task decides."""
        return self.content.get(_NEW_TOKENS)

    def sampling(self, said: Mapping[str, Any], drawn: bool) -> dict[str, Any]:
        """Returns the arguments of `lmlib.generate.Sampling`.

        Args:
          said: the task's own settings among `SAMPLING`, which take precedence.
          drawn: True if the task wants random answers.
        """
        known = {key: value for key, value in self.content.items() if value is not None}
        found = {key: said.get(key, known.get(key, usual)) for key, usual in _USUAL.items()}
        found["top_k"] = found["top_k"] or None  # 0: all
        if not drawn:
            found["temperature"] = 0.0
        return found

    def ignored(self, drawn: bool) -> dict[str, Any]:
        """Returns the settings that change answers in `transformers` and are ignored here."""
        read = {*SAMPLING, _NEW_TOKENS, *_WITHOUT_EFFECT, *(() if drawn else _ONLY_DRAWN)}
        return {
            key: value
            for key, value in self.content.items()
            if key not in read
            and not key.startswith("_")
            and value is not None
            and not (key in _NEUTRAL and value == _NEUTRAL[key])
        }


@dataclass(frozen=True)
class Tasks:
    """The tasks to run."""

    names: tuple[str, ...]  # tasks, groups of tasks and tags; `*` stands for any characters
    include_path: str | None = None  # a folder with more tasks, as YAML
    # examples before each question; `None`: the default of each task
    num_fewshot: int | None = None
    # the number of questions of each task, from the first; below 1 a fraction; `None`: all
    limit: float | None = None
    chat: bool = False  # True to apply the tokenizer's chat template


def evaluate_tasks(
    loaded: Loaded,
    tasks: Tasks,
    sequence_length: int | None = None,
    show: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> dict[str, Any]:
    """Runs `lm_eval.simple_evaluate`, which also gets `settings`.

    It runs in one process. Raises ConfigError if the extra `eval` is not installed, there is no
    such task, its data is not available, or the model cannot answer it.

    Args:
      sequence_length: maximum length of the model's input in tokens; `None`: the longest training
        sequence, or 2,048 if that is unknown.
    """
    with user_errors():
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
        manager = _manager(tasks.include_path, _files(tasks.include_path))
        chosen = []
        for name in tasks.names:
            matching = manager.match_tasks([name])
            if not matching:
                near = did_you_mean(name, manager.all_tasks)
                raise ConfigError(f"there is no task {name}. {near:.300}")
            chosen += matching
        # lm-eval would fork processes for standard errors, which can deadlock with JAX's threads.
        os.environ.setdefault("DISABLE_MULTIPROC", "1")
        try:
            return lm_eval.simple_evaluate(
                LmEvalModel(answering, tokenizer, generation, show),
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
                f"the data of {', '.join(chosen)} is not available: "
                f"{' '.join(str(error).split())}; without a network, use tasks from local files "
                "(--include_path)"
            ) from error


@functools.lru_cache(maxsize=2)  # lm-eval reads 13,000 files for it, in many seconds
def _manager(include_path: str | None, files: Sequence[tuple[str, int]]) -> Any:
    """Returns the manager of lm-eval's tasks and of the tasks in a folder with these files."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path)


def _files(folder: str | None) -> tuple[tuple[str, int], ...]:
    """Returns the files in a folder, with their modification times."""
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--include_path={folder} is not a folder: it holds tasks as YAML files")
    files = () if folder is None else (file for file in Path(folder).rglob("*") if file.is_file())
    return tuple(sorted((str(file), file.stat().st_mtime_ns) for file in files))


def tasks_table(found: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Returns the table of lm-eval for each model."""
    from lm_eval.utils import make_table

    return "\n".join(f"{model}\n{make_table(results)}" for model, results in found)


def tasks_json(found: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Returns the results of lm-eval as JSON, without single questions."""
    kept = [
        {"model": model, **{key: value for key, value in results.items() if key != "samples"}}
        for model, results in found
    ]
    return json.dumps(kept, indent=1, default=str) + "\n"
