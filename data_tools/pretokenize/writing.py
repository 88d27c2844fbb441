"""Writes shards of documents of any kind, resuming where an earlier process stopped."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from data_tools.command_line import Progress, no_progress
from data_tools.encoding import EncodedBlock, Recipe, encode_in_order
from data_tools.held_out import Part
from data_tools.pretokenize.out_folder import OutFolder
from data_tools.rows.block import Block, Row, RowSource, bad_row
from data_tools.tokenizer import Tokenizer
from lmlib.data.stored.metadata import Content, ShardMetadata, SplitMetadata, Totals
from lmlib.data.stored.shard_writer import ShardWriter, finished_shard

OnBadRow = Literal["fail", "skip"]
COUNTS = ("documents", "bytes", "tokens")  # shown as progress
FILE_LENGTH = 16 * 1024 * 1024  # tokens in a file; a kill loses at most one file


class EmptySourceError(ValueError):
    """A split without any text."""


def write_shard(
    source: RowSource,
    recipe: Recipe[EncodedBlock],
    tokenizer: Tokenizer,
    out: str | Path | OutFolder,
    split: str,
    *,
    described: Mapping[str, Any],
    content: Content = "text",
    framing: tuple[int | None, int | None] = (None, None),
    shard: int = 0,
    shards: int = 1,
    part: Part | None = None,
    max_tokens: int | None = None,
    workers: int = 0,
    on_bad_row: OnBadRow = "fail",
    progress: Progress = no_progress,
    skipped: Callable[[Block, Row], None] | None = None,
    file_length: int = FILE_LENGTH,
) -> ShardMetadata:
    """Writes the documents that `recipe` makes of the source's rows, or the missing ones.

    The bytes on disk depend on neither `workers` nor interruptions: after a kill, the last tokens
    that did not fill a file are made again. A shard for `gs://…` or `s3://…` is made in the user's
    cache folder, and uploaded when it is complete.

    Args:
      described: everything on which the documents depend, for the record.
      framing: the ids before and after each document, for the record.
      part: the documents to take, for the record; None for all.
      max_tokens: the shard ends with the document that reaches this number.
      workers: processes that tokenise; 0 for the calling one.
      on_bad_row: raise an error for a row without a usable text, or count and skip it.
      progress: called with documents, bytes and tokens after each block of about a megabyte.
      skipped: called with each skipped row, and its block, which can `locate` it.

    Raises FileExistsError if the shard was made or begun with other settings, or is being written;
    ValueError for a bad row, invalid settings, or a single shard without text; OSError for a file
    or a bucket that cannot be read or written.
    """
    if part is not None:
        held_out = {"validation_fraction": part.fraction, "held_out": part.held_out}
        described = {**described, **held_out}
    made_by: dict[str, Any] = {
        "content": content,
        "tokenizer": tokenizer.identity,
        "source": dict(described),
        "bos_id": framing[0],
        "eos_id": framing[1],
    }
    folder = OutFolder.of(out)
    done = finished_shard(folder.path, split, shard, shards, **made_by)
    if done is not None:
        folder.send(split, done.name)
        return done
    writer = ShardWriter(
        folder.path,
        split,
        shard=shard,
        shards=shards,
        vocab_size=tokenizer.vocab_size,
        tokenizer_json=tokenizer.tokenizer_json,
        file_length=file_length,
        **made_by,
    )
    encoding = encode_in_order(source.blocks(shard, shards, writer.position), recipe, workers)
    try:
        for block, encoded in encoding:
            full = False
            if max_tokens is not None:
                encoded, full = _up_to(encoded, max_tokens - writer.totals.tokens)
            for _, row in encoded.bad_rows:
                if on_bad_row == "fail":
                    raise bad_row(block, row)
                if skipped is not None:
                    skipped(block, row)
            writer.mark(block.position)
            _write(writer, encoded)
            totals, fraction = writer.totals, block.fraction
            if max_tokens is not None:
                fraction = min(1.0, max(fraction or 0.0, totals.tokens / max_tokens))
            progress({name: getattr(totals, name) for name in COUNTS}, fraction)
            if full:
                break
        if shards == 1:
            check_not_empty(writer.totals, split, part, content)
        made = writer.finish()
    except EmptySourceError:
        writer.discard()
        raise
    finally:
        encoding.close()
        writer.close()
    folder.send(split, made.name)
    return made


def check_not_empty(
    made: Totals | SplitMetadata, split: str, part: Part | None, content: Content = "text"
) -> None:
    """Raises EmptySourceError for a split without text."""
    if made.bytes:
        return
    setting = "--text_column" if content == "text" else "--max_length"
    advice = f"check --dataset, --pattern and {setting}"
    if part is not None and part.held_out:
        advice = "raise --validation_fraction"
    elif part is not None:  # equal documents are held out together
        advice += f", and lower --validation_fraction={part.fraction:g} if all text is held out"
    found = [f"{made.documents:,} empty documents"]
    if made.dropped_documents:
        found.append(f"{made.dropped_documents:,} that are too long")
    raise EmptySourceError(
        f"the source has no text for the split {split!r}, but {', '.join(found)} "
        f"and {made.skipped_rows:,} skipped rows: {advice}"
    )


def _up_to(encoded: EncodedBlock, tokens: int) -> tuple[EncodedBlock, bool]:
    """Truncates the block after the document that reaches `tokens`; True if one does."""
    ends = encoded.lengths.cumsum()
    if not ends.size or ends[-1] < tokens:
        return encoded, False
    return encoded.first(int(ends.searchsorted(tokens)) + 1), True


def _write(writer: ShardWriter, encoded: EncodedBlock) -> None:
    gzip_bytes = encoded.gzip_bytes
    writer.extend(
        encoded.tokens,
        encoded.lengths,
        int(encoded.text_bytes.sum()),
        None if gzip_bytes is None else int(gzip_bytes.sum()),
        loss_mask=encoded.loss_mask,
        skipped_rows=len(encoded.bad_rows),
        **encoded.left_out,
    )
