"""UTF-8 bytes as ids."""

from collections.abc import Sequence

import numpy as np

from data_tools.encoders.utf8 import utf8_size


class RawBytesEncoder:
    """The ids of a text are its bytes of UTF-8."""

    max_text_bytes: int | None = None

    def size(self, text: str) -> int:
        """See `Encoder.size`."""
        return utf8_size(text)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Encoder.encode`."""
        encoded = []
        for text in texts:
            self.size(text)  # raises for a lone surrogate
            encoded.append(np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint32))
        return encoded
