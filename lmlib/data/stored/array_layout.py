"""What the description of a stored array may say, checked before TensorStore acts on it.

A description may come from a stranger. TensorStore would read one of any size, follow links, and
allocate chunks of any length; here an array is opened only if it is laid out as its format says and
its files are as large as it claims to be.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmlib.storage.bucket.copies import url_of
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.stored_json import read_json

_LARGEST_DESCRIPTION = 1 << 20  # bytes
_LARGEST_CHUNK = 1 << 28  # bytes; what one read allocates at most
_LARGEST_FILE = 1 << 32  # bytes
_ELEMENT_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "float16": 2}
_CHECKSUM_BYTES = 4
_INDEX_ENTRY_BYTES = 16  # for each chunk of a file

# What `check_claim` believes of lost files: so many times what is there, and some more.
_SHARE, _FILES, _BYTES = 4, 1_000, 1 << 26

_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_BYTE_CODECS = [{"name": "bytes"}, {"name": "crc32c"}]  # one byte has no order
_SEQAX_DTYPES = {"<u4": 4, "<u8": 8}


@dataclass(frozen=True)
class ArrayLayout:
    """How a one-dimensional array lies in its files; lengths are in elements."""

    folder: Path  # of the files, which are named 0, 1, 2, …
    has_floats: bool  # and no unsigned integers
    length: int
    chunk_length: int  # what is read at once
    file_length: int
    chunk_bytes: int  # that a chunk takes at least
    index_bytes: int  # besides, in each file
    largest_file_bytes: int

    @property
    def files(self) -> int:
        """Files that the array consists of."""
        return -(-self.length // self.file_length)

    def least_bytes(self, file: int) -> int:
        """What file number `file` takes at least, with every chunk that it should hold."""
        held = min(self.file_length, self.length - file * self.file_length)
        return -(-held // self.chunk_length) * self.chunk_bytes + self.index_bytes


def flat_tokens_layout(array: Path) -> ArrayLayout:
    """The layout of an array of docs/flat-tokens.md; raises ValueError or OSError for any other."""
    content = _description(array, "zarr.json")
    sharding = _only_codec(content.get("codecs"), "sharding_indexed")
    element_bytes = _element_bytes(content.get("data_type"), _ELEMENT_BYTES)
    codecs = sharding.get("codecs"), sharding.get("index_codecs")
    expected = _BYTE_CODECS if element_bytes == 1 else _CODECS
    if codecs != (expected, _CODECS) or sharding.get("index_location", "end") != "end":
        raise ValueError("its chunks are not plain numbers with a crc32c")
    keys = content.get("chunk_key_encoding")
    plain_keys = {"name": "default"}, {"name": "default", "configuration": {"separator": "/"}}
    if keys not in plain_keys or content.get("storage_transformers"):
        raise ValueError("its files have other names")
    grid = content.get("chunk_grid")
    if not isinstance(grid, dict) or grid.get("name") != "regular":
        raise ValueError("its chunks are not all of one length")
    file_length = _length_in(grid.get("configuration"), "chunk_shape", 1)
    chunk_length = _length_in(sharding, "chunk_shape", 1)
    if file_length % chunk_length:
        raise ValueError(f"its files of {file_length} elements do not divide into {chunk_length}")
    chunk_bytes = chunk_length * element_bytes + _CHECKSUM_BYTES
    chunks = file_length // chunk_length
    index_bytes = chunks * _INDEX_ENTRY_BYTES + _CHECKSUM_BYTES
    layout = ArrayLayout(
        folder=array / "c",
        has_floats=content["data_type"] == "float16",
        length=_length_in(content, "shape", 0),
        chunk_length=chunk_length,
        file_length=file_length,
        chunk_bytes=chunk_bytes,
        index_bytes=index_bytes,
        largest_file_bytes=chunks * chunk_bytes + index_bytes,
    )
    _check_limits(chunk_bytes, layout.largest_file_bytes)
    return layout


def seqax_layout(array: Path) -> ArrayLayout:
    """The layout of an array as seqax writes it; raises ValueError or OSError for any other."""
    content = _description(array, ".zarray")
    compressor = content.get("compressor")
    if compressor is not None and (
        not isinstance(compressor, dict) or compressor.get("id") != "blosc"
    ):
        raise ValueError(f"its compressor is {compressor!r:.80}, not blosc")
    element_bytes = _element_bytes(content.get("dtype"), _SEQAX_DTYPES)
    chunk_length = _length_in(content, "chunks", 1)
    chunk_bytes = chunk_length * element_bytes
    _check_limits(chunk_bytes, chunk_bytes)
    return ArrayLayout(
        folder=array,
        has_floats=False,
        length=_length_in(content, "shape", 0),
        chunk_length=chunk_length,
        file_length=chunk_length,
        chunk_bytes=0,  # compressed
        index_bytes=0,
        largest_file_bytes=2 * chunk_bytes + 1024,  # what does not compress grows by a little
    )


def check_files(layout: ArrayLayout) -> None:
    """Raises ValueError for a link, for files too large, or fewer or smaller than is claimed."""
    sizes = file_sizes(layout)
    for number in range(layout.files):  # ends at the first that is missing
        if str(number) not in sizes:
            raise ValueError(f"{layout.folder / str(number)} is missing")
        if sizes[str(number)] < layout.least_bytes(number):
            raise ValueError(f"{layout.folder / str(number)} is too short")


def check_claim(layout: ArrayLayout, sizes: Mapping[str, int]) -> None:
    """Raises ValueError if the array claims far more than its files, of `sizes`, could hold.

    Some may be lost or cut off, as where damage is to be listed file by file.
    """
    claimed = layout.files * layout.least_bytes(0) if layout.files else 0
    found = sum(sizes.values())
    if layout.files > _SHARE * len(sizes) + _FILES or claimed > _SHARE * found + _BYTES:
        raise ValueError(
            f"it claims {layout.files:,} files with {layout.length:,} elements, but has "
            f"{len(sizes):,} with {found:,} bytes"
        )


def file_sizes(layout: ArrayLayout) -> dict[str, int]:
    """Bytes of each file in the array's folder; raises ValueError for a link or one too large.

    A bucket does not tell them: each file that is there has what it should, until it is read.
    """
    if (url := url_of(layout.folder)) is not None:
        names = [name for name in BucketStore(url).list() if name.isdecimal()]
        return {name: layout.least_bytes(int(name)) for name in names}
    if not layout.folder.is_dir():
        return {}
    if layout.folder.is_symlink():
        raise ValueError(f"{layout.folder} is a link: put what it leads to in its place")
    sizes = {}
    with os.scandir(layout.folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise ValueError(f"{entry.path} is a link: put what it leads to in its place")
            sizes[entry.name] = entry.stat().st_size
            if sizes[entry.name] > layout.largest_file_bytes and entry.name.isdecimal():
                raise ValueError(f"{entry.path} has {sizes[entry.name]:,} bytes, too many")
    return sizes


def _description(array: Path, name: str) -> Mapping[str, Any]:
    for path in (array, array / name):
        if path.is_symlink():
            raise ValueError(f"{path} is a link: put what it leads to in its place")
    content = read_json(array / name, _LARGEST_DESCRIPTION)
    if not isinstance(content, dict):
        raise ValueError(f"{name} describes no array")
    return content


def _only_codec(codecs: Any, name: str) -> Mapping[str, Any]:
    match codecs:
        case [{"name": found, "configuration": dict() as configuration}] if found == name:
            return configuration
    raise ValueError(f"its codecs are not {name} alone")


def _element_bytes(found: Any, known: Mapping[str, int]) -> int:
    if not isinstance(found, str) or found not in known:
        raise ValueError(f"its elements are {found!r:.40}, not one of {', '.join(known)}")
    return known[found]


def _length_in(content: Any, name: str, least: int) -> int:
    match content:
        case {**entries} if isinstance(entries.get(name), list):
            match entries[name]:
                case [int(length)] if type(length) is int and least <= length < 2**62:
                    return length
    found = content.get(name) if isinstance(content, dict) else None
    raise ValueError(f"its {name} '{found!r:.80}' is not one length")


def _check_limits(chunk_bytes: int, file_bytes: int) -> None:
    if chunk_bytes > _LARGEST_CHUNK or file_bytes > _LARGEST_FILE:
        raise ValueError(f"it claims chunks of {chunk_bytes:,} bytes in files of {file_bytes:,}")
