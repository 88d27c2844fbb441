"""From this library's flat tokens to seqax's."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tensorstore as ts

from data_tools.command_line import Progress, no_progress
from data_tools.convert.to_lmlib import ConvertedSplit
from data_tools.inspect.description import blocks, split_folders
from lmlib.data.stored.data_path import data_path, file_store
from lmlib.data.stored.seqax import ATTRIBUTES, STARTS, TOKENS, is_seqax_split
from lmlib.data.stored.split import StoredSplit
from lmlib.data.stored.token_arrays import append

TOKENS_CHUNK_LENGTH = 4 * 1024 * 1024  # as in seqax's own data sets
STARTS_CHUNK_LENGTH = 64 * 1024
# As seqax writes it; bits are shuffled since ids need only some of theirs.
_COMPRESSOR = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 2, "blocksize": 0}


def to_seqax(
    source: Path,
    out: Path,
    *,
    progress: Progress = no_progress,
    tokens_chunk_length: int = TOKENS_CHUNK_LENGTH,
    starts_chunk_length: int = STARTS_CHUNK_LENGTH,
) -> list[ConvertedSplit]:
    """Writes the splits of the data set `source` in seqax's format to `out`, a new folder.

    Framing tokens stay as ids like any other; seqax adds none, and begins each document's inputs
    with the id 0 instead. seqax cannot mark a document without tokens: those are dropped and
    counted. Tokenizer and source are not kept; seqax has no place for them. `out` appears under its
    name when it is complete; memory holds two chunks.

    Raises FileExistsError if `out`, or what a killed conversion to it has left, exists;
    FileNotFoundError if `source` is not there or unfinished; ValueError if it is no data set;
    DamagedDataError if it cannot be read.
    """
    source, out = data_path(source), data_path(out)
    folders = split_folders(source)
    if folders == [source]:
        raise ValueError(f"{source} is a split: give the data set, {source.parent}")
    if any(map(is_seqax_split, folders)):
        raise ValueError(f"{source} is in seqax's format already")
    splits = {folder.name: StoredSplit(folder) for folder in folders}
    for name, split in splits.items():
        if split.metadata.content != "text":
            raise ValueError(
                f"the split {name!r} of {source} holds {split.metadata.content}, and seqax's "
                "format has no loss mask: only text can be converted"
            )
    if out.exists():
        raise FileExistsError(f"{out} exists already: choose another folder")
    unfinished = out.with_name(f"{out.name}.unfinished")
    if unfinished.exists():
        raise FileExistsError(
            f"{unfinished} is what another conversion is writing, or has left when it was killed: "
            "delete it if none is running"
        )
    unfinished.mkdir(parents=True)
    try:
        _write_json(unfinished / ".zgroup", {"zarr_format": 2})
        dropped = {}
        for name, split in splits.items():
            dropped[name] = _write(
                split, unfinished / name, progress, tokens_chunk_length, starts_chunk_length
            )
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    return [
        ConvertedSplit(out / name, split.documents - dropped[name], split.tokens, dropped[name])
        for name, split in splits.items()
    ]


def _write(
    split: StoredSplit,
    folder: Path,
    progress: Progress,
    tokens_chunk_length: int,
    starts_chunk_length: int,
) -> int:
    """Writes one split; returns how many documents were dropped."""
    folder.mkdir()
    _write_json(folder / ".zgroup", {"zarr_format": 2})
    _write_json(folder / ATTRIBUTES, {"max_token_id": max(split.metadata.max_token_id, 0)})
    encoded = _create(folder / TOKENS, np.uint32, tokens_chunk_length)
    starts = _create(folder / STARTS, np.uint64, starts_chunk_length)

    def document_starts() -> Iterator[np.ndarray]:
        nonlocal encoded
        done = 0
        for tokens, begins in blocks(split, length=tokens_chunk_length):
            encoded = append(folder / TOKENS, encoded, 2 * tokens.astype(np.uint32) + begins)
            yield np.flatnonzero(begins) + done
            done += len(tokens)
            progress(done, split.tokens, "tokens")
        yield np.array([split.tokens])  # the end of the last document

    for chunk in _in_chunks(document_starts(), starts_chunk_length):
        starts = append(folder / STARTS, starts, chunk.astype(np.uint64))
    return split.documents - (starts.shape[0] - 1)


def _in_chunks(pieces: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """The same values, `length` at a time, and the rest at the end."""
    waiting, count = [np.zeros(0, np.int64)], 0
    for piece in pieces:
        waiting.append(piece)
        count += len(piece)
        if count >= length:
            together = np.concatenate(waiting)
            whole = count - count % length
            yield from np.split(together[:whole], whole // length)
            waiting, count = [together[whole:]], count - whole
    if count:
        yield np.concatenate(waiting)


def _create(path: Path, dtype: type[np.unsignedinteger], chunk_length: int) -> ts.TensorStore:
    """An empty zarr v2 array. Without a filter, which seqax uses for starts, all zarr can read."""
    metadata = {
        "shape": [0],
        "chunks": [chunk_length],
        "dtype": np.dtype(dtype).newbyteorder("<").str,
        "compressor": _COMPRESSOR,
        "fill_value": None,
        "filters": None,
        "order": "C",
    }
    spec = {
        "driver": "zarr",
        "kvstore": file_store(path),
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, create=True).result()


def _write_json(file: Path, content: dict[str, int]) -> None:
    file.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")
