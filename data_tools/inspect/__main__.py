"""Shows what a data set of flat tokens holds, checks it, or shows a batch as a model sees it.

    python -m data_tools.inspect DIR                  what it holds, document lengths, samples
    python -m data_tools.inspect DIR --verify         reads everything; status 1 if it is damaged
    python -m data_tools.inspect DIR --batch=0 --batch_size=8 --sequence_length=1024
    python -m data_tools.inspect RUN --batch=5000

DIR is a data set, of this library's format or seqax's, or one of its splits. RUN is the workdir of
a run: --batch takes the settings from its data.json, and --split chooses what it trained on
("train") or evaluated on ("validation", or "validation/NAME" of several). A data.json names code to
run: only this library's own sources of data are, and modules that --trust_module names.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from data_tools import command_line
from data_tools.command_line import ProgressLines
from data_tools.hf_stream import HFStream
from data_tools.inspect import (
    SavedRun,
    batch_rows,
    decoder,
    describe_split,
    document_lengths,
    is_masked,
    open_split,
    row_origins,
    samples,
    split_folders,
    verify_split,
)
from data_tools.inspect.description import Decode
from data_tools.inspect.report import description_text, lengths_text, row_text, sample_text
from data_tools.inspect.saved_run import FILE_NAME
from lmlib.data import FlatTokens, Source, TokenizerIdentity
from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.seqax import is_seqax_split
from lmlib.terminal.text import TerminalText

_SPLIT = flags.DEFINE_string("split", None, "One split; without it, all (with --batch, 'train').")
_SAMPLES = flags.DEFINE_integer("samples", 3, "How many stretches of text to show.", lower_bound=0)
_SAMPLE_LENGTH = flags.DEFINE_integer(
    "sample_length", 100, "Tokens in each of them.", lower_bound=1
)
_LENGTHS = flags.DEFINE_bool(
    "lengths", True, "Show how long documents are; for seqax's format this reads all tokens."
)
_VERIFY = flags.DEFINE_bool("verify", False, "Read everything and list all that is damaged.")
_BATCH = flags.DEFINE_integer("batch", None, "Show the batch of this step, from 0.", lower_bound=0)
_ROWS = flags.DEFINE_integer("rows", 2, "With --batch: how many rows to show.", lower_bound=1)
_SEED = flags.DEFINE_integer(
    "seed", 0, "With --batch: of the order; otherwise, of the samples.", lower_bound=0
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 8, "With --batch: rows of the batch.", lower_bound=1
)
_SEQUENCE_LENGTH = flags.DEFINE_integer(
    "sequence_length", 1024, "With --batch: tokens in a row.", lower_bound=1
)
_STORED_ORDER = flags.DEFINE_bool("stored_order", False, "With --batch: as FlatTokens(seed=None).")
_EPOCHS = flags.DEFINE_integer(
    "epochs", None, "With --batch: as FlatTokens(epochs=…).", lower_bound=1
)
_PACKED = flags.DEFINE_bool("packed", True, "With --batch: as FlatTokens(packed=…).")
_RESET_POSITIONS = flags.DEFINE_bool(
    "reset_positions", True, "With --batch: as FlatTokens(reset_positions=…)."
)
_ATTEND_ACROSS_DOCUMENTS = flags.DEFINE_bool(
    "attend_across_documents", False, "With --batch: as FlatTokens(attend_across_documents=…)."
)
_TRUST_MODULE = flags.DEFINE_multi_string(
    "trust_module", [], "With a run: a module of yours that its data may consist of."
)

# What a run's data.json says, or else a flag.
_SETTINGS = (
    _BATCH_SIZE,
    _SEQUENCE_LENGTH,
    _STORED_ORDER,
    _EPOCHS,
    _PACKED,
    _RESET_POSITIONS,
    _ATTEND_ACROSS_DOCUMENTS,
)


def inspect(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0, or 1 if --verify found damage."""
    if len(arguments) != 1:
        raise ValueError("give one data set, split, or workdir of a run; see --help")
    path = Path(os.path.expanduser(arguments[0]))
    run = SavedRun(path, _TRUST_MODULE.value) if (path / FILE_NAME).exists() else None
    _check_flags(is_run=run is not None)
    if _BATCH.value is not None:
        source, decode = _of_run(run, _BATCH.value) if run else _of_data_set(path)
        _show_batch(source, decode, _BATCH.value)
        return 0
    folders = _folders_of_run(run) if run else _folders(path)
    if _VERIFY.value:
        return _verify(folders)
    for number, folder in enumerate(folders):
        print("\n" if number else "", end="")
        _show_split(folder)
    return 0


def _check_flags(is_run: bool) -> None:
    """Raises ValueError for flags that would be of no effect."""
    if _TRUST_MODULE.present and not is_run:
        raise ValueError("--trust_module is of use with a run only")
    if _BATCH.value is not None and _VERIFY.value:
        raise ValueError("--batch and --verify are two commands: give one of them")
    if _BATCH.value is None:
        useless = [flag for flag in (_ROWS, *_SETTINGS) if flag.present]
        reason = "is of use with --batch only"
    else:
        useless = [flag for flag in (_SEED, *_SETTINGS) if flag.present] if is_run else []
        reason = "is for data sets: a run has its own setting"
    if useless:
        raise ValueError(f"--{useless[0].name} {reason}")


