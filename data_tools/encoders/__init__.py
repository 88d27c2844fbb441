"""Text to token ids, as fast as possible, with exactly the ids of Hugging Face `tokenizers`.

Imports nothing of lmlib, so that a worker process starts without JAX.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from data_tools.encoders.byte_level import ByteLevelEncoder
from data_tools.encoders.hugging_face import HuggingFaceEncoder
from data_tools.encoders.raw_bytes import RawBytesEncoder
from data_tools.encoders.unsuitable import UnsuitableError

__all__ = ["Encoder", "make_encoder"]


class Encoder(Protocol):
    """Turns texts into ids. Making one takes a second; a pickled one is ready much sooner."""

    @property
    def max_text_bytes(self) -> int | None:
        """The longest text that is taken, in bytes of UTF-8; None: any."""

    def size(self, text: str) -> int:
        """Bytes of UTF-8 that `text` takes.

        Raises ValueError, whose message completes a sentence about it, if it holds a lone surrogate
        or would take too much memory to encode.
        """

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids (uint32, maybe read-only) of each text: no special token added or recognised.

        Raises ValueError for a text without `size`.
        """


def make_encoder(tokenizer_json: str | None) -> Encoder:
    """The fastest encoder that provably gives the ids of this tokenizer.json; None: raw bytes.

    Raises ValueError if the text describes no tokenizer.
    """
    if tokenizer_json is None:
        return RawBytesEncoder()
    try:
        return ByteLevelEncoder(tokenizer_json)
    except UnsuitableError:
        return HuggingFaceEncoder(tokenizer_json)
