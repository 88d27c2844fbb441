"""Any tokenizer.json, run by Hugging Face `tokenizers` itself."""

import json
from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers

from data_tools.encoders.utf8 import utf8_size
from lmlib.data.text import read_tokenizer, tokenizers_errors
from lmlib.data.tokenizer_limits import growth

# `tokenizers` was measured to need up to 380 bytes of memory for a byte of text.
_MAX_TEXT_BYTES = 1 << 20  # also of a batch
_MAX_NORMALIZED = 4 << 20  # characters; few normalizers make a text longer at all


class HuggingFaceEncoder:
    """Runs `tokenizers` on small batches, so that its memory stays below 0.5 GB."""

    max_text_bytes: int | None = _MAX_TEXT_BYTES

    def __init__(self, tokenizer_json: str) -> None:
        """Raises ValueError if the text describes no tokenizer."""
        self._tokenizer_json = tokenizer_json
        self._tokenizer = read_tokenizer(tokenizer_json)
        grown = growth(json.loads(self._tokenizer.to_str()), "normalizer")
        # Of more than this some may become longer than `_MAX_NORMALIZED`.
        self._sure_bytes = min(_MAX_TEXT_BYTES, _MAX_NORMALIZED // grown)

    def size(self, text: str) -> int:
        """See `Encoder.size`."""
        size = utf8_size(text)
        if size > _MAX_TEXT_BYTES:
            raise ValueError(
                f"has {size:,} bytes of text, but this tokenizer takes at most "
                f"{_MAX_TEXT_BYTES:,} at once: cut it into several rows"
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
        """See `Encoder.encode`."""
        encoded = []
        for batch in self._batches(texts):
            for encoding in self._run(batch):
                encoded.append(np.array(encoding.ids, np.uint32))
        return encoded

    def _batches(self, texts: Sequence[str]) -> Iterator[list[str]]:
        batch: list[str] = []
        batch_size = 0
        for text in texts:
            size = self.size(text)
            if batch and batch_size + size > self._sure_bytes:
                yield batch
                batch, batch_size = [], 0
            batch.append(text)
            batch_size += size
        if batch:
            yield batch

    def _run(self, batch: list[str]) -> list[tokenizers.Encoding]:
        what = f"`tokenizers` cannot encode a batch that begins {batch[0][:40]!r}"
        with tokenizers_errors(f"leave the text out or cut it: {what}"):
            return self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)

    def __reduce__(self) -> tuple[type["HuggingFaceEncoder"], tuple[str]]:
        """Pickles as the tokenizer.json."""
        return HuggingFaceEncoder, (self._tokenizer_json,)
