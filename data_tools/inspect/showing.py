"""What the inspect commands print: a split, what is damaged in it, a batch."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_tools.command_line import ProgressLines
from data_tools.inspect.batch_rows import batch_rows, is_masked, row_origins
from data_tools.inspect.description import (
    Decode,
    decoder,
    describe_split,
    document_lengths,
    open_split,
    samples,
)
from data_tools.inspect.report import description_text, lengths_text, row_text, sample_text
from data_tools.inspect.verification import verify_split
from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.stored.seqax import is_seqax_split
from lmlib.storage.bucket.copies import shown
from lmlib.terminal.text import TerminalText

if TYPE_CHECKING:  # needs JAX
    from lmlib.data.batch import Source


def show_split(
    folder: Path, count: int = 3, length: int = 100, seed: int = 0, lengths: bool = True
) -> None:
    """Prints what a split holds, and texts from it.

    Args:
      count, length, seed: of the samples: how many, their tokens, and what chooses them.
      lengths: whether to print how long documents are.
    """
    split = describe_split(folder)
    print(description_text(split), flush=True)
    if lengths:
        print(f"\n{lengths_text(document_lengths(folder, ProgressLines()))}", flush=True)
    if not count:
        return
    if not split.finished or not split.tokens:
        print(f"\n  no samples: {'no tokens' if split.finished else 'unfinished'}")
        return
    decode = usable_decoder(data_path(folder).parent, split.tokenizer)
    for sample in samples(open_split(folder), count, length, seed):
        print(f"\n{sample_text(sample, decode)}")


def show_damage(folders: Sequence[Path]) -> bool:
    """Reads splits whole and prints what is damaged in them; whether there is any."""
    found = False
    for folder in folders:
        damages = verify_split(folder, ProgressLines())
        found = found or bool(damages)
        for damage in damages:
            print(f"damaged: {damage.path}: {' '.join(damage.reason.split())}")
        print(f"{shown(folder)}: {_verdict(len(damages), is_seqax_split(folder))}")
    return found


def _verdict(damages: int, seqax: bool) -> str:
    if damages:
        return f"damaged in {damages:,} place{'s' if damages > 1 else ''}"
    return "no damage found; seqax's format has no checksums" if seqax else "all data is whole"


def show_batch(source: "Source", decode: Decode | None, step: int, rows: int) -> None:
    """Prints the first rows of the batch of a step; raises ValueError if there is none."""
    if source.batches is not None and step >= source.batches:
        raise ValueError(
            f"there is no step {step:,}: the data ends after {source.batches:,} batches"
        )
    shown = min(rows, source.batch_size)
    batch = source.batch(step, slice(0, shown))
    origins = row_origins(source, step)
    print(
        f"step {step:,}: {source.batch_size:,} rows of {source.sequence_length:,} tokens, "
        f"{shown:,} shown"
    )
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    masked = is_masked(source)
    if masked and decode:
        print("text behind a dotted bar (┊) is no target in the loss")
    write = sys.stdout.write_as_it_is if isinstance(sys.stdout, TerminalText) else sys.stdout.write
    for row in batch_rows(batch, masked=masked):
        write(f"\n{row_text(row, decode, origins[row.number], colours)}\n")


def usable_decoder(data_set: Path, tokenizer: TokenizerIdentity | None) -> Decode | None:
    """As `decoder`, but None, so that ids are shown, if the tokenizer cannot be used."""
    try:
        return decoder(data_set, tokenizer)
    except ValueError as error:
        reason = " ".join(str(error).split())
        print(f"ids are shown, since the tokenizer cannot be used: {reason}", file=sys.stderr)
        return None
