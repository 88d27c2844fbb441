"""Shows a run's data: an overview, or the batch of a step.

    python -m runner.inspect RUN                 size of each data set, document lengths, samples
    python -m runner.inspect RUN --verify        reads everything; status 1 if it is damaged
    python -m runner.inspect RUN --batch=5000    the run's batch at step 5000, counted from 0

RUN is a workdir, whose config names the data. `python -m data_tools.inspect DIR` has more ways to
look at one data set.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from runner.command_line.command import run, take_flags
from runner.command_line.exit_status import FINISHED
from runner.command_line.flags import TRUST_MODULE, key_flags
from runner.errors import ConfigError, user_errors

_SPLIT = flags.DEFINE_string("split", None, "train, validation or validation/NAME; default: all.")
_VERIFY = flags.DEFINE_bool("verify", False, "Read everything and list all damage.")
_BATCH = flags.DEFINE_integer("batch", None, "Step whose batch to show, from 0.", 0)
_ROWS = flags.DEFINE_integer("rows", 2, "With --batch: number of rows to show.", 1)
key_flags(TRUST_MODULE)

if __name__ == "__main__":
    take_flags()  # the imports below take seconds

import fiddle as fdl
import jax

from data_tools.hf_stream.source import HFStream
from data_tools.inspect.batches import show_batch
from data_tools.inspect.description import split_folders, usable_decoder
from data_tools.inspect.showing import show_damage, show_split
from lmlib.checkpoint.folders import steps_in
from lmlib.checkpoint.manifest import read_manifest, read_notes
from lmlib.data import batch
from lmlib.data.batch import Source
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.resumable import Resumable
from lmlib.data.stored.data_path import data_path
from lmlib.experiment.stages import batches_of
from lmlib.storage.local_folder import folder_to_read
from runner.config import configs
from runner.config.configs import later_stages, training_data
from runner.config.text import nodes

DAMAGED = 1  # exit status of --verify


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    jax.config.update("jax_platforms", "cpu")  # the accelerator may be busy with the run
    if len(arguments) != 1:
        raise ConfigError("give the workdir of a run; see --help")
    if _BATCH.value is not None and _VERIFY.value:
        raise ConfigError("--batch and --verify are two commands: give one of them")
    if _ROWS.present and _BATCH.value is None:
        raise ConfigError("--rows needs --batch")
    with user_errors():
        workdir = folder_to_read(arguments[0])
        cfg = configs.load(str(workdir / "config.json"), trusted=TRUST_MODULE.value)
        if _BATCH.value is not None:
            part = _SPLIT.value or "train"
            source = source_at(workdir, cfg, _BATCH.value, part)
            show_batch(source, _decoder(cfg, part, source), _BATCH.value, _ROWS.value)
            return FINISHED
        parts = [_SPLIT.value] if _SPLIT.value else ["train", "validation"]
        found = dict.fromkeys(each for part in parts for each in data_sets(cfg, part))
        if not found:
            raise ConfigError("the run reads no flat tokens; --batch=STEP shows its batches")
        folders = [folder for data, split in found for folder in split_folders(data / split)]
        if _VERIFY.value:
            return DAMAGED if show_damage(folders) else FINISHED
        for number, folder in enumerate(folders):
            print("\n" if number else "", end="")
            show_split(folder)
    return FINISHED


def data_sets(cfg: fdl.Config, part: str = "train") -> list[tuple[Path, str]]:
    """Returns the distinct (folder, split) pairs of `FlatTokens` that `cfg` reads for `part`."""
    read = training_data(cfg) if part == "train" else _part(cfg, part)
    found = [node for node in nodes(read) if fdl.get_callable(node) is FlatTokens]

    def path_of(node: fdl.Buildable) -> Path:
        path = node.path
        return data_path(fdl.build(path) if isinstance(path, fdl.Buildable) else path)

    return list(dict.fromkeys((path_of(node), node.split) for node in found))


def source_at(workdir: Path, cfg: fdl.Config, step: int, part: str = "train") -> Source:
    """Returns the data for `part`, about to yield the batch of `step`.

    A stream of training data is read from the newest checkpoint up to `step`, or from the beginning
    if there is none, with as many streams as in any later checkpoint. Without any checkpoint, and
    for evaluation data, it begins as in a run of one process. Raises ValueError or OSError if the
    run does not read such a part, or its data is missing or damaged.
    """
    wanted = _part(cfg, part)
    if isinstance(wanted, dict):
        choices = " or ".join(f"{part}/{name}" for name in wanted)
        raise ConfigError(f"the run has several sets for {part!r}: choose {choices}")
    source = fdl.build(wanted)
    if not isinstance(source, Source):
        raise ConfigError(f"the run has no data for {part!r}")
    if isinstance(source, Resumable):
        saved = _saved_states(workdir) if part == "train" else {}
        begin = max((at for at in saved if at <= step), default=0)
        if begin in saved:
            source.restore(begin, saved[begin])
        elif saved and isinstance(source, HFStream):
            source.begin_like(next(iter(saved.values())))
        for passed in range(begin, step):
            source.batch(passed)
    if part == "train":
        source = batches_of(source, [fdl.build(stage) for stage in later_stages(cfg)], cfg.steps)
    return batch.source_at(source, step)


def _part(cfg: fdl.Config, part: str) -> Any:
    """Returns the config of the training or validation data: one source, or several by name."""
    whole, slash, name = part.partition("/")
    if whole not in ("train", "validation"):
        raise ConfigError(f"a run has the data train and validation, not {whole!r}")
    found = getattr(cfg, "data" if whole == "train" else "validation", None)
    if not slash:
        return found
    sets = found if isinstance(found, dict) else {}
    if name not in sets:
        names = ", ".join(map(repr, sets)) or "no names"
        raise ConfigError(f"the run has no {whole!r} set {name!r}: it has {names}")
    return sets[name]


def _saved_states(workdir: Path) -> dict[int, list[dict[str, Any]]]:
    """Returns the states of the data's streams at each checkpoint."""
    states = {}
    for step in steps_in(workdir / "checkpoints"):
        folder = workdir / "checkpoints" / str(step)
        notes = read_notes(folder, read_manifest(folder))
        if "data" in notes:
            states[step] = notes["data"]
    return states


def _decoder(cfg: fdl.Config, part: str, source: Source) -> Any:
    """Returns a function that decodes the ids of `source`, or `None` if no tokenizer is known."""
    if isinstance(source, HFStream):
        return source.text_codec().decode
    decoders = (usable_decoder(data, source.tokenizer) for data, _ in data_sets(cfg, part))
    return next(filter(None, decoders), None)


if __name__ == "__main__":
    run(main)