def _folders(path: Path) -> list[Path]:
    """The splits of a data set that are asked for."""
    folders = split_folders(path)
    wanted = [folder for folder in folders if _SPLIT.value in (None, data_path(folder).name)]
    if not wanted:
        names = ", ".join(data_path(folder).name for folder in folders)
        raise ValueError(f"{path} has no split {_SPLIT.value!r}; it has {names}")
    return wanted


def _folders_of_run(run: SavedRun) -> list[Path]:
    """The splits that are asked for of what a run reads."""
    parts = [_SPLIT.value] if _SPLIT.value else ["train", "validation"]
    found = [folder / split for part in parts for folder, split in run.data_sets(part)]
    if not found:
        raise ValueError("the run reads no flat tokens; --batch=STEP shows its batches")
    return [folder for each in dict.fromkeys(found) for folder in split_folders(each)]


def _show_split(folder: Path) -> None:
    split = describe_split(folder)
    print(description_text(split), flush=True)
    if _LENGTHS.value:
        print(f"\n{lengths_text(document_lengths(folder, ProgressLines()))}", flush=True)
    if not _SAMPLES.value:
        return
    if not split.finished or not split.tokens:
        print(f"\n  no samples: {'no tokens' if split.finished else 'unfinished'}")
        return
    decode = _decoder(data_path(folder).parent, split.tokenizer)
    for sample in samples(open_split(folder), _SAMPLES.value, _SAMPLE_LENGTH.value, _SEED.value):
        print(f"\n{sample_text(sample, decode)}")


def _verify(folders: Sequence[Path]) -> int:
    found = False
    for folder in folders:
        damages = verify_split(folder, ProgressLines())
        found = found or bool(damages)
        for damage in damages:
            print(f"damaged: {damage.path}: {' '.join(damage.reason.split())}")
        print(f"{folder}: {_verdict(len(damages), is_seqax_split(folder))}")
    return 1 if found else 0


def _verdict(damages: int, seqax: bool) -> str:
    if damages:
        return f"damaged in {damages:,} place{'s' if damages > 1 else ''}"
    return "no damage found; seqax's format has no checksums" if seqax else "all data is whole"


def _show_batch(source: Source, decode: Decode | None, step: int) -> None:
    if source.batches is not None and step >= source.batches:
        raise ValueError(
            f"there is no step {step:,}: the data ends after {source.batches:,} batches"
        )
    rows = slice(0, min(_ROWS.value, source.batch_size))
    batch = source.batch(step, rows)
    origins = row_origins(source, step)
    print(
        f"step {step:,}: {source.batch_size:,} rows of {source.sequence_length:,} tokens, "
        f"{rows.stop:,} shown"
    )
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    masked = is_masked(source)
    if masked and decode:
        print("text behind a dotted bar (┊) is no target in the loss")
    write = sys.stdout.write_as_it_is if isinstance(sys.stdout, TerminalText) else sys.stdout.write
    for row in batch_rows(batch, masked=masked):
        write(f"\n{row_text(row, decode, origins[row.number], colours)}\n")


def _of_run(run: SavedRun, step: int) -> tuple[Source, Decode | None]:
    """What a run reads, about to give the batch of `step`, and what decodes its ids."""
    split = _SPLIT.value or "train"
    source = run.source_at(step, split)
    if isinstance(source, HFStream):
        return source, source.decode
    decoders = (_decoder(folder, source.tokenizer) for folder, _ in run.data_sets(split))
    return source, next(filter(None, decoders), None)


def _of_data_set(path: Path) -> tuple[Source, Decode | None]:
    """The data set as the flags have it read, and what decodes its ids."""
    split = _SPLIT.value or "train"
    if split_folders(path) == [path]:  # a split
        own = data_path(path).name
        if _SPLIT.value not in (None, own):
            raise ValueError(f"{path} is the split {own!r}, not {_SPLIT.value!r}")
        path, split = data_path(path).parent, own
    source = FlatTokens(
        str(path),
        split,
        batch_size=_BATCH_SIZE.value,
        sequence_length=_SEQUENCE_LENGTH.value,
        seed=None if _STORED_ORDER.value else _SEED.value,
        epochs=_EPOCHS.value,
        packed=_PACKED.value,
        reset_positions=_RESET_POSITIONS.value,
        attend_across_documents=_ATTEND_ACROSS_DOCUMENTS.value,
    )
    return source, _decoder(path, source.tokenizer)


def _decoder(data_set: Path, tokenizer: TokenizerIdentity | None) -> Decode | None:
    """As `decoder`, but None, so that ids are shown, if the tokenizer cannot be used."""
    try:
        return decoder(data_set, tokenizer)
    except ValueError as error:
        reason = " ".join(str(error).split())
        print(f"ids are shown, since the tokenizer cannot be used: {reason}", file=sys.stderr)
        return None


if __name__ == "__main__":
    command_line.run("inspect", inspect)
