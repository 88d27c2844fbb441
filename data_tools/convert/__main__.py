"""Converts a data set of flat tokens from seqax's format to this library's.

    python -m data_tools.convert SEQAX_DIR OUT

OUT must not exist, unless a conversion was killed there: the same command then continues.
Documents without tokens are dropped. seqax's format does not record the tokenizer; --tokenizer
records it in the new data set.
"""

from collections.abc import Sequence

from absl import flags

from data_tools import command_line
from data_tools.command_line import ProgressLine
from data_tools.convert.to_lmlib import to_lmlib
from data_tools.tokenizer import load_tokenizer
from lmlib.storage.local_folder import local_folder

flags.DEFINE_string(
    "tokenizer", None, "Tokenizer of the ids: a file, a folder, a Hugging Face name, or 'bytes'."
)


def convert(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    if len(arguments) != 2:
        raise ValueError("give a folder in seqax's format and a new one; see --help")
    source, out = map(local_folder, arguments)
    name = flags.FLAGS.tokenizer
    tokenizer = None if name is None else load_tokenizer(name)
    converted = to_lmlib(source, out, tokenizer=tokenizer, progress=ProgressLine())
    for folder, (made, dropped) in converted.items():
        more = f"; documents without tokens that were dropped: {dropped:,}" if dropped else ""
        print(f"{folder}: {made.documents:,} documents, {made.tokens:,} tokens{more}")
    return 0


if __name__ == "__main__":
    command_line.run("convert", convert)
