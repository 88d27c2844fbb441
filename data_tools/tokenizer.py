"""Tokenizers: bytes or a tokenizer.json, with the tokens that frame a document."""

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmlib.data.stored.metadata import LARGEST_TOKENIZER, TokenizerIdentity
from lmlib.data.text import BYTE_TOKENIZER, decoded_bytes, read_tokenizer, tokenizers_errors
from lmlib.storage.hub_cache import check_within_folder
from lmlib.storage.stored_json import read_json, read_text

BEGIN_OF_TEXT, END_OF_TEXT = "<|begin_of_text|>", "<|end_of_text|>"

# `tokenizers` takes about 120 bytes of memory per byte of ordinary text, at most 380 (measured).
MAX_TEXT_BYTES = 1 << 24  # of one text
_BATCH_BYTES = 1 << 20  # of several texts

# The names of these tokens in common tokenizers, tried in order if they are not configured.
_FRAMING_NAMES = {
    "bos_token": (BEGIN_OF_TEXT, "<s>", "<bos>", "<|startoftext|>", "<|endoftext|>"),
    "eos_token": (END_OF_TEXT, "</s>", "<eos>", "<|endoftext|>"),
}


class Tokenizer:
    """Encodes text as plain text: a special token's name inside a document stays text."""

    identity: TokenizerIdentity
    tokenizer_json: str | None  # the text of tokenizer.json, if there is such a file
    vocab_size: int  # ids are in [0, vocab_size)
    bos_id: int | None
    eos_id: int | None
    settings: Mapping[str, Any] = {}  # that change the ids, as JSON values, for the record

    @property
    def dtype(self) -> np.dtype:
        """The type of the ids on disk."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    @property
    def framing(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids (uint32) before and after each document, at most one each."""
        before, after = (
            np.array([] if id is None else [id], np.uint32) for id in (self.bos_id, self.eos_id)
        )
        return before, after

    def id_of(self, token: str) -> int | None:
        """Returns the id of the token with this name; None if there is none."""
        return None

    def size(self, text: str) -> int:
        """Returns the UTF-8 bytes of `text`.

        Raises ValueError, with the end of a sentence about the text, if it contains a lone
        surrogate or would take too much memory to encode.
        """
        return utf8_size(text)

    def encode_batch(self, documents: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids (uint32) of each document, without framing.

        Raises ValueError for a text that `size` refuses.
        """
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`, without special tokens."""
        raise NotImplementedError


class ByteTokenizer(Tokenizer):
    """Encodes UTF-8 bytes as ids 0 to 255; 256 begins a document, if `bos`, and 257 ends it."""

    def __init__(self, bos: bool = True) -> None:
        self.identity = BYTE_TOKENIZER
        self.tokenizer_json = None
        self.vocab_size, self.bos_id, self.eos_id = 258, 256 if bos else None, 257

    def encode_batch(self, documents: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer.encode_batch`."""
        for text in documents:
            self.size(text)  # raises for a lone surrogate
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in documents]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`; bytes that are not UTF-8 become U+FFFD."""
        return decoded_bytes(ids)


class JsonTokenizer(Tokenizer):
    """A tokenizer described by a Hugging Face tokenizer.json."""

    tokenizer_json: str

    def __init__(
        self,
        name: str,
        tokenizer_json: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        configured: Mapping[str, str] | None = None,
    ) -> None:
        """`tokenizer_json` is the file's text; "" for a `bos_token` means none.

        Framing tokens that are not given are the `configured` ones, or have common names. A token
        that would both begin and end documents by default only ends them. Raises ValueError if the
        text describes no tokenizer, or a given token is not in its vocabulary.
        """
        try:
            self._tokenizer = read_tokenizer(tokenizer_json)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        self.tokenizer_json = tokenizer_json
        digest = hashlib.sha256(tokenizer_json.encode()).hexdigest()
        self.identity = TokenizerIdentity(name, digest)
        vocabulary = self._tokenizer.get_vocab()
        if not vocabulary:
            raise ValueError(f"{name} is not a valid tokenizer.json: it has no tokens")
        self.vocab_size = max(vocabulary.values()) + 1

        names = framing_tokens(vocabulary) | dict(configured or {})

        def special_id(role: str, given: str | None) -> int | None:
            token = names.get(role) if given is None else given
            if token is None:
                return None
            if token not in vocabulary:
                raise ValueError(f"{name} has no token {token!r} for {role}")
            return vocabulary[token]

        self.eos_id = special_id("eos_token", eos_token or None)
        self.bos_id = None if bos_token == "" else special_id("bos_token", bos_token)
        if bos_token is None and self.bos_id == self.eos_id:
            self.bos_id = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self._tokenizer.encode_special_tokens = True  # which its own pickling forgets

    def id_of(self, token: str) -> int | None:
        """See `Tokenizer.id_of`."""
        return self._tokenizer.token_to_id(token)

    def size(self, text: str) -> int:
        """See `Tokenizer.size`."""
        return bounded_size(text)

    def encode_batch(self, documents: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer.encode_batch`; runs `tokenizers` on small batches, to bound the memory."""
        encoded = []
        for batch in _batches(documents, [self.size(text) for text in documents]):
            what = f"`tokenizers` cannot encode a batch that begins {batch[0][:40]!r}"
            with tokenizers_errors(f"leave the text out or cut it: {what}"):
                found = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            encoded += [np.array(encoding.ids, np.uint32) for encoding in found]
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        with tokenizers_errors(f"{self.identity.name} cannot decode"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)


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


def bounded_size(text: str) -> int:
    """Returns `utf8_size`; raises ValueError for more than MAX_TEXT_BYTES too."""
    size = utf8_size(text)
    if size > MAX_TEXT_BYTES:
        raise ValueError(
            f"has {size:,} bytes of text, more than {MAX_TEXT_BYTES:,}: cut it into several"
        )
    return size


def _batches(texts: Sequence[str], sizes: Sequence[int]) -> Iterator[list[str]]:
    """Yields the texts in lists of at most `_BATCH_BYTES`, or of one text."""
    batch: list[str] = []
    batch_size = 0
    for text, size in zip(texts, sizes, strict=True):
        if batch and batch_size + size > _BATCH_BYTES:
            yield batch
            batch, batch_size = [], 0
        batch.append(text)
        batch_size += size
    if batch:
        yield batch


def framing_tokens(names: Collection[str]) -> dict[str, str]:
    """Returns the common names of framing tokens in `names`, by role in tokenizer_config.json."""
    found = {}
    for role, common in _FRAMING_NAMES.items():
        if (name := next(filter(names.__contains__, common), None)) is not None:
            found[role] = name
    return found


def load_tokenizer(
    name: str, bos_token: str | None = None, eos_token: str | None = None
) -> Tokenizer:
    """Loads the tokenizer `name`: 'bytes', a tokenizer.json, its folder, or a name on the Hub.

    `bos_token` and `eos_token` name the framing tokens, "" for the first means none. By default
    tokenizer_config.json next to the file names them, or common names are tried. A folder may be
    untrusted: only these two files are read, as JSON, and neither if it is a link that leads out of
    the folder.

    Raises FileNotFoundError for a folder without tokenizer.json, ValueError for a name that is
    neither local nor on the Hub, a tokenizer that lacks a named token, or a damaged one.
    """
    if name == "bytes":
        if bos_token or eos_token:
            raise ValueError(f"'bytes' has no token {bos_token or eos_token!r}: leave it out")
        return ByteTokenizer(bos=bos_token is None)
    path = Path(os.path.expanduser(name))
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        config_file = file.with_name("tokenizer_config.json")
        configured = {}
        if config_file.is_file():
            with _named(config_file):
                check_within_folder(config_file)
                configured = _framing(read_json(config_file))
        with _named(file):
            if path.is_dir():  # if the user named the file itself, it may be a link
                check_within_folder(file)
            text = read_text(file, LARGEST_TOKENIZER)
        return JsonTokenizer(name, text, bos_token, eos_token, configured)
    if path.is_dir():
        raise FileNotFoundError(f"the folder {path} holds no tokenizer.json")

    from huggingface_hub import hf_hub_download

    try:
        # Read the file itself: its digest identifies the tokenizer that made the ids.
        file = Path(hf_hub_download(name, "tokenizer.json"))
    except Exception as error:  # of the network, of the file system, of the name
        raise ValueError(
            f"{name!r} is neither 'bytes', nor a tokenizer.json or its folder, and cannot be "
            f"fetched from the Hugging Face Hub: {error}"
        ) from error
    with _named(file):
        text = read_text(file, LARGEST_TOKENIZER)
    return JsonTokenizer(name, text, bos_token, eos_token)


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Adds the file to a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file} cannot be used: {error}") from error


def _framing(config: object) -> dict[str, str]:
    """Returns the framing tokens that the content of tokenizer_config.json names."""
    found = {}
    for role in _FRAMING_NAMES:
        entry = config.get(role) if isinstance(config, dict) else None
        # A token is its name, or an object with the name as "content".
        name = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(name, str):
            found[role] = name
        elif name is not None:
            raise ValueError(f"its {role} {name!r:.40} does not name a token")
    return found
