"""metadata.json: the description of a finished shard of flat tokens, and of a split of shards."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import xxhash

from lmlib.storage.stored_json import parse_json, read_text
from lmlib.storage.unlinked import check_no_link, read_regular

FORMAT = "lmlib flat tokens"
VERSION = 4
FILE_NAME = "metadata.json"
JOURNAL_FILE = "journal.json"  # in an unfinished shard
ARRAYS = ("tokens", "document_starts", "first_documents")
LOSS_MASK = "loss_mask"  # an additional array of conversations and pairs
TOKENIZER_FILE = "tokenizer.json"
LARGEST_TOKENIZER = 256 << 20  # bytes; the largest vocabularies take 40 MB

_DIGEST = '  "digest"'  # beginning of the second-last line of a signed file
_Made = TypeVar("_Made")

# The kind of documents of a split. All but text have a loss mask and are never cut. Document 2·i of
# pairs has the chosen answer, 2·i + 1 the rejected one. Document 2·i of labelled answers has one,
# with its label in the mask of the first token, and 2·i + 1 another row's answer to its prompt.
Content = Literal["text", "conversations", "pairs", "labelled"]
IN_TWOS = ("pairs", "labelled")


class DamagedDataError(ValueError):
    """Stored data is missing, truncated or fails its checksum."""


def arrays_of(content: Content) -> tuple[str, ...]:
    """Returns the names of a shard's arrays."""
    return ARRAYS if content == "text" else (*ARRAYS, LOSS_MASK)


@dataclass(frozen=True)
class TokenizerIdentity:
    """The tokenizer that made the tokens."""

    name: str
    sha256: str | None  # of tokenizer.json; None for a tokenizer without one

    def __str__(self) -> str:
        return repr(self.name) + (f" (SHA-256 {self.sha256[:8]}…)" if self.sha256 else "")


def tokenizers_differ(one: TokenizerIdentity | None, other: TokenizerIdentity | None) -> bool:
    """True if the same ids are known to mean different texts.

    Digests are compared if both have one, otherwise names. None is an unknown tokenizer.
    """
    if one is None or other is None:
        return False
    if one.sha256 is not None and other.sha256 is not None:
        return one.sha256 != other.sha256
    return one.name != other.name


@dataclass(frozen=True)
class Totals:
    """The counts of a shard up to some document, or of a split; see docs/flat-tokens.md."""

    tokens: int = 0
    documents: int = 0
    targets: int = 0
    bytes: int = 0
    gzip_bytes: int | None = 0
    skipped_rows: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    cut_documents: int = 0
    cut_tokens: int = 0
    max_token_id: int = -1

    def __add__(self, other: "Totals") -> "Totals":
        sums: dict[str, Any] = {}
        for each in fields(Totals):
            both = getattr(self, each.name), getattr(other, each.name)
            add = max if each.name == "max_token_id" else sum
            sums[each.name] = None if None in both else add(both)
        return Totals(**sums)


@dataclass(frozen=True, kw_only=True)
class _Prepared(Totals):
    """Counts, and the entries shared by all shards of a split."""

    content: Content
    vocab_size: int
    tokenizer: TokenizerIdentity | None
    bos_id: int | None  # put before each document
    eos_id: int | None  # put after each document
    source: Mapping[str, Any]  # origin of the documents, as JSON values
    data_set: str  # the same for all shards that were prepared together


@dataclass(frozen=True, kw_only=True)
class ShardMetadata(_Prepared):
    """The content of a shard's metadata.json."""

    shard: int
    shards: int
    digests: Mapping[str, str]  # of each array

    @property
    def name(self) -> str:
        return shard_name(self.shard, self.shards)

    def write(self, shard_folder: Path) -> None:
        """Writes metadata.json atomically and durably."""
        write_signed(shard_folder / FILE_NAME, FORMAT, VERSION, asdict(self))


