"""All shards of a split, one after the other."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from data_tools.held_out import Part
from data_tools.pretokenize.out_folder import OutFolder, out_folder
from data_tools.pretokenize.progress import Progress
from data_tools.pretokenize.shard import pretokenize_shard
from data_tools.pretokenize.writing import EmptySourceError, check_not_empty
from data_tools.rows import RowSource, Texts
from data_tools.tokenizer import Tokenizer
from lmlib.data.stored.metadata import SplitMetadata, read_split


def pretokenize(
    source: RowSource | Iterable[str],
    tokenizer: Tokenizer,
    out: str | Path,
    split: str,
    *,
    shards: int = 1,
    progress: Callable[[Progress], None] | None = None,
    **settings: Any,
) -> SplitMetadata:
    """Writes `out`/`split`, or what is missing of it; see `pretokenize_shard` for the settings.

    `source` may be any iterable of texts. `progress` is told of the whole split.

    Raises what `pretokenize_shard` does, and ValueError if there is no text at all.
    """
    rows = source if isinstance(source, RowSource) else Texts(source)
    before = Progress()

    def in_split(in_shard: Progress) -> None:
        if progress is not None:
            progress(before.plus(in_shard, shards))

    folder = out_folder(out)
    for shard in range(shards):
        made = pretokenize_shard(
            rows,
            tokenizer,
            folder,
            split,
            shard=shard,
            shards=shards,
            progress=in_split,
            **settings,
        )
        before = before.plus(Progress(made.documents, made.tokens, made.bytes, 1.0), shards)
    return finished_split(folder, split, settings.get("part"))


def finished_split(out: OutFolder, split: str, part: Part | None) -> SplitMetadata:
    """All shards of `out`/`split`; raises ValueError for a split without text."""
    metadata = read_split(out.path / split)
    try:
        check_not_empty(metadata, split, part)
    except EmptySourceError as error:
        raise EmptySourceError(f"{error}, and delete {out}/{split}") from None
    return metadata
