"""Texts that name their special tokens, as ids, with the characters that each id stands for."""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from data_tools.encoders.utf8 import utf8_size
from lmlib.data.text import read_tokenizer, tokenizers_errors

_MOST_BYTES = 1 << 20  # of text that is encoded together; bounds the memory


class Tokens(NamedTuple):
    """The ids of a text; id i stands for its characters [begins[i], ends[i])."""

    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray

    def covering(self, spans: Iterable[tuple[int, int]]) -> np.ndarray:
        """Which ids (bool) stand for characters of the spans [begin, end)."""
        covered = np.zeros(len(self.ids), bool)
        for begin, end in spans:
            here = np.flatnonzero((self.ends > begin) & (self.begins < end))
            if len(here):
                covered[here[0] : here[-1] + 1] = True
        return covered


class MarkedEncoder:
    """Gives the ids of `tokenizers`, in which names of special tokens are those tokens."""

    def __init__(self, tokenizer_json: str | None) -> None:
        """`tokenizer_json` None: bytes. Raises ValueError if the text describes no tokenizer."""
        self._tokenizer = None
        self.special: dict[int, str] = {}  # names of special tokens
        if tokenizer_json is not None:
            read_tokenizer(tokenizer_json)  # is it one?
            # What frames texts would also shift the characters of tokens that begin with a space.
            content = json.loads(tokenizer_json) | {"post_processor": None}
            self._tokenizer = read_tokenizer(json.dumps(content))
            self._tokenizer.encode_special_tokens = False
            added = self._tokenizer.get_added_tokens_decoder()
            self.special = {id: str(token) for id, token in added.items() if token.special}

    def size(self, text: str) -> int:
        """Bytes of UTF-8; raises ValueError for a lone surrogate, or a text that is too long."""
        size = utf8_size(text)
        if size > _MOST_BYTES:
            raise ValueError(f"has {size:,} bytes of text, more than {_MOST_BYTES:,}: cut it")
        return size

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text; raises ValueError for one that has no `size`."""
        if self._tokenizer is None:
            return [_bytes_of(text) for text in texts]
        tokens: list[Tokens] = []
        for batch in self._batches(texts):
            with tokenizers_errors(f"`tokenizers` cannot encode a batch that has {batch[0]!r:.60}"):
                encodings = self._tokenizer.encode_batch(batch, add_special_tokens=False)
            for encoding in encodings:
                places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
                ids = np.array(encoding.ids, np.uint32)
                tokens.append(Tokens(ids, places[:, 0], places[:, 1]))
        return tokens

    def _batches(self, texts: Sequence[str]) -> Iterable[list[str]]:
        batch: list[str] = []
        size = 0
        for text in texts:
            if batch and size + self.size(text) > _MOST_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(text)
            size += self.size(text)
        if batch:
            yield batch


def _bytes_of(text: str) -> Tokens:
    sizes = [len(character.encode()) for character in text]
    begins = np.repeat(np.arange(len(text)), sizes)
    return Tokens(np.frombuffer(text.encode(), np.uint8).astype(np.uint32), begins, begins + 1)