# Entries shared by all shards of a split.
_SHARED = ("shards", "content", "vocab_size", "tokenizer", "bos_id", "eos_id", "source", "data_set")


@dataclass(frozen=True, kw_only=True)
class SplitMetadata(_Prepared):
    """A finished split: its counts, and its shards in order."""

    shards: tuple[ShardMetadata, ...]

    @classmethod
    def of(cls, shards: Sequence[ShardMetadata]) -> "SplitMetadata":
        """Returns the split that consists of `shards`."""
        counts: Totals = sum(shards, start=Totals())
        shared = {name: getattr(shards[0], name) for name in _SHARED}
        return cls(**vars(counts) | shared | {"shards": tuple(shards)})

    @property
    def digest(self) -> str:
        """A digest of all arrays; splits that differ anywhere have different digests."""
        of_shards = [dict(shard.digests) for shard in self.shards]
        return digest(json.dumps(of_shards, sort_keys=True).encode())


def shard_name(shard: int, shards: int) -> str:
    """Returns the folder name of shard number `shard` of `shards`."""
    return f"shard_{shard:05d}_of_{shards:05d}"


def shard_number(folder: Path) -> tuple[int, int] | None:
    """Parses (shard, shards) from a shard's folder name; None for another name."""
    match = re.fullmatch(r"shard_(\d{5})_of_(\d{5})", folder.name)
    return (int(match[1]), int(match[2])) if match else None


def shard_folders(split_folder: Path) -> list[Path]:
    """Returns the folders of all existing shards, finished or not, in order."""
    return sorted(entry for entry in split_folder.glob("shard_*") if shard_number(entry))


