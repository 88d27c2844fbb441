"""One shard of a split, from where it was left to its end."""

from collections.abc import Callable
from pathlib import Path

from data_tools.held_out import Part
from data_tools.pretokenize.out_folder import OutFolder
from data_tools.pretokenize.progress import Progress
from data_tools.pretokenize.texts import TextRecipe
from data_tools.pretokenize.writing import FILE_LENGTH, OnBadRow, write_shard
from data_tools.rows import Block, Row, RowSource
from data_tools.tokenizer import Tokenizer
from lmlib.data.stored.metadata import ShardMetadata


def pretokenize_shard(
    source: RowSource,
    tokenizer: Tokenizer,
    out: str | Path | OutFolder,
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
      out: the data set's folder. If it is `gs://…` or `s3://…`, the shard is made on this machine,
        in the user's cache folder, and sent when it is whole.
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
      OSError: for a file or a bucket that cannot be read or written.
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
    recipe = TextRecipe(
        tokenizer.encoder,
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.vocab_size,
        source.field,
        part,
        gzip_baseline,
    )
    limit = None if max_tokens is None else tokens_of_shard(max_tokens, shards)
    return write_shard(
        source,
        recipe,
        tokenizer,
        out,
        split,
        described=described,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        shard=shard,
        shards=shards,
        part=part,
        max_tokens=limit,
        workers=workers,
        on_bad_row=on_bad_row,
        progress=progress,
        skipped=skipped,
        file_length=file_length,
    )


def tokens_of_shard(max_tokens: int, shards: int) -> int:
    """How many of the tokens of a split one of its shards may have, before its last document."""
    return -(-max_tokens // shards)
