"""Converts a data set of flat tokens from seqax's format to this library's.

    python -m data_tools.convert SEQAX_DIR OUT

OUT must not exist, unless a conversion was killed there: the same command then goes on.
Documents without tokens are dropped. seqax's format does not record the tokenizer; --tokenizer
records it in the new data set.
"""

from collections.abc import Sequence

from absl import flags

from data_tools import command_line
from data_tools.command_line import ProgressLines
from data_tools.convert import ConvertedSplit, to_lmlib
from data_tools.tokenizer import load_tokenizer
from lmlib.storage.local_folder import local_folder

_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    None,
    "What made the ids: a tokenizer.json, its folder, a Hugging Face tokenizer, or 'bytes'.",
)


def convert(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    if len(arguments) != 2:
        raise ValueError("give a folder in seqax's format and a new one; see --help")
    source, out = map(local_folder, arguments)
    tokenizer = None if _TOKENIZER.value is None else load_tokenizer(_TOKENIZER.value)
    for split in to_lmlib(source, out, tokenizer=tokenizer, progress=ProgressLines()):
        print(_summary(split))
    return 0


def _summary(split: ConvertedSplit) -> str:
    kept = f"{split.folder}: {split.documents:,} documents, {split.tokens:,} tokens"
    if not split.dropped_documents:
        return kept
    return f"{kept}; documents without tokens that were dropped: {split.dropped_documents:,}"


if __name__ == "__main__":
    command_line.run("convert", convert)
