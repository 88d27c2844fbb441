"""Conversions between the two formats, against zarr and NumPy."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.convert import to_lmlib, to_seqax
from data_tools.tokenizer import load_tokenizer
from lmlib.data.stored.damage import DamagedDataError
from lmlib.data.stored.metadata import read_split
from lmlib.data.stored.shard_writer import ShardWriter

REPOSITORY = Path(__file__).parents[2]
SMALL = [[1, 2], [3, 4, 5], [6, 7, 8]]
DOCUMENTS = st.lists(st.lists(st.integers(1, 299), max_size=9), min_size=1, max_size=8)


def write_lmlib(
    path: Path, documents: Sequence[Sequence[int]], shards: int = 1, split: str = "train"
) -> None:
    """A split in very small pieces; shard i holds every shards-th document from number i on."""
    for shard in range(shards):
        writer = ShardWriter(
            path,
            split,
            shard=shard,
            shards=shards,
            vocab_size=302,
            file_length=32,
            chunk_length=8,
        )
        for document in documents[shard::shards]:
            writer.append(np.array(document, np.int64), text_bytes=5)
        writer.finish()


def write_seqax(path: Path, documents: Sequence[Sequence[int]], split: str = "train") -> None:
    group = zarr.open_group(path, mode="a", zarr_format=2).require_group(split)
    flat = list(itertools.chain(*documents))
    group.attrs["max_token_id"] = max(flat, default=0)
    encoded = [2 * t + (place == 0) for document in documents for place, t in enumerate(document)]
    starts = np.cumsum([0, *map(len, documents)])
    for name, dtype, values in (
        ("encoded_tokens", np.uint32, encoded),
        ("seq_starts", np.uint64, starts),
    ):
        array = group.create_array(name, shape=(len(values),), chunks=(4,), dtype=dtype)
        array[:] = np.array(values, dtype)


def stored_documents(path: Path, split: str = "train") -> list[list[int]]:
    """The documents of a split of one shard in this library's format, as zarr reads them."""
    shard = path / split / "shard_00000_of_00001"
    starts = zarr.open_array(shard / "document_starts", mode="r")[:].astype(np.int64)
    tokens = zarr.open_array(shard / "tokens", mode="r")[:]
    return [piece.tolist() for piece in np.split(tokens, starts[1:])]


def assert_holds(path: Path, documents: Sequence[Sequence[int]], split: str = "train") -> None:
    """As seqax's loader opens a data set, and what its format's description says of the values."""
    group = zarr.open_group(path, mode="r")[split]
    tokens, starts = group["encoded_tokens"], group["seq_starts"]
    assert (tokens.dtype, starts.dtype) == (np.uint32, np.uint64)
    bounds = np.cumsum([0, *map(len, documents)])
    np.testing.assert_array_equal(starts[:], bounds)
    assert tokens.shape == (bounds[-1],)
    for document, start, stop in zip(documents, bounds, bounds[1:], strict=False):
        expected = 2 * np.array(document) + (np.arange(len(document)) == 0)
        np.testing.assert_array_equal(tokens[start:stop], expected)
    assert group.attrs["max_token_id"] == max(itertools.chain(*documents), default=0)


def test_to_seqax_by_hand(tmp_path: Path) -> None:
    write_lmlib(tmp_path / "in", SMALL)
    (split,) = to_seqax(tmp_path / "in", tmp_path / "out")
    assert (split.folder, split.documents, split.tokens) == (tmp_path / "out/train", 3, 8)
    assert split.dropped_documents == 0
    group = zarr.open_group(tmp_path / "out", mode="r")["train"]
    assert group["encoded_tokens"][:].tolist() == [3, 4, 7, 8, 10, 13, 14, 16]
    assert group["seq_starts"][:].tolist() == [0, 2, 5, 8]
    assert group.attrs["max_token_id"] == 8


