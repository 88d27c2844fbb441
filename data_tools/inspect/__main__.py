"""Shows a data set of flat tokens, checks it, or shows a batch as a model sees it.

    python -m data_tools.inspect DIR                  its counts, document lengths, samples
    python -m data_tools.inspect DIR --verify         reads everything; status 1 if it is damaged
    python -m data_tools.inspect DIR --batch=0 --batch_size=8 --sequence_length=1024

DIR is a data set, in this library's format or seqax's, on a disk or in a bucket, or one of its
splits. `python -m runner.inspect RUN` shows the data of a run, as configured there.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from data_tools import command_line
from data_tools.inspect.batches import show_batch
from data_tools.inspect.description import Decode, split_folders, usable_decoder
from data_tools.inspect.showing import show_damage, show_split
from lmlib.data.stored.data_path import data_path
from lmlib.storage.local_folder import folder_to_read, shown

if TYPE_CHECKING:  # needs JAX
    from lmlib.data.batch import Source

FLAGS = flags.FLAGS
flags.DEFINE_string("split", None, "Name of one split; default: all, or 'train' with --batch.")
flags.DEFINE_integer("samples", 3, "Number of samples of text to show.", lower_bound=0)
flags.DEFINE_integer("sample_length", 100, "Tokens in each sample.", lower_bound=1)
flags.DEFINE_bool("verify", False, "Read everything and list all damage.")
flags.DEFINE_integer("batch", None, "Show the batch of this step, from 0.", lower_bound=0)
flags.DEFINE_integer("seed", 0, "Seed of the samples, or of the batch's order.", lower_bound=0)
_OF_BATCHES = (
    flags.DEFINE_integer("rows", 2, "With --batch: rows to show.", lower_bound=1),
    flags.DEFINE_integer("batch_size", 8, "With --batch: rows of the batch.", lower_bound=1),
    flags.DEFINE_integer("sequence_length", 1024, "With --batch: tokens in a row.", lower_bound=1),
    flags.DEFINE_integer("epochs", None, "With --batch: passes over the data.", lower_bound=1),
)


def inspect(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0, or 1 if --verify found damage."""
    if len(arguments) != 1:
        raise ValueError("give one data set or split; see --help")
    path = folder_to_read(arguments[0])
    if FLAGS.batch is not None:
        if FLAGS.verify:
            raise ValueError("--batch and --verify are two commands: give one of them")
        source, decode = _of_data_set(path)
        show_batch(source, decode, FLAGS.batch, FLAGS.rows)
        return 0
    if useless := [flag for flag in _OF_BATCHES if flag.present]:
        raise ValueError(f"--{useless[0].name} needs --batch")
    folders = split_folders(path)
    wanted = [folder for folder in folders if FLAGS.split in (None, data_path(folder).name)]
    if not wanted:
        names = ", ".join(data_path(folder).name for folder in folders)
        raise ValueError(f"{shown(path)} has no split {FLAGS.split!r}; it has {names}")
    if FLAGS.verify:
        return 1 if show_damage(wanted) else 0
    for number, folder in enumerate(wanted):
        print("\n" if number else "", end="")
        show_split(folder, FLAGS.samples, FLAGS.sample_length, FLAGS.seed)
    return 0


def _of_data_set(path: Path) -> "tuple[Source, Decode | None]":
    """Returns the data set, read according to the flags, and its decoder."""
    split = FLAGS.split or "train"
    if split_folders(path) == [path]:  # a split
        own = data_path(path).name
        if FLAGS.split not in (None, own):
            raise ValueError(f"{shown(path)} is the split {own!r}, not {FLAGS.split!r}")
        path, split = data_path(path).parent, own
    from lmlib.data.flat_tokens import FlatTokens

    settings: dict[str, Any] = {flag.name: flag.value for flag in _OF_BATCHES[1:]}
    source = FlatTokens(str(path), split, seed=FLAGS.seed, **settings)
    return source, usable_decoder(path, source.tokenizer)


if __name__ == "__main__":
    command_line.run("inspect", inspect)
