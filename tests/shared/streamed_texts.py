"""Texts to stream, the streams of them, and what comes out; B rows, S sequence."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from data_tools.hf_stream.source import HFStream
from lmlib.data.batch import Batch

BATCH, SEQUENCE = 4, 16
BOS, EOS = 256, 257  # of the tokenizer 'bytes'
# Documents of 0 to 60 bytes, some of several bytes a character; each is different.
TEXTS = [f"{n}:" + "aé漢😀"[n % 4] * (n * 7 % 15) for n in range(47)]


def stream(dataset: str | Sequence[str], **settings: Any) -> HFStream:
    settings = {"batch_size": BATCH, "sequence_length": SEQUENCE, **settings}
    return HFStream(dataset, "bytes", **settings)


def framed(texts: list[str]) -> list[int]:
    return [token for text in texts for token in (BOS, *text.encode("utf-8"), EOS)]


def tokens_in(batches: list[Batch]) -> list[int]:
    """The first input and all targets that are not padding: what went in, if it was packed well."""
    targets = [batch.targets[batch.segment_ids > 0] for batch in batches]
    return [int(batches[0].tokens[0, 0]), *map(int, np.concatenate(targets))]


def documents_in(batches: list[Batch]) -> list[str]:
    """The whole documents, decoded."""
    tokens, texts = tokens_in(batches), []
    ends = [place for place, token in enumerate(tokens) if token == EOS]
    for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        assert tokens[start] == BOS
        texts.append(bytes(tokens[start + 1 : end]).decode("utf-8"))
    return texts


def assert_same(one: Batch, other: Batch) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def steps_of(texts: list[str]) -> int:
    """Batches that hold them all."""
    return -(-(len(framed(texts)) - 1) // (BATCH * SEQUENCE))


def all_batches(source: HFStream, count: int) -> list[Batch]:
    return [source.batch(step) for step in range(count)]
