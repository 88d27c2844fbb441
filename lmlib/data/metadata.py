"""metadata.json: what a finished split of flat tokens holds, and how it was made."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = "lmlib flat tokens"
VERSION = 1
FILE_NAME = "metadata.json"


@dataclass(frozen=True)
class TokenizerIdentity:
    """Which tokenizer made the tokens."""

    name: str
    sha256: str | None  # of tokenizer.json; None for a tokenizer that has no such file


@dataclass(frozen=True)
class Shard:
    """One folder of tokens with the document starts that belong to it."""

    name: str
    tokens: int
    documents: int


@dataclass(frozen=True)
class Metadata:
    """The content of metadata.json; `docs/flat-tokens.md` describes each entry."""

    shards: tuple[Shard, ...]
    tokens: int
    documents: int
    bytes: int  # of the documents' UTF-8 text
    gzip_bytes: int | None  # sum over documents of gzip -9 of each alone, if it was asked for
    vocab_size: int
    max_token_id: int  # the largest that occurs
    tokenizer: TokenizerIdentity | None
    bos_id: int | None  # put before each document
    eos_id: int | None  # put after each document
    source: Mapping[str, Any]  # where the documents came from, in JSON values

    def write(self, split_folder: Path) -> None:
        """Writes metadata.json atomically and durably: whole or absent, also after a crash."""
        content = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=2)
        write_durably(split_folder / FILE_NAME, content + "\n")


def read_metadata(split_folder: Path) -> Metadata:
    """Reads metadata.json of a finished split.

    Raises FileNotFoundError when the split is unfinished, ValueError when the file is not valid
    or of another version.
    """
    file = split_folder / FILE_NAME
    if not file.is_file():
        raise FileNotFoundError(
            f"{split_folder} is unfinished: it has no {FILE_NAME}, which is written last; "
            "run the command that was making it again"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = content.pop("format"), content.pop("version")
        if found == (FORMAT, VERSION):
            shards = tuple(Shard(**shard) for shard in content.pop("shards"))
            tokenizer = content.pop("tokenizer")
            identity = None if tokenizer is None else TokenizerIdentity(**tokenizer)
            return Metadata(shards=shards, tokenizer=identity, **content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error!r}): make the split again") from error
    raise ValueError(
        f"{file} has format {found[0]!r}, version {found[1]!r}, but this library reads "
        f"{FORMAT!r}, version {VERSION}: make the data set again or use the matching library"
    )


def write_durably(file: Path, content: str) -> None:
    """Replaces `file` by UTF-8 `content` in one step that survives a crash once it returns."""
    temporary = file.with_name(file.name + ".tmp")
    with open(temporary, "w", encoding="utf-8", newline="") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
