"""metadata.json: what a finished shard of flat tokens holds, and its shards as a split."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lmlib.data.stored.damage import DamagedDataError
from lmlib.data.stored.digests import digest
from lmlib.storage.stored_json import parse_json, read_text
from lmlib.storage.whole_file import write_whole

FORMAT = "lmlib flat tokens"
VERSION = 4
FILE_NAME = "metadata.json"
JOURNAL_FILE = "journal.json"  # what an unfinished shard holds instead
ARRAYS = ("tokens", "document_starts", "first_documents")
LOSS_MASK = "loss_mask"  # one more, of conversations and pairs
TOKENIZER_FILE = "tokenizer.json"
LARGEST_TOKENIZER = 256 << 20  # bytes; those of the largest vocabularies have 40 MB

_SHARD_NAME = re.compile(r"shard_(\d{5})_of_(\d{5})")
# What all shards of a split have in common.
_SHARED = ("shards", "content", "vocab_size", "tokenizer", "bos_id", "eos_id", "source", "data_set")
_DIGEST = '  "digest"'  # how the last line of metadata.json but one begins


# What the documents of a split are. Conversations have a loss mask, and are never cut. So are pairs
# of them: document 2·i has the chosen answer, 2·i + 1 the rejected one.
Content = Literal["text", "conversations", "pairs"]


def arrays_of(content: Content) -> tuple[str, ...]:
    """The names of the arrays that a shard has."""
    return ARRAYS if content == "text" else (*ARRAYS, LOSS_MASK)


@dataclass(frozen=True)
class TokenizerIdentity:
    """Which tokenizer made the tokens."""

    name: str
    sha256: str | None  # of tokenizer.json; None for a tokenizer that has no such file

    def __str__(self) -> str:
        return repr(self.name) + (f" (SHA-256 {self.sha256[:8]}…)" if self.sha256 else "")


def tokenizers_differ(one: TokenizerIdentity | None, other: TokenizerIdentity | None) -> bool:
    """Whether the same ids are known to mean different texts.

    Told by the digests where both have one, else by the names; None is an unknown tokenizer.
    """
    if one is None or other is None:
        return False
    if one.sha256 is not None and other.sha256 is not None:
        return one.sha256 != other.sha256
    return one.name != other.name


@dataclass(frozen=True)
class ShardMetadata:
    """The content of a shard's metadata.json; `docs/flat-tokens.md` describes each entry."""

    shard: int
    shards: int
    content: Content
    tokens: int
    documents: int
    targets: int  # tokens that are not the first of their document, and that the loss mask has
    bytes: int  # of the documents' UTF-8 text
    gzip_bytes: int | None  # sum over documents of gzip -9 of each alone, if it was asked for
    skipped_rows: int  # rows of the source that held no usable text
    dropped_documents: int  # too long, and left out
    dropped_tokens: int  # theirs
    cut_documents: int  # too long, and kept in part
    cut_tokens: int  # theirs that were left out
    vocab_size: int
    max_token_id: int  # the largest that occurs; -1 if there are no tokens
    tokenizer: TokenizerIdentity | None
    bos_id: int | None  # put before each document
    eos_id: int | None  # put after each document
    source: Mapping[str, Any]  # where the documents came from, in JSON values
    data_set: str  # the same for all shards that were prepared together
    digests: Mapping[str, str]  # of each array

    @property
    def name(self) -> str:
        return shard_name(self.shard, self.shards)

    def write(self, shard_folder: Path) -> None:
        """Writes metadata.json atomically and durably: whole or absent, also after a crash."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        before = json.dumps(content, indent=2).removesuffix("\n}") + ",\n"
        own = digest(before.encode())
        write_whole(shard_folder / FILE_NAME, f'{before}{_DIGEST}: "{own}"\n}}\n')


@dataclass(frozen=True)
class SplitMetadata:
    """A finished split: its shards in order."""

    shards: tuple[ShardMetadata, ...]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def digest(self) -> str:
        """Of what all arrays hold: splits that differ in anything have others."""
        of_shards = [dict(shard.digests) for shard in self.shards]
        return digest(json.dumps(of_shards, sort_keys=True).encode())

    @property
    def content(self) -> Content:
        """What the documents are."""
        return self.shards[0].content

    @property
    def targets(self) -> int:
        """Tokens that are not the first of their document, and that the loss mask has."""
        return sum(shard.targets for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of the documents' UTF-8 text."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def gzip_bytes(self) -> int | None:
        """What `gzip -9` makes of the documents, each alone; None if it was not measured."""
        measured = [shard.gzip_bytes for shard in self.shards if shard.gzip_bytes is not None]
        return sum(measured) if len(measured) == len(self.shards) else None

    @property
    def skipped_rows(self) -> int:
        return sum(shard.skipped_rows for shard in self.shards)

    @property
    def dropped_documents(self) -> int:
        return sum(shard.dropped_documents for shard in self.shards)

    @property
    def dropped_tokens(self) -> int:
        return sum(shard.dropped_tokens for shard in self.shards)

    @property
    def cut_documents(self) -> int:
        return sum(shard.cut_documents for shard in self.shards)

    @property
    def cut_tokens(self) -> int:
        return sum(shard.cut_tokens for shard in self.shards)

    @property
    def max_token_id(self) -> int:
        return max(shard.max_token_id for shard in self.shards)

    @property
    def vocab_size(self) -> int:
        return self.shards[0].vocab_size

    @property
    def tokenizer(self) -> TokenizerIdentity | None:
        return self.shards[0].tokenizer

    @property
    def bos_id(self) -> int | None:
        return self.shards[0].bos_id

    @property
    def eos_id(self) -> int | None:
        return self.shards[0].eos_id

    @property
    def source(self) -> Mapping[str, Any]:
        return self.shards[0].source


def shard_name(shard: int, shards: int) -> str:
    """The folder of shard number `shard` of `shards`."""
    return f"shard_{shard:05d}_of_{shards:05d}"


def shard_number(folder: Path) -> tuple[int, int] | None:
    """(shard, shards) from the name of a shard's folder; None for another name."""
    match = _SHARD_NAME.fullmatch(folder.name)
    return (int(match[1]), int(match[2])) if match else None


