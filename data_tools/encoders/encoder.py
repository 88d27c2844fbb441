"""The interface of encoders, and the two plain ones: bytes, and Hugging Face `tokenizers` itself.

Imports little, so that a worker process starts without JAX.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import tokenizers

from lmlib.data.text import read_tokenizer, tokenizers_errors
from lmlib.data.tokenizer_limits import growth

# `tokenizers` was measured to need up to 380 bytes of memory for a byte of text.
MAX_TEXT_BYTES = 1 << 20  # also of a batch
_MAX_NORMALIZED = 4 << 20  # characters; few normalizers make a text longer at all


class UnsuitableError(ValueError):
    """The tokenizer is sound, but nothing proves that the fast engine would give its ids."""


class Encoder(Protocol):
    """Turns texts into ids. Making one takes a second; a pickled one is ready much sooner."""

    def size(self, text: str) -> int:
        """Bytes of UTF-8 that `text` takes.

        Raises ValueError, whose message completes a sentence about it, if it holds a lone surrogate
        or would take too much memory to encode.
        """

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids (uint32, maybe read-only) of each text: no special token added or recognised.

        Raises ValueError for a text without `size`.
        """


def utf8_size(text: str) -> int:
    """Bytes of UTF-8 that `text` takes; raises ValueError for a lone surrogate."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(
            f"holds a lone surrogate at character {error.start}, which UTF-8 cannot express"
        ) from None


def batches(texts: Sequence[str], sizes: Sequence[int], most: int) -> Iterator[list[str]]:
    """The texts in lists of `most` bytes at most, or of one text."""
    batch: list[str] = []
    batch_size = 0
    for text, size in zip(texts, sizes, strict=True):
        if batch and batch_size + size > most:
            yield batch
            batch, batch_size = [], 0
        batch.append(text)
        batch_size += size
    if batch:
        yield batch


class RawBytesEncoder:
    """The ids of a text are its bytes of UTF-8."""

    def size(self, text: str) -> int:
        return utf8_size(text)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        for text in texts:
            self.size(text)  # raises for a lone surrogate
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]


class HuggingFaceEncoder:
    """Runs `tokenizers` on small batches, so that its memory stays below 0.5 GB."""

    def __init__(self, tokenizer_json: str) -> None:
        """Raises ValueError if the text describes no tokenizer."""
        self._tokenizer_json = tokenizer_json
        self._tokenizer = read_tokenizer(tokenizer_json)
        grown = growth(json.loads(self._tokenizer.to_str()), "normalizer")
        # A longer text may become longer than `_MAX_NORMALIZED`.
        self._sure_bytes = min(MAX_TEXT_BYTES, _MAX_NORMALIZED // grown)

    def size(self, text: str) -> int:
        size = utf8_size(text)
        if size > MAX_TEXT_BYTES:
            raise ValueError(
                f"has {size:,} bytes of text, but this tokenizer takes at most "
                f"{MAX_TEXT_BYTES:,} at once: cut it into several rows"
            )
        if size > self._sure_bytes:
            with tokenizers_errors("`tokenizers` cannot normalize it"):
                length = len(self._tokenizer.normalizer.normalize_str(text))
            if length > _MAX_NORMALIZED:
                raise ValueError(
                    f"has {size:,} bytes of text, of which this tokenizer's normalizer makes "
                    f"{length:,} characters, more than {_MAX_NORMALIZED:,}: cut it into several"
                    " rows"
                )
        return size

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded: list[tokenizers.Encoding] = []
        for batch in batches(texts, [self.size(text) for text in texts], self._sure_bytes):
            what = f"`tokenizers` cannot encode a batch that begins {batch[0][:40]!r}"
            with tokenizers_errors(f"leave the text out or cut it: {what}"):
                encoded += self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encoded]

    def __reduce__(self) -> tuple[type["HuggingFaceEncoder"], tuple[str]]:
        """Pickles as the tokenizer.json."""
        return HuggingFaceEncoder, (self._tokenizer_json,)
