"""Converts a data set of flat tokens between this library's format and seqax's.

    python -m data_tools.convert --to=lmlib SEQAX_DIR OUT
    python -m data_tools.convert --to=seqax DIR OUT

OUT must not exist, unless a conversion to lmlib was killed there: the same command then goes on.
seqax knows neither documents without tokens, which are dropped, nor tokenizers; --tokenizer tells
the new data set which one made the ids.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from data_tools import command_line
from data_tools.command_line import ProgressLines
from data_tools.convert import ConvertedSplit, to_lmlib, to_seqax
from data_tools.tokenizer import load_tokenizer
from lmlib.storage.local_folder import local_folder

_TO = flags.DEFINE_enum("to", None, ["lmlib", "seqax"], "The format to write.", required=True)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    None,
    "With --to=lmlib: what made the ids; a tokenizer.json, its folder, a Hugging Face tokenizer, "
    "or 'bytes'.",
)


def convert(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    if len(arguments) != 2:
        raise ValueError("give the folder to convert and a new one; see --help")
    source, out = map(local_folder, arguments)
    for split in _convert(source, out):
        print(_summary(split))
    return 0


def _convert(source: Path, out: Path) -> list[ConvertedSplit]:
    if _TO.value == "seqax":
        if _TOKENIZER.value is not None:
            raise ValueError("--tokenizer is for --to=lmlib: seqax's format keeps no tokenizer")
        return to_seqax(source, out, progress=ProgressLines())
    if _TOKENIZER.value is None:
        return to_lmlib(source, out, progress=ProgressLines())
    tokenizer = load_tokenizer(_TOKENIZER.value)
    return to_lmlib(
        source,
        out,
        tokenizer=tokenizer.identity,
        tokenizer_json=tokenizer.tokenizer_json,
        vocab_size=tokenizer.vocab_size,
        progress=ProgressLines(),
    )


def _summary(split: ConvertedSplit) -> str:
    kept = f"{split.folder}: {split.documents:,} documents, {split.tokens:,} tokens"
    if not split.dropped_documents:
        return kept
    return f"{kept}; documents without tokens that were dropped: {split.dropped_documents:,}"


if __name__ == "__main__":
    command_line.run("convert", convert)
