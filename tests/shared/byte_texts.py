"""Small data sets of known texts and ids, written by hand."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.stored.shard_writer import ShardWriter

BOS, EOS = 256, 257
TEXTS = ["hello", "", "ünï\ncode", "x" * 70, "the end"]
RAGGED = [[1] * length for length in (3, 0, 1, 8, 40, 0, 5, 7, 2, 0)]


def write_texts(path: Path, shards: int = 1, split: str = "train") -> Path:
    """The texts as bytes, framed; returns the split's folder."""
    for shard in range(shards):
        writer = writer_of_texts(path, shard, shards, split)
        for text in TEXTS[shard::shards]:
            writer.append(np.frombuffer(text.encode(), np.uint8), text_bytes=len(text.encode()))
        writer.finish()
    return path / split


def writer_of_texts(path: Path, shard: int, shards: int, split: str = "train") -> ShardWriter:
    return ShardWriter(
        path,
        split,
        shard=shard,
        shards=shards,
        vocab_size=258,
        bos_id=BOS,
        eos_id=EOS,
        tokenizer=TokenizerIdentity("bytes", None),
        source={"dataset": "by hand"},
        file_length=32,
        chunk_length=8,
    )


def write_ids(path: Path, documents: Sequence[Sequence[int]], **settings) -> Path:
    """Documents of ids in one shard; returns the split's folder."""
    writer = ShardWriter(
        path, "train", **{"vocab_size": 300, "file_length": 32, "chunk_length": 8} | settings
    )
    for document in documents:
        writer.append(np.array(document, np.int64), text_bytes=1)
    writer.finish()
    return path / "train"
