"""The interface of encoders, and two simple ones: raw bytes, and Hugging Face `tokenizers`."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import tokenizers

from lmlib.data.text import read_tokenizer, tokenizers_errors

# `tokenizers` needs up to 380 bytes of memory per byte of text (measured).
MAX_TEXT_BYTES = 1 << 20  # for one text or a batch


class UnsuitableError(ValueError):
    """A valid tokenizer for which the fast engine is not proven to give the same ids."""


class Encoder(Protocol):
    """Turns texts into ids. Creating one takes a second; unpickling one is much faster."""

    def size(self, text: str) -> int:
        """Returns the UTF-8 bytes of `text`.

        Raises ValueError, with the end of a sentence about the text, if it holds a lone surrogate
        or would take too much memory to encode.
        """

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids (uint32, possibly read-only) of each text, without special tokens.

        Names of special tokens are text. Raises ValueError for a text that `size` refuses.
        """


def utf8_size(text: str) -> int:
    """Returns the UTF-8 bytes of `text`; raises ValueError for a lone surrogate."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(
            f"holds a lone surrogate at character {error.start}, which UTF-8 cannot express"
        ) from None


def batches(texts: Sequence[str], sizes: Sequence[int], most: int) -> Iterator[list[str]]:
    """Yields the texts in lists of at most `most` bytes, or of one text."""
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
    """Uses the UTF-8 bytes of a text as its ids."""

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

    def size(self, text: str) -> int:
        size = utf8_size(text)
        if size > MAX_TEXT_BYTES:
            raise ValueError(
                f"has {size:,} bytes of text, but this tokenizer takes at most "
                f"{MAX_TEXT_BYTES:,} at once: cut it into several rows"
            )
        return size

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded: list[tokenizers.Encoding] = []
        for batch in batches(texts, [self.size(text) for text in texts], MAX_TEXT_BYTES):
            what = f"`tokenizers` cannot encode a batch that begins {batch[0][:40]!r}"
            with tokenizers_errors(f"leave the text out or cut it: {what}"):
                encoded += self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encoded]

    def __reduce__(self) -> tuple[type["HuggingFaceEncoder"], tuple[str]]:
        """Pickles as the tokenizer.json."""
        return HuggingFaceEncoder, (self._tokenizer_json,)