def test_to_lmlib_by_hand(tmp_path: Path) -> None:
    write_seqax(tmp_path / "in", SMALL)
    write_seqax(tmp_path / "in", [[9]], "validation")
    to_lmlib(tmp_path / "in", tmp_path / "out")
    metadata = read_split(tmp_path / "out/train")
    assert len(metadata.shards) == 1
    assert (metadata.documents, metadata.tokens, metadata.bytes) == (3, 8, 0)
    assert (metadata.vocab_size, metadata.max_token_id) == (10, 8)  # of both splits
    assert (metadata.bos_id, metadata.eos_id, metadata.tokenizer) == (None, None, None)
    assert metadata.source["path"] == str(tmp_path / "in")
    assert stored_documents(tmp_path / "out") == SMALL
    assert read_split(tmp_path / "out/validation").tokens == 1


@settings(max_examples=8)
@given(
    documents=DOCUMENTS,
    shards=st.integers(1, 3),
    chunks=st.sampled_from([(1, 1), (3, 2), (8, 5), (100, 100)]),
)
def test_round_trip_from_lmlib(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    shards: int,
    chunks: tuple[int, int],
) -> None:
    path = tmp_path_factory.mktemp("round_trip")
    write_lmlib(path / "in", documents, shards)
    in_order = [each for shard in range(shards) for each in documents[shard::shards]]
    kept = [document for document in in_order if document]
    (split,) = to_seqax(
        path / "in",
        path / "out",
        tokens_chunk_length=chunks[0],
        starts_chunk_length=chunks[1],
    )
    assert split.dropped_documents == len(documents) - len(kept)
    assert_holds(path / "out", kept)
    if sum(map(len, kept)) > 1:
        to_lmlib(path / "out", path / "again", file_length=16, block_length=chunks[0])
        assert stored_documents(path / "again") == kept


@pytest.mark.slow
@settings(max_examples=8)
@given(documents=DOCUMENTS, block_length=st.integers(1, 20))
def test_round_trip_from_seqax(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], block_length: int
) -> None:
    path = tmp_path_factory.mktemp("round_trip")
    write_seqax(path / "in", documents)
    kept = [document for document in documents if document]
    (split,) = to_lmlib(path / "in", path / "out", file_length=16, block_length=block_length)
    assert (split.documents, split.dropped_documents) == (len(kept), len(documents) - len(kept))
    to_seqax(path / "out", path / "again")
    assert_holds(path / "again", kept)


def test_framing_stays_as_ids(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "in", "train", vocab_size=258, bos_id=256, eos_id=257)
    writer.append(np.array([104, 105]), text_bytes=2)
    writer.append(np.array([], np.int64), text_bytes=0)
    writer.finish()
    to_seqax(tmp_path / "in", tmp_path / "out")
    assert_holds(tmp_path / "out", [[256, 104, 105, 257], [256, 257]])


def test_a_tokenizer_can_be_recorded(tmp_path: Path) -> None:
    write_seqax(tmp_path / "in", [[256, 104, 105]])
    tokenizer = load_tokenizer("bytes")
    recorded = {"tokenizer": tokenizer.identity, "tokenizer_json": tokenizer.tokenizer_json}
    to_lmlib(tmp_path / "in", tmp_path / "out", vocab_size=258, **recorded)
    metadata = read_split(tmp_path / "out/train")
    assert (metadata.tokenizer, metadata.vocab_size) == (tokenizer.identity, 258)
    with pytest.raises(ValueError, match="ids up to 256, but the tokenizer's end at 255"):
        to_lmlib(tmp_path / "in", tmp_path / "other", vocab_size=256, **recorded)


class Killed(BaseException):
    """What a test ends a conversion with."""


def killed_after(calls: int):
    remaining = itertools.count(calls, -1)

    def progress(done: int, total: int, unit: str) -> None:
        if next(remaining) <= 1:
            raise Killed

    return progress


@pytest.mark.parametrize("calls", [1, 3, 6])
def test_a_killed_conversion_to_lmlib_goes_on(tmp_path: Path, calls: int) -> None:
    documents = [[number] * 5 for number in range(1, 20)]
    for split in ("train", "validation"):
        write_seqax(tmp_path / "in", documents, split)
    lengths = {"file_length": 16, "block_length": 30}
    with pytest.raises(Killed):
        to_lmlib(tmp_path / "in", tmp_path / "out", progress=killed_after(calls), **lengths)
    with pytest.raises(FileNotFoundError):
        read_split(tmp_path / "out/validation")
    to_lmlib(tmp_path / "in", tmp_path / "out", **lengths)
    for split in ("train", "validation"):
        assert stored_documents(tmp_path / "out", split) == documents
    with pytest.raises(FileExistsError, match="exists already"):
        to_lmlib(tmp_path / "in", tmp_path / "out", **lengths)


