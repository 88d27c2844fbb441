"""Encodes a tokenizer.json's byte-level BPE with tiktoken's engine, with the same ids.

It takes four to five times less CPU time than `tokenizers`, and little memory.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import tiktoken
import tokenizers
from tokenizers.normalizers import NFC

from data_tools.encoders.encoder import UnsuitableError, utf8_size
from data_tools.encoders.merge_table import merge_table
from data_tools.encoders.pre_tokenization import GPT2, PreTokenization, known_pre_tokenization
from lmlib.data.text import read_tokenizer

_CHUNK = 1 << 20  # characters; bounds the memory, and the cost of encoding a chunk twice
_LONG_RUN = 1 << 20  # characters of one kind; a longer pre-token takes too much memory


class ByteLevelEncoder:
    """Encodes with a byte-level BPE for which tiktoken's engine provably gives the same ids.

    A pre-token of n bytes takes about 50 n bytes of memory, so very long ones are refused.
    """

    def __init__(self, tokenizer_json: str) -> None:
        """Raises UnsuitableError for any other tokenizer, ValueError if the text describes none."""
        # Serialised again, the description has the same form for all versions.
        description = json.loads(read_tokenizer(tokenizer_json).to_str())
        model = description["model"]
        _check(model, description["normalizer"])
        self._tokenizer_json = tokenizer_json
        self._to_nfc = description["normalizer"] is not None
        self._added_tokens = AddedTokens(description["added_tokens"], self._to_nfc)
        self._pre_tokenization = _pre_tokenization(description["pre_tokenizer"])
        tokens, ids = merge_table(model)
        # The bytes come first and never result from a merge, so their ranks are arbitrary.
        in_order = all(a < b for a, b in pairwise(ids[256:]))
        ranks = ids if in_order else range(len(ids))
        self._id_of_rank = None if in_order else np.array(ids, np.uint32)
        self._engine = tiktoken.Encoding(
            "byte-level BPE",
            pat_str=self._pre_tokenization.pattern,
            mergeable_ranks=dict(zip(tokens, ranks, strict=True)),
            special_tokens={},
        )

    def size(self, text: str) -> int:
        size = utf8_size(text)
        if self._pre_tokenization.has_run(text, _LONG_RUN):
            raise ValueError(
                f"has more than {_LONG_RUN:,} characters of one kind, such as letters or spaces, "
                "one after the other, which would take too much memory: cut it or leave it out"
            )
        return size

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = []
        for text in texts:
            self.size(text)  # raises for a lone surrogate, which tiktoken would replace
            parts = list(self._parts(text))
            encoded.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
        return encoded

    def _parts(self, text: str) -> Iterator[np.ndarray]:
        for part in self._added_tokens.split(text):
            if isinstance(part, int):
                yield np.array([part], np.uint32)
            else:  # chunks end at whitespace or newlines, which NFC never composes
                yield from map(self._chunk_ids, self._pre_tokenization.chunks(part, _CHUNK))

    def _chunk_ids(self, chunk: str) -> np.ndarray:
        text = chunk
        # Python knows at least the characters of the Unicode version of `tokenizers`.
        if self._to_nfc and not unicodedata.is_normalized("NFC", chunk):
            text = NFC().normalize_str(chunk)
        try:
            ranks = self._engine.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # whitespace too long for fancy-regex's backtracking
            ids = self._reference.encode(chunk, add_special_tokens=False).ids
            return np.array(ids, np.uint32)
        return ranks if self._id_of_rank is None else self._id_of_rank[ranks]

    @cached_property
    def _reference(self) -> tokenizers.Tokenizer:
        return read_tokenizer(self._tokenizer_json)


def _check(model: dict[str, Any], normalizer: dict[str, Any] | None) -> None:
    if model["type"] != "BPE":
        raise UnsuitableError(f"the model is {model['type']}, not BPE")
    for setting in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model[setting]:
            raise UnsuitableError(f"the model has {setting}")
    if normalizer not in (None, {"type": "NFC"}):
        raise UnsuitableError(f"the normalizer is {normalizer['type']}, not NFC")


def _pre_tokenization(pre_tokenizer: dict[str, Any] | None) -> PreTokenization:
    """Returns GPT-2's for a plain `ByteLevel`, or the one described by a `Split` before it."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    match pre_tokenizer:
        case {**part} if part.items() >= (byte_level | {"use_regex": True}).items():
            expression = GPT2
        case {"pretokenizers": [{"pattern": {"Regex": expression}, **split}, {**part}]} if (
            split == {"type": "Split", "behavior": "Isolated", "invert": False}
            and part.items() >= (byte_level | {"use_regex": False}).items()
        ):
            pass
        case _:
            raise UnsuitableError("the pre-tokenizer is not a known one that ends in ByteLevel")
    known = known_pre_tokenization(expression)
    if known is None:
        raise UnsuitableError(f"the pre-tokenizer's expression {expression!r} is unknown")
    return known


class AddedTokens:
    """Splits a text at its added tokens like `tokenizers` with `encode_special_tokens` set.

    It splits first at tokens that are not `normalized`, then at the others in the remaining text,
    each time at the leftmost and there the longest match. A special token is text, but hides
    overlapping matches.
    """

    def __init__(self, entries: list[dict[str, Any]], has_normalizer: bool) -> None:
        """`entries` is "added_tokens" of a tokenizer.json.

        Raises UnsuitableError for a non-special token that strips whitespace around it, must be a
        whole word, or is matched in normalized text.
        """
        recognised = [entry for entry in entries if entry["content"] and not entry["special"]]
        for entry in recognised:
            for flag in ("lstrip", "rstrip", "single_word"):
                if entry[flag]:
                    raise UnsuitableError(f"added token {entry['content']!r} has {flag}")
            if has_normalizer and entry["normalized"]:
                raise UnsuitableError(f"added token {entry['content']!r} is normalized")
        self._ids = {entry["content"]: int(entry["id"]) for entry in recognised}
        self._passes = []
        for normalized in (False, True):
            contents = [e["content"] for e in entries if e["normalized"] is normalized]
            if any(content in self._ids for content in contents):
                longest_first = sorted(filter(None, contents), key=len, reverse=True)
                self._passes.append(re.compile("|".join(map(re.escape, longest_first))))

    def split(self, text: str, passed: int = 0) -> Iterator[str | int]:
        """Yields plain text and the ids of added tokens, in the order of `text`."""
        if passed == len(self._passes):
            yield text
            return
        start = 0
        for found in self._passes[passed].finditer(text):
            if found.group() in self._ids:
                yield from self.split(text[start : found.start()], passed + 1)
                yield self._ids[found.group()]
                start = found.end()
        yield from self.split(text[start:], passed + 1)