def shard_folders(split_folder: Path) -> list[Path]:
    """The folders of all shards that are there, finished or not, in order."""
    return sorted(entry for entry in split_folder.glob("shard_*") if shard_number(entry))


def read_split(split_folder: Path) -> SplitMetadata:
    """The metadata of a finished split.

    Raises FileNotFoundError when a shard is missing or unfinished, ValueError when a metadata.json
    is damaged or of another version, or the shards do not belong together.
    """
    folders = shard_folders(split_folder)
    if not folders:
        _refuse_version_1(split_folder)
        raise FileNotFoundError(f"{split_folder} is unfinished: it holds no shard")
    counts = {number[1] for number in map(shard_number, folders) if number}
    if len(counts) > 1:
        raise ValueError(
            f"{split_folder} holds shards of splits into {' and '.join(map(str, sorted(counts)))}: "
            "remove those that do not belong there"
        )
    (shards,) = counts
    expected = [split_folder / shard_name(shard, shards) for shard in range(shards)]
    missing = [folder.name for folder in expected if not (folder / FILE_NAME).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise FileNotFoundError(
            f"{split_folder} is unfinished: {missing[0]}{more} of {shards} shards has no "
            f"{FILE_NAME}, which is written last; run the command that was making it again"
        )
    found = tuple(map(read_shard, expected))
    for shard in found[1:]:
        for name in _SHARED:
            if getattr(shard, name) != getattr(found[0], name):
                raise ValueError(
                    f"{split_folder / shard.name} has {name} {getattr(shard, name)!r}, but "
                    f"{found[0].name} has {getattr(found[0], name)!r}: they are of different data "
                    "sets; make one of them again"
                )
    return SplitMetadata(found)


def read_shard(shard_folder: Path) -> ShardMetadata:
    """Reads metadata.json of a finished shard.

    Raises FileNotFoundError when the shard is unfinished, ValueError when the file is not valid
    or of another version.
    """
    file = shard_folder / FILE_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{shard_folder} is unfinished: it has no {FILE_NAME}")
    for path in (shard_folder, file):
        if path.is_symlink():
            raise ValueError(f"{path} is a link: put what it leads to in its place")
    try:
        text = read_text(file)
        content = parse_json(text)
        found = content.pop("format"), content.pop("version")
        if found == (FORMAT, VERSION):
            if content.pop("digest") != digest(text.rpartition(_DIGEST)[0].encode()):
                raise ValueError("it does not have the digest that it was written with")
            tokenizer = content.pop("tokenizer")
            identity = None if tokenizer is None else TokenizerIdentity(**tokenizer)
            metadata = ShardMetadata(tokenizer=identity, **content)
            _check_types(metadata)
            if shard_number(shard_folder) != (metadata.shard, metadata.shards):
                raise ValueError(f"it is of shard {metadata.shard} of {metadata.shards}")
            return metadata
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error!r}): make the shard again") from error
    raise _other_version(file, *found)