def test_conversations_cannot_be_seqaxs(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "in", "train", content="conversations", vocab_size=9)
    writer.extend(np.arange(3), np.array([3]), 0, loss_mask=np.arange(3) > 1)
    writer.finish()
    with pytest.raises(ValueError, match="holds conversations, and seqax's format has no loss"):
        to_seqax(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_stopped_conversion_to_seqax_leaves_nothing(tmp_path: Path) -> None:
    write_lmlib(tmp_path / "in", SMALL)
    with pytest.raises(Killed):
        to_seqax(tmp_path / "in", tmp_path / "out", progress=killed_after(1))
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]

    (tmp_path / "out.unfinished").mkdir()  # what a kill leaves that no program can catch
    with pytest.raises(FileExistsError, match=r"out\.unfinished .* delete it"):
        to_seqax(tmp_path / "in", tmp_path / "out")


def test_an_existing_folder_is_never_touched(tmp_path: Path) -> None:
    write_lmlib(tmp_path / "lmlib", SMALL)
    write_seqax(tmp_path / "seqax", SMALL)
    out = tmp_path / "out"
    out.mkdir()
    (out / "diary.txt").write_text("mine")
    for convert, source in ((to_seqax, "lmlib"), (to_lmlib, "seqax")):
        with pytest.raises(FileExistsError, match="out exists already"):
            convert(tmp_path / source, out)
    assert [entry.name for entry in out.iterdir()] == ["diary.txt"]


def test_damage_is_named(tmp_path: Path) -> None:
    write_seqax(tmp_path / "in", SMALL)
    (tmp_path / "in/train/encoded_tokens/1").unlink()
    with pytest.raises(DamagedDataError, match="encoded_tokens/1"):
        to_lmlib(tmp_path / "in", tmp_path / "out")

    write_seqax(tmp_path / "other", [[1, 2], [3]])
    tokens = zarr.open_group(tmp_path / "other")["train"]["encoded_tokens"]
    tokens[0] = 2
    with pytest.raises(DamagedDataError, match="train begins in the middle of a document"):
        to_lmlib(tmp_path / "other", tmp_path / "out2")


def test_the_wrong_source_is_refused(tmp_path: Path) -> None:
    write_lmlib(tmp_path / "lmlib", SMALL)
    with pytest.raises(ValueError, match="no split in seqax's format"):
        to_lmlib(tmp_path / "lmlib", tmp_path / "out")
    write_seqax(tmp_path / "seqax", SMALL)
    with pytest.raises(ValueError, match="in seqax's format already"):
        to_seqax(tmp_path / "seqax", tmp_path / "out")
    with pytest.raises(ValueError, match="is a split: give the data set"):
        to_seqax(tmp_path / "lmlib/train", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        to_seqax(tmp_path / "nothing", tmp_path / "out")


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    write_seqax(tmp_path / "in", [[1, 2], [], [3]])

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "data_tools.convert", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )

    done = run("--to=lmlib", "in", "out")
    assert done.returncode == 0, done.stderr
    kept, dropped = "2 documents, 3 tokens", "documents without tokens that were dropped: 1"
    assert done.stdout == f"{tmp_path}/out/train: {kept}; {dropped}\n"
    again = run("--to=lmlib", "in", "out")
    assert again.returncode == 2
    assert again.stderr == f"convert: {tmp_path}/out exists already: choose another folder\n"
    content = json.loads((tmp_path / "out/train/shard_00000_of_00001/metadata.json").read_text())
    assert content["source"]["path"] == str(tmp_path / "in")
    wrong = run("--to=zarr", "in", "new")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "convert: flag --to=zarr: value should be one of <lmlib|seqax>\n"
