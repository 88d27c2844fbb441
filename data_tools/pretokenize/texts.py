"""Writes splits of texts, for pretokenize, its form on Ray, and Python."""

import gzip
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.command_line import Progress, no_progress
from data_tools.encoding import EncodedBlock
from data_tools.held_out import Part
from data_tools.pretokenize.out_folder import OutFolder
from data_tools.pretokenize.writing import COUNTS, EmptySourceError, check_not_empty, write_shard
from data_tools.rows.block import Block, Field, Row, RowSource
from data_tools.rows.source import Texts
from data_tools.tokenizer import Tokenizer
from lmlib.data.stored.metadata import ShardMetadata, SplitMetadata, read_split


def pretokenize(
    source: RowSource | Iterable[str],
    tokenizer: Tokenizer,
    out: str | Path,
    split: str,
    *,
    shards: int = 1,
    progress: Progress = no_progress,
    **settings: Any,
) -> SplitMetadata:
    """Writes `out`/`split`, or the missing part of it; see `pretokenize_shard` for the settings.

    `source` may be any iterable of texts. `progress` is called for the whole split. Raises the
    errors of `pretokenize_shard`, and ValueError if there is no text.
    """
    rows = source if isinstance(source, RowSource) else Texts(source)
    folder, before, finished = OutFolder.of(out), dict.fromkeys(COUNTS, 0), 0

    def in_split(counts: Mapping[str, int], fraction: float | None) -> None:
        together = {name: before[name] + count for name, count in counts.items()}
        progress(together, None if fraction is None else (finished + fraction) / shards)

    for finished in range(shards):
        both: dict[str, Any] = {"shard": finished, "shards": shards, "progress": in_split}
        made = pretokenize_shard(rows, tokenizer, folder, split, **both, **settings)
        before = {name: count + getattr(made, name) for name, count in before.items()}
    return finished_split(folder, split, settings.get("part"))


def pretokenize_shard(
    source: RowSource,
    tokenizer: Tokenizer,
    out: str | Path | OutFolder,
    split: str,
    *,
    shards: int = 1,
    part: Part | None = None,
    max_tokens: int | None = None,
    gzip_baseline: bool = False,
    **settings: Any,
) -> ShardMetadata:
    """Writes one shard of `out`/`split`, or the missing part of it.

    Each document is framed by the tokenizer's BOS and EOS; an empty one consists of only its frame.
    The shard ends with the document that reaches its equal share of `max_tokens`. With
    `gzip_baseline` the length of each document under gzip -9 is recorded, which is slow. See
    `write_shard` for the other settings, and the errors.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    if tokenizer.eos_id is None:
        raise ValueError(
            f"cannot tell which token of {tokenizer.identity.name} ends a document: name it with "
            "--eos_token"
        )
    recipe = TextRecipe(tokenizer, source.field, part, gzip_baseline)
    return write_shard(
        source,
        recipe,
        tokenizer,
        out,
        split,
        described=source.description | {"max_tokens": max_tokens} | dict(tokenizer.settings),
        framing=(tokenizer.bos_id, tokenizer.eos_id),
        shards=shards,
        part=part,
        max_tokens=None if max_tokens is None else -(-max_tokens // shards),
        **settings,
    )


def finished_split(out: OutFolder, split: str, part: Part | None) -> SplitMetadata:
    """Returns all shards of `out`/`split`; raises ValueError for a split without text."""
    metadata = read_split(out.path / split)
    try:
        check_not_empty(metadata, split, part)
    except EmptySourceError as error:
        raise EmptySourceError(f"{error}, and delete {out}/{split}") from None
    return metadata


@dataclass(frozen=True)
class TextRecipe:
    """See `Recipe`: documents are the texts of rows, framed."""

    tokenizer: Tokenizer
    field: Field
    part: Part | None  # whose documents are kept; None: all
    gzip_baseline: bool  # True measures each text under gzip -9

    def encode(self, block: Block) -> EncodedBlock:
        """Returns the block's documents; rows that cannot be encoded are among the bad rows."""
        texts: list[str] = []
        sizes: list[int] = []
        compressed: list[int] = []
        bad_rows: list[tuple[int, Row]] = []
        for row in block.rows(self.field):
            if row.text is not None:
                try:
                    size = self.tokenizer.size(row.text)
                except ValueError as error:
                    row = Row(row.where, None, str(error))
            if row.text is None:
                if self.part is None or not self.part.held_out:  # count it only once
                    bad_rows.append((len(texts), row))
            elif self.part is None or self.part.has(row.text):
                texts.append(row.text)
                sizes.append(size)
                if self.gzip_baseline:
                    compressed.append(len(gzip.compress(row.text.encode(), 9)))
        dtype = self.tokenizer.dtype
        before, after = self.tokenizer.framing
        documents = self.tokenizer.encode_batch(texts)
        pieces = [piece for ids in documents for piece in (before, ids, after)]
        nothing = np.zeros(0, dtype)
        return EncodedBlock(
            np.concatenate([nothing, *pieces], dtype=dtype, casting="unsafe"),
            np.array([len(ids) for ids in documents], np.int64) + len(before) + len(after),
            np.array(sizes, np.int64),
            np.array(compressed, np.int64) if self.gzip_baseline else None,
            tuple(bad_rows),
        )
