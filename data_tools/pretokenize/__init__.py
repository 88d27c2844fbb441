"""Documents in, a split of flat tokens out."""

import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from data_tools.tokenizer import Tokenizer
from lmlib.data import FlatTokensWriter, Metadata

# Enough to keep every core busy, little enough to hold in memory.
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 4 * 1024 * 1024


def pretokenize(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    out: str | Path,
    split: str,
    *,
    source: Mapping[str, Any],
    gzip_baseline: bool = False,
    max_tokens: int | None = None,
    max_shard_tokens: int = 2**30,
    progress: Callable[[int, int, int], None] | None = None,
) -> Metadata:
    """Writes `documents`, each framed by the tokenizer's BOS and EOS, as `out`/`split`.

    `source` (JSON values) is recorded to say where they came from. `gzip_baseline` also records
    the length of each document under gzip -9. `max_tokens` stops after the document that reaches
    it. `progress` is called now and then with the documents, tokens and text bytes so far.

    Raises FileExistsError if the split is finished already, ValueError for text that is not valid
    Unicode or if there are no documents. After any error the split stays unfinished.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    writer = FlatTokensWriter(
        out,
        split,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        tokenizer=tokenizer.identity,
        tokenizer_json=tokenizer.tokenizer_json,
        source=source,
        max_shard_tokens=max_shard_tokens,
    )
    text_bytes = 0
    for batch in _batches(documents):
        encoded = [_utf8(text, writer.documents + i) for i, text in enumerate(batch)]
        for text, ids in zip(encoded, tokenizer.encode_batch(batch), strict=True):
            compressed = len(gzip.compress(text, 9)) if gzip_baseline else None
            writer.append(ids, len(text), compressed)
            text_bytes += len(text)
            if max_tokens is not None and writer.tokens >= max_tokens:
                return writer.finish()
        if progress is not None:
            progress(writer.documents, writer.tokens, text_bytes)
    return writer.finish()


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _utf8(text: str, number: int) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"document {number} holds a lone surrogate at character {error.start}, which UTF-8 "
            "cannot express: repair or leave out that document"
        ) from error
