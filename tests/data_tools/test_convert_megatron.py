"""Conversions of Megatron's indexed data sets, against files of Megatron-Core and NumPy."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import write_megatron

from data_tools.convert.megatron import MegatronSplit, megatron_prefix
from data_tools.convert.to_lmlib import seqax_splits, to_lmlib
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import DamagedDataError, read_split

REPOSITORY = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "megatron"
DOCUMENTS = [[5, 6, 7, 0], [65_000, 1, 0], [0]]  # and one without tokens


def convert(prefix, out, **settings):
    splits = {"train": MegatronSplit(prefix)}
    return to_lmlib(splits, prefix, out, converted_from="Megatron indexed data set", **settings)


def stored_documents(path):
    shard = path / "train" / "shard_00000_of_00001"
    starts = zarr.open_array(shard / "document_starts", mode="r")[:].astype(np.int64)
    tokens = zarr.open_array(shard / "tokens", mode="r")[:]
    return [piece.tolist() for piece in np.split(tokens, starts[1:])]


@pytest.mark.landing
def test_files_of_megatron_by_the_command(tmp_path):
    command = [sys.executable, "-m", "data_tools.convert", f"{GOLDEN}.bin", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(
        "3 documents, 8 tokens; documents without tokens that were dropped: 1\n"
    )
    assert stored_documents(tmp_path / "out") == DOCUMENTS
    metadata = read_split(tmp_path / "out/train")
    assert (metadata.vocab_size, metadata.source["path"]) == (65_001, str(GOLDEN))
    batch = FlatTokens(str(tmp_path / "out"), "train", batch_size=1, sequence_length=3).batch(0)
    assert batch.tokens.shape == (1, 3)


def test_a_second_split_joins_the_first(tmp_path):
    write_megatron(tmp_path / "a", [[[1, 2]]])
    convert(tmp_path / "a", tmp_path / "out")
    splits = {"validation": MegatronSplit(tmp_path / "a")}
    to_lmlib(splits, tmp_path / "a", tmp_path / "out", converted_from="a test")
    assert read_split(tmp_path / "out/validation").tokens == 2
    for split in ("train", "validation"):
        with pytest.raises(FileExistsError, match="out exists already: choose another folder"):
            to_lmlib(
                {split: splits["validation"]}, tmp_path / "a", tmp_path / "out", converted_from=""
            )
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="out exists already: choose another folder"):
        to_lmlib(
            {"test": splits["validation"]}, tmp_path / "a", tmp_path / "out", converted_from=""
        )


@settings(max_examples=20, deadline=None)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=3), max_size=6),
    dtype=st.sampled_from(["u1", "i1", "<i2", "<i4", "<i8", "<u2"]),
    block_length=st.integers(1, 9),
)
def test_any_documents(tmp_path_factory, documents, dtype, block_length):
    path = tmp_path_factory.mktemp("converted")
    write_megatron(path / "in", documents, dtype)
    joined = [list(itertools.chain(*document)) for document in documents]
    kept = [document for document in joined if document]
    ((made, dropped),) = convert(
        path / "in", path / "out", file_length=16, block_length=block_length
    ).values()
    assert (made.documents, dropped) == (len(kept), len(documents) - len(kept))
    assert stored_documents(path / "out") == (kept or [[]])


def test_a_prefix_may_have_dots_and_one_of_the_suffixes(tmp_path):
    write_megatron(tmp_path / "v1", [])
    for suffix in (".bin", ".idx"):
        (tmp_path / f"v1{suffix}").rename(tmp_path / f"v1.2_text{suffix}")
    for name in ("v1.2_text", "v1.2_text.bin", "v1.2_text.idx"):
        assert megatron_prefix(tmp_path / name) == tmp_path / "v1.2_text"
    assert megatron_prefix(tmp_path / "v1") is None


def test_damaged_files_are_named(tmp_path):
    prefix = tmp_path / "data"
    write_megatron(prefix, [[[1, 2], [3]], [[4]]])
    index, tokens = (prefix.with_suffix(suffix).read_bytes() for suffix in (".idx", ".bin"))
    for stop in range(len(index)):
        prefix.with_suffix(".idx").write_bytes(index[:stop])
        with pytest.raises(DamagedDataError, match=r"data\.idx (is truncated|does not begin)"):
            MegatronSplit(prefix)
    for entry in range(9, 12):  # the pointers and firsts, from byte 46 on
        changed = bytearray(index)
        changed[46 + 8 * (entry - 9)] += 1
        prefix.with_suffix(".idx").write_bytes(changed)
        with pytest.raises(DamagedDataError, match=r"data\.idx is damaged"):
            MegatronSplit(prefix)
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(tokens[:-1])
    with pytest.raises(
        DamagedDataError, match=r"data\.bin has 15 bytes, and data\.idx promises 16"
    ):
        MegatronSplit(prefix)


@pytest.mark.parametrize(
    ("dtype", "token", "message"),
    [
        ("<f4", 1, "tokens of type 7: only"),
        ("<i4", -1, "ids outside"),
        ("<i8", 2**31, "ids outside"),
    ],
)
def test_numbers_that_are_not_tokens_are_refused(tmp_path, dtype, token, message):
    write_megatron(tmp_path / "data", [[[token]]], dtype)
    with pytest.raises(ValueError, match=message):
        MegatronSplit(tmp_path / "data")


def test_a_source_that_is_missing_is_named_in_both_forms(tmp_path):
    (tmp_path / "half.bin").touch()
    for name in ("half", "half.bin", "half.idx"):
        with pytest.raises(
            FileNotFoundError, match=r"nor both files .*/half\.bin and .*/half\.idx"
        ):
            seqax_splits(tmp_path / name)
