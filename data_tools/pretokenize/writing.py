"""A shard of any documents, written from where it was left to its end."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from data_tools.encoding import EncodedBlock, Recipe, encode_in_order
from data_tools.held_out import Part
from data_tools.pretokenize.out_folder import OutFolder, out_folder
from data_tools.pretokenize.progress import Progress, SendingLines
from data_tools.rows import Block, Row, RowSource, bad_row
from data_tools.tokenizer import Tokenizer
from lmlib.data.stored.journal import Totals
from lmlib.data.stored.metadata import Content, ShardMetadata, SplitMetadata
from lmlib.data.stored.shard_writer import ShardWriter, finished_shard

OnBadRow = Literal["fail", "skip"]
FILE_LENGTH = 16 * 1024 * 1024  # tokens in a file; what is lost at most when a run is killed


def write_shard(
    source: RowSource,
    recipe: Recipe,
    tokenizer: Tokenizer,
    out: str | Path | OutFolder,
    split: str,
    *,
    described: Mapping[str, Any],
    content: Content = "text",
    bos_id: int | None = None,
    eos_id: int | None = None,
    shard: int = 0,
    shards: int = 1,
    part: Part | None = None,
    max_tokens: int | None = None,
    workers: int = 0,
    on_bad_row: OnBadRow = "fail",
    progress: Callable[[Progress], None] | None = None,
    skipped: Callable[[Block, Row], None] | None = None,
    file_length: int = FILE_LENGTH,
) -> ShardMetadata:
    """Writes the documents that `recipe` makes of the source's rows, or what is missing of them.

    See `pretokenize_shard` for what else is given, and raised.

    Args:
      out: the data set's folder, on a disk or in a bucket.
      described: all that the documents depend on, for the record.
      content: what they are.
      bos_id, eos_id: what frames each of them, for the record.
      part: which of them to take, for the message if there are none.
      max_tokens: the shard ends with the document that reaches so many.
    """
    made_by: dict[str, Any] = {
        "content": content,
        "tokenizer": tokenizer.identity,
        "source": dict(described),
        "bos_id": bos_id,
        "eos_id": eos_id,
    }
    folder = out_folder(out)
    done = finished_shard(folder.path, split, shard, shards, **made_by)
    if done is not None:
        folder.send(split, done.name, SendingLines(done.name))
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
    blocks = source.blocks(shard, shards, writer.position)
    encoding = encode_in_order(blocks, recipe, workers)
    try:
        for block, encoded in encoding:
            full = False
            if max_tokens is not None:
                encoded, full = _up_to(encoded, max_tokens - writer.totals.tokens)
            _judge(block, encoded, on_bad_row, skipped)
            writer.mark(block.position)
            _write(writer, encoded)
            if progress is not None:
                totals = writer.totals
                progress(Progress(totals.documents, totals.tokens, totals.bytes, block.fraction))
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
    folder.send(split, made.name, SendingLines(made.name))
    return made


class EmptySourceError(ValueError):
    """No document has any text."""


def check_not_empty(
    made: Totals | SplitMetadata, split: str, part: Part | None, content: Content = "text"
) -> None:
    """Raises EmptySourceError for a split without text."""
    if made.bytes:
        return
    held_out = part is not None and part.held_out
    setting = "--text_column" if content == "text" else "--max_length"
    advice = (
        "raise --validation_fraction" if held_out else f"check --dataset, --pattern and {setting}"
    )
    found = [
        f"{made.documents:,} empty documents",
        *([f"{made.dropped_documents:,} that are too long"] if made.dropped_documents else []),
    ]
    raise EmptySourceError(
        f"the source has no text for the split {split!r}, but {', '.join(found)} "
        f"and {made.skipped_rows:,} skipped rows: {advice}"
    )


def _up_to(encoded: EncodedBlock, tokens: int) -> tuple[EncodedBlock, bool]:
    """The block cut after the document that reaches `tokens`, and whether one does."""
    ends = encoded.lengths.cumsum()
    if not ends.size or ends[-1] < tokens:
        return encoded, False
    return encoded.first(int(ends.searchsorted(tokens)) + 1), True


def _judge(
    block: Block,
    encoded: EncodedBlock,
    on_bad_row: OnBadRow,
    skipped: Callable[[Block, Row], None] | None,
) -> None:
    for _, row in encoded.bad_rows:
        if on_bad_row == "fail":
            raise bad_row(block, row)
        if skipped is not None:
            skipped(block, row)


def _write(writer: ShardWriter, encoded: EncodedBlock) -> None:
    measured: Any = encoded.gzip_bytes
    writer.extend(
        encoded.tokens,
        encoded.lengths,
        int(encoded.text_bytes.sum()),
        None if measured is None else int(measured.sum()),
        loss_mask=encoded.loss_mask,
        skipped_rows=len(encoded.bad_rows),
        **encoded.left_out,
    )
