"""Converts tokens of seqax or Megatron to this library's format.

    python -m data_tools.convert SEQAX_DIR OUT
    python -m data_tools.convert MEGATRON_PREFIX OUT

MEGATRON_PREFIX.bin and MEGATRON_PREFIX.idx make the split that --split names. OUT must not exist,
unless it has other splits, or a conversion was killed there: the same command then continues.
Documents without tokens are dropped. Neither format records the tokenizer; --tokenizer records it
in the new data set.
"""

from collections.abc import Sequence

from absl import flags

from data_tools import command_line
from data_tools.command_line import ProgressLine
from data_tools.convert.megatron import MegatronSplit, megatron_prefix
from data_tools.convert.to_lmlib import seqax_splits, to_lmlib
from data_tools.tokenizer import load_tokenizer
from lmlib.storage.local_folder import local_folder

flags.DEFINE_string(
    "tokenizer", None, "Tokenizer of the ids: a file, a folder, a Hugging Face name, or 'bytes'."
)
flags.DEFINE_string("split", "train", "Name of the split that a Megatron data set becomes.")


def convert(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    if len(arguments) != 2:
        raise ValueError("give a data set of seqax or Megatron, and a new folder; see --help")
    source, out = map(local_folder, arguments)
    name, prefix = flags.FLAGS.tokenizer, megatron_prefix(source)
    tokenizer = None if name is None else load_tokenizer(name)
    if prefix is None:
        splits, source_format = seqax_splits(source), "seqax flat tokens"
    else:
        source, source_format = prefix, "Megatron indexed data set"
        splits = {flags.FLAGS.split: MegatronSplit(prefix)}
    converted = to_lmlib(
        splits,
        source,
        out,
        converted_from=source_format,
        tokenizer=tokenizer,
        progress=ProgressLine(),
    )
    for folder, (made, dropped) in converted.items():
        more = f"; documents without tokens that were dropped: {dropped:,}" if dropped else ""
        print(f"{folder}: {made.documents:,} documents, {made.tokens:,} tokens{more}")
    return 0


if __name__ == "__main__":
    command_line.run("convert", convert)
