"""Weights that a run can begin with: of another run, or of a folder of Hugging Face's."""

import dataclasses
import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax

from lmlib import train
from lmlib.checkpoint import Checkpoints
from lmlib.data.metadata import LARGEST_TOKENIZER, TokenizerIdentity, tokenizers_differ
from lmlib.data.stored_json import read_text
from lmlib.experiment import Experiment
from lmlib.hf.families import described
from lmlib.hf.hub import local_folder_of
from lmlib.hf.load import load_weights
from lmlib.hf.tensor_files import read_json
from lmlib.local_folder import local_folder
from lmlib.models.differences import differences
from runner.command_line.errors import ConfigError, in_words, user_errors
from runner.processes.agreement import agreed
from runner.training import data_probe
from runner.watch.transfer import told

WEIGHTS_ALONE = 0  # the step of a checkpoint of weights alone: `runner.convert` makes it, no run
_SHOWN = 6  # differences


@dataclasses.dataclass(frozen=True)
class Saved:
    """The checkpoints of a run in `folder`; `step` is `None` for the newest."""

    folder: Path
    step: int | None


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """A folder of Hugging Face's; `name` is its path, or its name on the Hub."""

    folder: Path
    name: str


def located(reference: str) -> Saved | HuggingFace:
    """What `reference` means: `RUN`, `RUN@STEP`, a folder of Hugging Face's or its name on the Hub,
    from where it is then fetched.

    Raises:
      ConfigError: if it is none of them.
    """
    run, at, step = reference.rpartition("@")
    if not at or not step.isdecimal():
        run, step = reference, ""
    with user_errors():
        number = int(step) if step else None
        folder, whole = local_folder(run), local_folder(reference)
        if (folder / "checkpoints").is_dir():
            return Saved(folder / "checkpoints", number)
        if is_hugging_face(whole):
            return HuggingFace(whole, str(whole.absolute()))
        if folder.is_dir():
            return Saved(folder, number)
        if (fetched := local_folder_of(reference)) != whole:
            return HuggingFace(fetched, reference)
    raise ConfigError(
        f"{run} is no folder; write RUN or RUN@STEP, a folder of Hugging Face's, or a name on the "
        "Hub, as Qwen/Qwen3-0.6B"
    )


def is_hugging_face(folder: Path) -> bool:
    """Whether it holds safetensors, or a config.json of a model's; raises FolderError if that is
    damaged."""
    config = folder / "config.json"
    return any(folder.glob("*.safetensors")) or (
        config.is_file() and "model_type" in read_json(config)
    )


def weights_of(
    reference: str,
    experiment: Experiment,
    allowed_changes: Collection[str] = (),
    show: Callable[[str], None] = lambda line: None,
) -> tuple[Any, str]:
    """The model that `reference` means, laid out as the experiment's, and whose it is: `run@step`
    or the folder.

    Args:
      reference: as of `located`.
      allowed_changes: "data": its tokenizer may be another than the data's. "model": settings of
        the model in a folder of Hugging Face's may be others, where its weights fit.
      show: gets a line now and then while a folder is read.

    Raises:
      ConfigError: if there is none, it is damaged, or it holds another model or was trained on
        another tokenizer's ids.
    """
    with agreed():
        found = located(reference)
    try:
        if isinstance(found, Saved):
            return _of_run(found, experiment, "data" in allowed_changes)
        return _of_folder(found, experiment, allowed_changes, show), found.name
    except (ValueError, OSError) as error:
        raise ConfigError(f"--init_from={reference}: {in_words(error)}") from error


def tokenizer_of(folder: HuggingFace) -> TokenizerIdentity | None:
    """What made the ids that its model knows; `None` without a tokenizer.json."""
    file = folder.folder / "tokenizer.json"
    if not file.is_file():
        return None
    text = read_text(file, LARGEST_TOKENIZER)
    return TokenizerIdentity(folder.name, hashlib.sha256(text.encode()).hexdigest())


def _of_run(found: Saved, experiment: Experiment, tokenizer_may_differ: bool) -> tuple[Any, str]:
    target = train.abstract_model(experiment.make_model, experiment.mesh)
    with Checkpoints(found.folder, read_only=True) as checkpoints:
        step = checkpoints.newest() if found.step is None else found.step
        if step is None:
            raise ConfigError(f"{found.folder} holds no checkpoint")
        model, notes = checkpoints.restore_part(step, "model", target)
    before: Any = notes.get("batches")
    if not data_probe.is_probe(before, step):
        raise ConfigError(f"its notes make no sense: batches={before!r:.80}")
    problem = data_probe.tokenizer_changed(experiment.data, before)
    _check_tokenizer(problem, tokenizer_may_differ)
    return model, f"{found.folder}@{step}"


def _of_folder(
    found: HuggingFace,
    experiment: Experiment,
    allowed_changes: Collection[str],
    show: Callable[[str], None],
) -> Any:
    with agreed(), user_errors():
        there = described(found.folder)
        ours = experiment.abstract_model()
        theirs = jax.eval_shape(there.build, jax.random.key(0))
        different = list(differences(theirs, ours))
        of_weights = [each for each in different if each.of_weights]
        if different and (of_weights or "model" not in allowed_changes):
            shown = [
                f"{each.where or 'the model'}: {each.one}, here {each.other}"
                for each in different[:_SHOWN]
            ]
            more = len(different) - len(shown)
            raise ConfigError(
                f"its model is not this experiment's ({'; '.join(shown)}"
                f"{f'; and {more} more' if more else ''}): experiments/from_hf takes the "
                "architecture from the folder"
                + ("" if of_weights else ", --allow_change=model its weights alone")
            )
        was = tokenizer_of(found)
        problem = None
        if tokenizers_differ(was, experiment.data.tokenizer):
            problem = f"the data was made by {experiment.data.tokenizer}"
        _check_tokenizer(problem, "data" in allowed_changes)
    tell = told(f"reading {found.name}:", show)
    return load_weights(found.folder, ours, there.family.names, experiment.mesh, tell)


def _check_tokenizer(problem: str | None, may_differ: bool) -> None:
    if problem is not None and not may_differ:
        raise ConfigError(
            f"it was trained on other data: {problem}, so its ids mean other texts; to go on all "
            "the same give --allow_change=data"
        )