def read_split(split_folder: Path) -> SplitMetadata:
    """Reads the metadata of a finished split.

    Raises FileNotFoundError if a shard is missing or unfinished, ValueError if a metadata.json is
    damaged or of another version, or the shards do not belong together.
    """
    numbers = [number for folder in shard_folders(split_folder) if (number := shard_number(folder))]
    if not numbers:
        if (split_folder / FILE_NAME).is_file():  # version 1 had one for the whole split
            raise _other_version(split_folder / FILE_NAME, (FORMAT, 1), (FORMAT, VERSION))
        raise FileNotFoundError(f"{split_folder} is unfinished: it has no shards")
    counts = sorted({shards for _, shards in numbers})
    if len(counts) > 1:
        raise ValueError(
            f"{split_folder} holds shards of splits into {' and '.join(map(str, counts))}: "
            "remove those that do not belong there"
        )
    expected = [split_folder / shard_name(shard, counts[0]) for shard in range(counts[0])]
    missing = [folder.name for folder in expected if not (folder / FILE_NAME).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise FileNotFoundError(
            f"{split_folder} is unfinished: {missing[0]}{more} of {counts[0]} shards has no "
            f"{FILE_NAME}, which is written last; run the command that was making it again"
        )
    first, *others = found = [read_shard(folder) for folder in expected]
    for shard in others:
        for name in _SHARED:
            if (value := getattr(shard, name)) != getattr(first, name):
                raise ValueError(
                    f"{split_folder / shard.name} has {name} {value!r}, but {first.name} has "
                    f"{getattr(first, name)!r}: they are of different data sets; make one of them "
                    "again"
                )
    return SplitMetadata.of(found)


def read_shard(shard_folder: Path) -> ShardMetadata:
    """Reads metadata.json of a finished shard.

    Raises FileNotFoundError if the shard is unfinished, ValueError if the file has another version,
    and DamagedDataError if it is invalid.
    """
    file = shard_folder / FILE_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{shard_folder} is unfinished: it has no {FILE_NAME}")
    check_no_link(shard_folder, file)

    def made(content: dict[str, Any]) -> ShardMetadata:
        tokenizer = content.pop("tokenizer")
        identity = None if tokenizer is None else TokenizerIdentity(**tokenizer)
        if absent := vars(Totals()).keys() - content.keys():
            raise ValueError(f"it has no {sorted(absent)[0]}")
        metadata = ShardMetadata(tokenizer=identity, **content)
        for record in (metadata, *([identity] if identity else [])):
            check_entries(record)
        if sorted(metadata.digests) != sorted(arrays_of(metadata.content)):
            raise ValueError(f"its digests are {metadata.digests!r:.40}")
        if metadata.content in IN_TWOS and metadata.documents % 2:
            raise ValueError(f"its {metadata.documents} documents are not pairs")
        if shard_number(shard_folder) != (metadata.shard, metadata.shards):
            raise ValueError(f"it belongs to shard {metadata.shard} of {metadata.shards}")
        return metadata

    return read_signed(file, FORMAT, VERSION, made, "make the shard again")


def check_entries(record: Any) -> None:
    """Raises ValueError for an entry of a dataclass that lacks its declared type, or is negative.

    The entries come from JSON. `max_token_id` may be -1.
    """
    for name, declared in get_type_hints(type(record)).items():
        value, kinds = getattr(record, name), get_args(declared) or (declared,)
        if get_origin(declared) is Literal:
            fits = value in kinds
        elif get_origin(declared) is Mapping:
            fits = isinstance(value, dict)
        else:
            fits = declared is Any or type(value) in kinds
        if type(value) is int:
            fits = fits and (-1 if name == "max_token_id" else 0) <= value < 2**62
        if not fits or (name == "digests" and {str} != set(map(type, value.values()))):
            raise ValueError(f"its {name} is {value!r:.40}")


def digest(content: bytes) -> str:
    """Returns the XXH3-128 of `content` as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(content)


def write_signed(file: Path, format_name: str, version: int, entries: Mapping[str, Any]) -> None:
    """Writes JSON whose last entry is a digest of the text before it, atomically and durably."""
    from lmlib.storage.atomic_file import write_atomically

    content = {"format": format_name, "version": version, **entries}
    before = json.dumps(content, indent=2).removesuffix("\n}") + ",\n"
    write_atomically(file, f'{before}{_DIGEST}: "{digest(before.encode())}"\n}}\n')


def read_signed(
    file: Path,
    format_name: str,
    version: int,
    made: Callable[[dict[str, Any]], _Made],
    remedy: str,
) -> _Made:
    """Reads the entries of a file from `write_signed`, converted by `made`.

    Raises OSError if the file cannot be read, ValueError if it has another format or version, and
    DamagedDataError if it is damaged or `made` fails; the message ends with `remedy`.
    """
    try:
        text = read_text(file)
        content = parse_json(text)
        found = content.pop("format"), content.pop("version")
        if found == (format_name, version):
            if content.pop("digest") != digest(text.rpartition(_DIGEST)[0].encode()):
                raise ValueError("it does not have the digest that it was written with")
            return made(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedDataError(f"{file} is damaged ({error!r}): {remedy}") from error
    raise _other_version(file, found, (format_name, version))


def _other_version(file: Path, found: tuple[Any, Any], known: tuple[str, int]) -> ValueError:
    return ValueError(
        f"{file} has format {found[0]!r:.40}, version {found[1]!r:.40}, but this library reads "
        f"{known[0]!r}, version {known[1]}: make the data set again or use the matching library"
    )


def check_tokenizer_file(file: Path, metadata: SplitMetadata) -> None:
    """Raises DamagedDataError if the tokenizer.json `file` exists but did not make the tokens."""
    if metadata.tokenizer is None or metadata.tokenizer.sha256 is None or not file.is_file():
        return
    try:
        found = hashlib.sha256(read_regular(file, LARGEST_TOKENIZER)).hexdigest()
    except ValueError as error:
        raise DamagedDataError(f"{file} is not a tokenizer: {error}") from error
    if found != metadata.tokenizer.sha256:
        raise DamagedDataError(
            f"{file} has sha256 {found}, but the tokens were made with one of "
            f"{metadata.tokenizer.sha256}: restore that file or make the data set again"
        )