def _check_types(metadata: ShardMetadata) -> None:
    """Raises ValueError for an entry that is not what docs/flat-tokens.md says."""
    optional = ("gzip_bytes", "bos_id", "eos_id")
    counts = ("shard", "shards", "tokens", "documents", "targets", "bytes", "skipped_rows")
    left_out = ("dropped_documents", "dropped_tokens", "cut_documents", "cut_tokens")
    for name in (*counts, *left_out, "vocab_size", "max_token_id", *optional):
        value = getattr(metadata, name)
        if name in optional and value is None:
            continue
        if type(value) is not int or not (-1 if name == "max_token_id" else 0) <= value < 2**62:
            raise ValueError(f"its {name} is {value!r:.40}")
    tokenizer = metadata.tokenizer
    for text in (tokenizer.name, tokenizer.sha256 or "") if tokenizer else ():
        if not isinstance(text, str):
            raise ValueError(f"its tokenizer has {text!r:.40} for a text")
    if not isinstance(metadata.source, dict):
        raise ValueError(f"its source is {metadata.source!r:.40}")
    if metadata.content not in get_args(Content):
        raise ValueError(f"its content is {metadata.content!r:.40}")
    if metadata.content == "pairs" and metadata.documents % 2:
        raise ValueError(f"its {metadata.documents} documents are no pairs")
    digests = metadata.digests
    if not isinstance(digests, dict) or sorted(digests) != sorted(arrays_of(metadata.content)):
        raise ValueError(f"its digests are {digests!r:.40}")
    for text in (metadata.data_set, *digests.values()):
        if not isinstance(text, str):
            raise ValueError(f"it has {text!r:.40} for a digest")


def _refuse_version_1(split_folder: Path) -> None:
    """Version 1 had one metadata.json for the whole split."""
    file = split_folder / FILE_NAME
    if file.is_file():
        raise _other_version(file, FORMAT, 1)


def _other_version(file: Path, format_name: object, version: object) -> ValueError:
    return ValueError(
        f"{file} has format {format_name!r}, version {version!r}, but this library reads "
        f"{FORMAT!r}, version {VERSION}: make the data set again or use the matching library"
    )


def check_tokenizer_file(file: Path, metadata: SplitMetadata) -> None:
    """Raises DamagedDataError if the tokenizer.json `file` is there, and not the one that made the
    tokens."""
    if metadata.tokenizer is None or metadata.tokenizer.sha256 is None or not file.is_file():
        return
    if file.stat().st_size > LARGEST_TOKENIZER:
        raise DamagedDataError(f"{file} has {file.stat().st_size:,} bytes: it is no tokenizer")
    with open(file, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != metadata.tokenizer.sha256:
        raise DamagedDataError(
            f"{file} has sha256 {found}, but the tokens were made with one of "
            f"{metadata.tokenizer.sha256}: restore that file or make the data set again"
        )
