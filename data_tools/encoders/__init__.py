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
    """Turns texts into ids. Pickles as the text of its tokenizer.json and is built anew from it."""

    @property
    def max_text_bytes(self) -> int | None:
        """The longest text that is taken, in bytes of UTF-8; None: any."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids (uint32, maybe read-only) of each text: no special token added or recognised.

        Raises ValueError for a text longer than `max_text_bytes` or with a lone surrogate.
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
