"""Tokenizers that turn documents into token ids, and know how to frame a document."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from data_tools.encoders import Encoder, make_encoder
from lmlib.data.stored.metadata import LARGEST_TOKENIZER, TokenizerIdentity
from lmlib.data.text import BYTE_TOKENIZER, decoded_bytes, read_tokenizer, tokenizers_errors
from lmlib.storage.regular_file import check_within_folder
from lmlib.storage.stored_json import read_json, read_text

BEGIN_OF_TEXT, END_OF_TEXT = "<|begin_of_text|>", "<|end_of_text|>"

# Names that common tokenizers give these tokens, tried in order when nothing says which.
_BOS_NAMES = (BEGIN_OF_TEXT, "<s>", "<bos>", "<|startoftext|>", "<|endoftext|>")
_EOS_NAMES = (END_OF_TEXT, "</s>", "<eos>", "<|endoftext|>")


class Tokenizer(ABC):
    """Encodes text as plain text: a special token's name inside a document stays text."""

    identity: TokenizerIdentity
    tokenizer_json: str | None  # the text of tokenizer.json, if there is such a file
    vocab_size: int  # ids lie in [0, vocab_size)
    bos_id: int | None
    eos_id: int | None

    @property
    @abstractmethod
    def encoder(self) -> Encoder:
        """What turns texts into ids; it can be sent to other processes."""

    def encode_batch(self, documents: Sequence[str]) -> list[np.ndarray]:
        """The ids (uint32) of each document, without framing; see `Encoder.encode`."""
        return self.encoder.encode(documents)

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, leaving special tokens out."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are ids 0 to 255; 256 begins a document and 257 ends it."""

    def __init__(self, bos: bool = True) -> None:
        """`bos` is whether documents are begun by 256."""
        self.identity = BYTE_TOKENIZER
        self.tokenizer_json = None
        self.vocab_size, self.bos_id, self.eos_id = 258, 256 if bos else None, 257

    @property
    def encoder(self) -> Encoder:
        """See `Tokenizer.encoder`."""
        return make_encoder(None)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`; bytes that are not UTF-8 become U+FFFD."""
        return decoded_bytes(ids)


class JsonTokenizer(Tokenizer):
    """A tokenizer that a Hugging Face tokenizer.json describes."""

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

        Framing tokens not given are those `configured`, or go by common names. A token that would
        both begin and end documents unasked only ends them, so that one lies between two.

        Raises ValueError if the text describes no tokenizer, or a given token is not in its
        vocabulary.
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
        bos, eos = (configured or {}).get("bos_token"), (configured or {}).get("eos_token")
        bos = bos if bos_token is None else bos_token
        eos = eos_token or eos
        self.eos_id = _special_id(name, vocabulary, "eos_token", eos, _EOS_NAMES)
        self.bos_id = None
        if bos != "":
            self.bos_id = _special_id(name, vocabulary, "bos_token", bos, _BOS_NAMES)
        if bos_token is None and self.bos_id == self.eos_id:
            self.bos_id = None

    @cached_property
    def encoder(self) -> Encoder:
        """See `Tokenizer.encoder`; made when first asked for, since it takes a second."""
        return make_encoder(self.tokenizer_json)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        with tokenizers_errors(f"{self.identity.name} cannot decode"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def framing_tokens(names: Collection[str]) -> dict[str, str]:
    """The tokens that begin and end documents, as tokenizer_config.json names them, of those that
    go by common names; for each role, if one of `names` does."""
    roles = {"bos_token": _BOS_NAMES, "eos_token": _EOS_NAMES}
    found = {role: [name for name in common if name in names] for role, common in roles.items()}
    return {role: present[0] for role, present in found.items() if present}


def load_tokenizer(
    name: str, bos_token: str | None = None, eos_token: str | None = None
) -> Tokenizer:
    """The tokenizer called `name`: 'bytes', a tokenizer.json, its folder, or a name on the Hub.

    `bos_token` and `eos_token` name the framing tokens, "" for the first none; if not given,
    tokenizer_config.json beside the file says, or else common names are tried. No code from
    elsewhere is ever run.

    Of a folder, which may be a stranger's, only these two files are read, as JSON, and neither
    where it is a link that leads out of the folder.

    Raises FileNotFoundError for a folder without tokenizer.json, ValueError for a name that is
    neither here nor on the Hub, a tokenizer without a token that was named, or a damaged one.
    """
    if name == "bytes":
        if bos_token or eos_token:
            raise ValueError(f"'bytes' has no token {bos_token or eos_token!r}: leave it out")
        return ByteTokenizer(bos=bos_token is None)
    path = Path(os.path.expanduser(name))
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        configured = _configured_tokens(file.with_name("tokenizer_config.json"))
        text = _read(file, named=not path.is_dir())
        return JsonTokenizer(name, text, bos_token, eos_token, configured)
    if path.is_dir():
        raise FileNotFoundError(f"the folder {path} holds no tokenizer.json")

    from huggingface_hub import hf_hub_download

    try:
        # The file itself: its digest says which tokenizer made the ids.
        file = Path(hf_hub_download(name, "tokenizer.json"))
    except Exception as error:  # of the network, of the file system, of the name
        raise ValueError(
            f"{name!r} is neither 'bytes', nor a tokenizer.json or its folder, and cannot be "
            f"fetched from the Hugging Face Hub: {error}"
        ) from error
    return JsonTokenizer(name, _read(file), bos_token, eos_token)


def _read(file: Path, named: bool = True) -> str:
    """Its text. `named`: the file itself is what the user names, so it may be a link."""
    try:
        if not named:
            check_within_folder(file)
        return read_text(file, LARGEST_TOKENIZER)
    except ValueError as error:
        raise ValueError(f"{file} cannot be used: {error}") from error


def _special_id(
    tokenizer: str,
    vocabulary: dict[str, int],
    role: str,
    given: str | None,
    common_names: tuple[str, ...],
) -> int | None:
    if given is not None:
        if given not in vocabulary:
            raise ValueError(f"{tokenizer} has no token {given!r} to serve as {role}")
        return vocabulary[given]
    return next((vocabulary[name] for name in common_names if name in vocabulary), None)


def _configured_tokens(file: Path) -> dict[str, str]:
    """What tokenizer_config.json says the framing tokens are; it may be absent."""
    if not file.is_file():
        return {}
    try:
        check_within_folder(file)
        config = read_json(file)
    except ValueError as error:
        raise ValueError(f"{file} cannot be used: {error}") from error
    found = {}
    for role in ("bos_token", "eos_token"):
        entry = config.get(role) if isinstance(config, dict) else None
        # A token is its name, or an object that holds the name as "content".
        name = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(name, str):
            found[role] = name
        elif name is not None:
            raise ValueError(f"{file} has the {role} {name!r:.40}, which is no name of a token")
    return found
