"""Conversion between texts and the token ids of a data set.

For generation, samples, evaluation and exports, and for data_tools.
"""

import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from lmlib.data.stored.metadata import LARGEST_TOKENIZER, TokenizerIdentity
from lmlib.storage.atomic_file import write_atomically
from lmlib.storage.stored_json import read_text

if TYPE_CHECKING:  # slow to import
    from tokenizers import Tokenizer


_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte of a character without a token of its own
BYTE_TOKENIZER = TokenizerIdentity("bytes", None)  # UTF-8 bytes are ids 0 to 255


@dataclass(frozen=True)
class TextCodec:
    """Encodes texts and decodes ids of a data set."""

    # The ids of the beginning of a document, with the token that begins one, if the data set has
    # it; names of special tokens are plain text.
    encode: Callable[[str], list[int]]
    encode_marked: Callable[[str], list[int]]  # of a text that names its special tokens itself
    decode: Callable[[Iterable[int]], str]  # without special tokens
    # True if later ids don't change the text before them, except an incomplete character at its end
    settles: Callable[[int], bool]
    special_name: Callable[[int], str] = lambda id: ""  # empty for ids of other tokens


@runtime_checkable
class HasText(Protocol):
    """A `Source` that may know its tokenizer."""

    def text_codec(self) -> TextCodec | None:
        """Loads the tokenizer, or raises ValueError or OSError; `None` if it is unknown."""


def codec_of_file(file: Path, bos_id: int | None) -> TextCodec:
    """Returns the codec of the tokenizer.json `file`; `bos_id` begins a document.

    Raises ValueError or OSError if the file does not describe a tokenizer.
    """
    return codec_of_json(_text_of(file), str(file), bos_id)


def codec_of_json(tokenizer_json: str, name: str, bos_id: int | None) -> TextCodec:
    """Returns the codec of a tokenizer.json's text; `name` is its name in errors.

    Raises ValueError if the text does not describe a tokenizer.
    """
    begin = [] if bos_id is None else [bos_id]
    tokenizer = read_tokenizer(tokenizer_json, name)
    added = tokenizer.get_added_tokens_decoder()

    @functools.cache
    def marked() -> "Tokenizer":
        tokenizer = read_tokenizer(tokenizer_json, name)
        tokenizer.encode_special_tokens = False
        return tokenizer

    def ids(tokenizer: "Tokenizer", text: str) -> list[int]:
        with tokenizers_errors(f"{name} cannot encode {text!r:.80}"):
            return tokenizer.encode(text, add_special_tokens=False).ids

    def text(ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        with tokenizers_errors(f"{name} cannot decode"):
            return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @functools.cache
    def special_name(id: int) -> str:
        return text([id], False) if id in added and added[id].special else ""

    def settles(id: int) -> bool:
        token = tokenizer.id_to_token(id)
        return token is not None and not special_name(id) and not _BYTE.fullmatch(token)

    return TextCodec(
        encode=lambda text: begin + ids(tokenizer, text),
        encode_marked=lambda text: ids(marked(), text),
        decode=text,
        settles=settles,
        special_name=special_name,
    )


def beginning_of(file: Path, end_ids: Collection[int]) -> int | None:
    """Returns the id that the tokenizer.json `file` puts before a text; None if there is none.

    It may put `end_ids` after a text. Raises ValueError or OSError if the file does not describe a
    tokenizer, or one that puts several ids before a text.
    """
    tokenizer = read_tokenizer(_text_of(file), str(file))
    with tokenizers_errors(f"{file} cannot encode an empty text"):
        around = tokenizer.encode("", add_special_tokens=True).ids
    before = [id for id in around if id not in end_ids]
    if len(before) > 1:
        raise ValueError(f"{file} puts {len(before)} tokens before a text ({before}), not just one")
    return before[0] if before else None


def codec_of_bytes(bos_id: int | None) -> TextCodec:
    """Returns the codec of bytes: ids below 256 are UTF-8 bytes, others are special."""
    begin = [] if bos_id is None else [bos_id]
    return TextCodec(
        encode=lambda text: [*begin, *text.encode()],
        encode_marked=lambda text: [*text.encode()],
        decode=decoded_bytes,
        settles=lambda id: True,
    )


def decoded_bytes(ids: Iterable[int | np.integer]) -> str:
    """Decodes ids below 256 as UTF-8 and drops others; invalid bytes become U+FFFD."""
    return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


def read_tokenizer(tokenizer_json: str, name: str = "the text") -> "Tokenizer":
    """Returns a tokenizer that treats any text as plain: no truncation, no padding.

    Raises ValueError if the text does not describe a tokenizer; `name` is its name there.
    """
    from tokenizers import Tokenizer

    with tokenizers_errors(f"{name} is not a valid tokenizer.json"):
        tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True  # their names in a text are plain text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def write_tokenizer(file: Path, tokenizer_json: str) -> None:
    """Writes a tokenizer.json atomically; raises OSError if that fails."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, tokenizer_json)


def _text_of(file: Path) -> str:
    try:
        return read_text(file, LARGEST_TOKENIZER)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


@contextmanager
def tokenizers_errors(doing: str) -> Iterator[None]:
    """Converts any exception of `tokenizers` into a ValueError: `doing`, then the cause."""
    try:
        yield
    except BaseException as error:  # `tokenizers` raises bare Exception
        # A Rust panic is not an Exception, and its class is not public.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{doing}: {' '.join(str(error).split())}") from error
