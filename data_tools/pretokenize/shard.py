"""One shard of a split, from where it was left to its end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from data_tools.encoding import EncodedBlock, Recipe, encode_in_order
from data_tools.held_out import Part
from data_tools.pretokenize.progress import Progress
from data_tools.rows import Block, Row, RowSource, bad_row
from data_tools.tokenizer import Tokenizer
from lmlib.data import ShardMetadata, ShardWriter, SplitMetadata, finished_shard
from lmlib.data.journal import Totals

OnBadRow = Literal["fail", "skip"]
FILE_LENGTH = 16 * 1024 * 1024  # tokens in a file; what is lost at most when a run is killed


def pretokenize_shard(
    source: RowSource,
    tokenizer: Tokenizer,
    out: str | Path,
    split: str,
    *,
    shard: int = 0,
    shards: int = 1,
    part: Part | None = None,
    max_tokens: int | None = None,
    workers: int = 0,
    on_bad_row: OnBadRow = "fail",
    gzip_baseline: bool = False,
    progress: Callable[[Progress], None] | None = None,
    skipped: Callable[[Block, Row], None] | None = None,
    file_length: int = FILE_LENGTH,
) -> ShardMetadata:
    """Writes shard number `shard` of `out`/`split`, or what is missing of it.

    Each document is framed by the tokenizer's BOS and EOS; an empty one is nothing but its frame.
    The bytes on disk depend on neither `workers` nor how often the writing was killed and begun
    again. After a kill, the last tokens that did not fill a file are made again.

    Args:
      source: the rows; the shard takes its share.
      part: which documents to take; None for all.
      max_tokens: of the split: a shard ends with the document that reaches its equal part.
      workers: processes that tokenise; 0 for the calling one.
      on_bad_row: whether a row without a usable text is an error, or counted and left out.
      gzip_baseline: whether to record the length of each document under gzip -9; slow.
      progress: called after each block of about a megabyte.
      skipped: called with each row that is left out, and its block, which can `locate` it.

    Raises:
      FileExistsError: if the shard was made or begun with other settings, or is being written.
      ValueError: for a bad row, with its file and line, settings that make no sense, or, where it
        is the only shard, no text at all.
      OSError: for a file that cannot be read or written.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    if tokenizer.eos_id is None:
        raise ValueError(
            f"cannot tell which token of {tokenizer.identity.name} ends a document: name it with "
            "--eos_token"
        )
    described = source.description | {"max_tokens": max_tokens}
    if part is not None:
        described |= {"validation_fraction": part.fraction, "held_out": part.held_out}
    done = finished_shard(
        out,
        split,
        shard,
        shards,
        tokenizer=tokenizer.identity,
        source=described,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
    )
    if done is not None:
        return done
    writer = ShardWriter(
        out,
        split,
        shard=shard,
        shards=shards,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        tokenizer=tokenizer.identity,
        tokenizer_json=tokenizer.tokenizer_json,
        source=described,
        file_length=file_length,
    )
    recipe = Recipe(
        tokenizer.encoder,
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.vocab_size,
        source.field,
        part,
        gzip_baseline,
    )
    limit = None if max_tokens is None else tokens_of_shard(max_tokens, shards)
    blocks = source.blocks(shard, shards, writer.position)
    encoding = encode_in_order(blocks, recipe, workers)
    try:
        for block, encoded in encoding:
            full = False
            if limit is not None:
                encoded, full = _up_to(encoded, limit - writer.totals.tokens)
            _judge(block, encoded, on_bad_row, skipped)
            writer.mark(block.position)
            _write(writer, encoded)
            if progress is not None:
                totals = writer.totals
                progress(Progress(totals.documents, totals.tokens, totals.bytes, block.fraction))
            if full:
                break
        if shards == 1:
            check_not_empty(writer.totals, split, part)
        return writer.finish()
    except EmptySourceError:
        writer.discard()
        raise
    finally:
        encoding.close()
        writer.close()


class EmptySourceError(ValueError):
    """No document has any text."""


def check_not_empty(made: Totals | SplitMetadata, split: str, part: Part | None) -> None:
    """Raises EmptySourceError for a split without text."""
    if made.bytes:
        return
    held_out = part is not None and part.held_out
    advice = (
        "raise --validation_fraction"
        if held_out
        else "check --dataset, --pattern and --text_column"
    )
    raise EmptySourceError(
        f"the source has no text for the split {split!r}, but {made.documents:,} empty documents "
        f"and {made.skipped_rows:,} skipped rows: {advice}"
    )


def tokens_of_shard(max_tokens: int, shards: int) -> int:
    """How many of the tokens of a split one of its shards may have, before its last document."""
    return -(-max_tokens // shards)


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
        skipped_rows=len(encoded.bad_rows),
    )
