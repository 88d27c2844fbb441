"""Shows what a data set of flat tokens holds, checks it, or shows a batch as a model sees it.

    python -m data_tools.inspect DIR                  what it holds, document lengths, samples
    python -m data_tools.inspect DIR --verify         reads everything; status 1 if it is damaged
    python -m data_tools.inspect DIR --batch=0 --batch_size=8 --sequence_length=1024
    python -m data_tools.inspect RUN/config.json --batch=5000

DIR is a data set, of this library's format or seqax's, or one of its splits. With the config.json
of a run, --batch takes the settings from the run, and --split chooses what it trained on ("train")
or evaluated on ("validation").
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from data_tools.inspect import (
    SavedRun,
    batch_rows,
    decoder,
    describe_split,
    document_lengths,
    open_split,
    samples,
    split_folders,
    verify_split,
)
from data_tools.inspect.decoding import Decode
from data_tools.inspect.progress import ProgressLines
from data_tools.inspect.report import description_text, lengths_text, row_text, sample_text
from lmlib.data import FlatTokens, Source, TokenizerIdentity
from lmlib.data.seqax import is_seqax_split

_SPLIT = flags.DEFINE_string("split", None, "One split; without it, all (with --batch, 'train').")
_SAMPLES = flags.DEFINE_integer("samples", 3, "How many stretches of text to show.")
_SAMPLE_LENGTH = flags.DEFINE_integer("sample_length", 100, "Tokens in each of them.")
_LENGTHS = flags.DEFINE_bool(
    "lengths", True, "Show how long documents are; for seqax's format this reads all tokens."
)
_VERIFY = flags.DEFINE_bool("verify", False, "Read everything and list all that is damaged.")
_BATCH = flags.DEFINE_integer("batch", None, "Show the batch of this step, from 0.")
_ROWS = flags.DEFINE_integer("rows", 2, "With --batch: how many rows to show.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "With --batch: rows of the batch.")
_SEQUENCE_LENGTH = flags.DEFINE_integer("sequence_length", 1024, "With --batch: tokens in a row.")
_SEED = flags.DEFINE_integer("seed", 0, "With --batch: of the order; otherwise, of the samples.")
_STORED_ORDER = flags.DEFINE_bool("stored_order", False, "With --batch: as FlatTokens(seed=None).")
_EPOCHS = flags.DEFINE_integer("epochs", None, "With --batch: as FlatTokens(epochs=…).")
_PACKED = flags.DEFINE_bool("packed", True, "With --batch: as FlatTokens(packed=…).")
_RESET_POSITIONS = flags.DEFINE_bool(
    "reset_positions", True, "With --batch: as FlatTokens(reset_positions=…)."
)
_ATTEND_ACROSS_DOCUMENTS = flags.DEFINE_bool(
    "attend_across_documents", False, "With --batch: as FlatTokens(attend_across_documents=…)."
)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0, 1 if --verify found damage, 2 after a one-line error."""
    try:
        if len(arguments) != 2:
            raise ValueError("give one data set, split, or config.json of a run; see --help")
        path = Path(arguments[1])
        if _BATCH.value is not None:
            _show_batch(path, _BATCH.value)
            return 0
        folders = _folders(path)
        if _VERIFY.value:
            return _verify(folders)
        for folder in folders:
            _show_split(folder)
    except (OSError, ValueError) as error:
        print("inspect:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def _folders(path: Path) -> list[Path]:
    """The splits that are asked for."""
    if path.suffix == ".json":
        parts = [_SPLIT.value] if _SPLIT.value else ["train", "validation"]
        run = SavedRun(path)
        found = [folder / split for part in parts for folder, split in run.data_sets(part)]
        if not found:
            raise ValueError(f"the run of {path} reads no data set of flat tokens")
        return [folder for each in dict.fromkeys(found) for folder in split_folders(each)]
    folders = split_folders(path)
    wanted = [folder for folder in folders if _SPLIT.value in (None, folder.absolute().name)]
    if not wanted:
        names = ", ".join(folder.absolute().name for folder in folders)
        raise ValueError(f"{path} has no split {_SPLIT.value!r}; it has {names}")
    return wanted


def _show_split(folder: Path) -> None:
    split = describe_split(folder)
    print(description_text(split), flush=True)
    if _LENGTHS.value:
        print(lengths_text(document_lengths(folder, ProgressLines())), flush=True)
    if _SAMPLES.value > 0 and split.finished and split.tokens:
        decode = _decoder(folder.absolute().parent, split.tokenizer)
        for sample in samples(
            open_split(folder), _SAMPLES.value, max(_SAMPLE_LENGTH.value, 1), _SEED.value
        ):
            print(sample_text(sample, decode))
    print()


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


def _show_batch(path: Path, step: int) -> None:
    source, folder = _source(path)
    rows = slice(0, min(max(_ROWS.value, 1), source.batch_size))
    batch = source.batch(step, rows)
    flat = source if isinstance(source, FlatTokens) else None
    numbers = flat.sequence_numbers(step).tolist() if flat else [None] * source.batch_size
    decode = _decoder(folder, source.tokenizer) if folder else None
    print(
        f"step {step:,}: {source.batch_size:,} rows of {source.sequence_length:,} tokens, "
        f"{rows.stop:,} shown"
    )
    for row in batch_rows(batch):
        print(row_text(row, decode, numbers[row.number], flat.sequences if flat else None))


def _source(path: Path) -> tuple[Source, Path | None]:
    """Where the batch comes from, and the folder of the data set that has the tokenizer."""
    split = _SPLIT.value or "train"
    if path.suffix == ".json":
        run = SavedRun(path)
        data_sets = run.data_sets(split)
        return run.source(split), data_sets[0][0] if data_sets else None
    folders = split_folders(path)
    if folders == [path]:  # a split
        path, split = path.absolute().parent, path.absolute().name
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
    return source, path


def _decoder(path: Path, tokenizer: TokenizerIdentity | None) -> Decode | None:
    """As `decoder`; ids are shown if the tokenizer cannot be used."""
    try:
        return decoder(path, tokenizer)
    except ValueError as error:
        print(f"ids are shown, since the tokenizer cannot be used: {error}", file=sys.stderr)
        return None


if __name__ == "__main__":
    app.run(main)
