"""Conversions from seqax's format, against zarr and NumPy."""

import itertools
import json

import numpy as np
import pytest
import zarr
from forked_processes import run_forked
from hypothesis import given, settings
from hypothesis import strategies as st
from seqax_data import write_seqax

from data_tools.convert.to_lmlib import seqax_splits, to_lmlib
from data_tools.tokenizer import load_tokenizer
from lmlib.data.stored.metadata import DamagedDataError, read_split

SMALL = [[1, 2], [3, 4, 5], [6, 7, 8]]
DOCUMENTS = st.lists(st.lists(st.integers(0, 299), max_size=9), min_size=1, max_size=8)


def convert(source, out, **settings):
    splits = seqax_splits(source)
    return to_lmlib(splits, source, out, converted_from="seqax flat tokens", **settings)


def stored_documents(path, split="train"):
    """The documents of a split of one shard in this library's format, as zarr reads them."""
    shard = path / split / "shard_00000_of_00001"
    starts = zarr.open_array(shard / "document_starts", mode="r")[:].astype(np.int64)
    tokens = zarr.open_array(shard / "tokens", mode="r")[:]
    return [piece.tolist() for piece in np.split(tokens, starts[1:])]


def test_to_lmlib_by_hand(tmp_path):
    write_seqax(tmp_path / "in", SMALL)
    write_seqax(tmp_path / "in", [[9]], "validation")
    convert(tmp_path / "in", tmp_path / "out")
    metadata = read_split(tmp_path / "out/train")
    assert len(metadata.shards) == 1
    assert (metadata.documents, metadata.tokens, metadata.bytes) == (3, 8, 0)
    assert (metadata.vocab_size, metadata.max_token_id) == (10, 8)  # of both splits
    assert (metadata.bos_id, metadata.eos_id, metadata.tokenizer) == (None, None, None)
    assert metadata.source["path"] == str(tmp_path / "in")
    assert stored_documents(tmp_path / "out") == SMALL
    assert read_split(tmp_path / "out/validation").tokens == 1


@settings(max_examples=8)
@given(documents=DOCUMENTS, block_length=st.integers(1, 20))
def test_any_documents(tmp_path_factory, documents, block_length):
    path = tmp_path_factory.mktemp("converted")
    write_seqax(path / "in", documents)
    kept = [document for document in documents if document]
    ((made, dropped),) = convert(
        path / "in", path / "out", file_length=16, block_length=block_length
    ).values()
    assert (made.documents, dropped) == (len(kept), len(documents) - len(kept))
    assert stored_documents(path / "out") == (kept or [[]])


def test_a_tokenizer_can_be_recorded(tmp_path):
    write_seqax(tmp_path / "in", [[256, 104, 105]])
    tokenizer = load_tokenizer("bytes")
    convert(tmp_path / "in", tmp_path / "out", tokenizer=tokenizer)
    metadata = read_split(tmp_path / "out/train")
    assert (metadata.tokenizer, metadata.vocab_size) == (tokenizer.identity, 258)
    write_seqax(tmp_path / "others", [[258]])
    with pytest.raises(ValueError, match="ids up to 258, but the tokenizer's end at 257"):
        convert(tmp_path / "others", tmp_path / "new", tokenizer=tokenizer)


class Killed(BaseException):
    """Ends a conversion in a test."""


def killed_after(calls):
    remaining = itertools.count(calls, -1)

    def progress(counts, fraction):
        if next(remaining) <= 1:
            raise Killed

    return progress


@pytest.mark.parametrize("calls", [1, 3, 6])
def test_a_killed_conversion_to_lmlib_goes_on(tmp_path, calls):
    documents = [[number] * 5 for number in range(1, 20)]
    for split in ("train", "validation"):
        write_seqax(tmp_path / "in", documents, split)
    lengths = {"file_length": 16, "block_length": 30}
    with pytest.raises(Killed):
        convert(tmp_path / "in", tmp_path / "out", progress=killed_after(calls), **lengths)
    with pytest.raises(FileNotFoundError):
        read_split(tmp_path / "out/validation")
    convert(tmp_path / "in", tmp_path / "out", **lengths)
    for split in ("train", "validation"):
        assert stored_documents(tmp_path / "out", split) == documents
    with pytest.raises(FileExistsError, match="exists already"):
        convert(tmp_path / "in", tmp_path / "out", **lengths)


def test_an_existing_folder_is_never_touched(tmp_path):
    write_seqax(tmp_path / "in", SMALL)
    out = tmp_path / "out"
    out.mkdir()
    (out / "diary.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="out exists already"):
        convert(tmp_path / "in", out)
    assert [entry.name for entry in out.iterdir()] == ["diary.txt"]


def test_damage_is_named(tmp_path):
    write_seqax(tmp_path / "in", SMALL)
    (tmp_path / "in/train/encoded_tokens/1").unlink()
    with pytest.raises(DamagedDataError, match="encoded_tokens/1"):
        convert(tmp_path / "in", tmp_path / "out")

    write_seqax(tmp_path / "other", [[1, 2], [3]])
    tokens = zarr.open_group(tmp_path / "other")["train"]["encoded_tokens"]
    tokens[0] = 2
    with pytest.raises(DamagedDataError, match="train begins in the middle of a document"):
        convert(tmp_path / "other", tmp_path / "out2")


@pytest.mark.slow
def test_the_command(tmp_path):
    write_seqax(tmp_path / "in", [[1, 2], [], [3]])

    def run(*arguments):
        return run_forked("-m", "data_tools.convert", *arguments, cwd=tmp_path)

    done = run("in", "out")
    assert (done.returncode, done.stderr) == (0, "")
    kept, dropped = "2 documents, 3 tokens", "documents without tokens that were dropped: 1"
    assert done.stdout == f"{tmp_path}/out/train: {kept}; {dropped}\n"
    content = json.loads((tmp_path / "out/train/shard_00000_of_00001/metadata.json").read_text())
    assert content["source"]["path"] == str(tmp_path / "in")
    assert run("in", "named", "--tokenizer=bytes").returncode == 0
    assert read_split(tmp_path / "named/train").tokenizer == load_tokenizer("bytes").identity
