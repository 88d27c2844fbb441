"""Files and chunks that are whole, but in the place of others."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr

from data_tools.inspect.verification import verify_split
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import DamagedDataError

DOCUMENTS = [[number] * (number % 7 + 9) for number in range(40)]
SHARDS = ["shard_00000_of_00002", "shard_00001_of_00002"]


@pytest.fixture
def split(tmp_path, write_documents):
    write_documents(tmp_path / "data", DOCUMENTS, shards=2)
    return tmp_path / "data" / "train"


@pytest.fixture
def other(tmp_path, write_documents):
    write_documents(tmp_path / "other", DOCUMENTS[::-1], shards=2, source={"dataset": "other"})
    return tmp_path / "other" / "train"


def exchange(one, other):
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def read_all(split):
    source = FlatTokens(str(split.parent), split.name, 2, 8)
    for step in range(source.steps_per_epoch):
        source.batch(step)


PARTS = ["tokens", "tokens/c/0", "document_starts/c/0", "metadata.json", "."]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("which", ["shard", "data set"])
def test_exchanged_parts_are_noticed_at_opening(split, other, part, which):
    place = split / SHARDS[1] if which == "shard" else other / SHARDS[0]
    exchange(split / SHARDS[0] / part, place / part)
    with pytest.raises(ValueError, match=r"damaged|different data sets"):
        FlatTokens(str(split.parent), "train", 2, 8)
    assert verify_split(split)


def test_chunks_exchanged_within_a_shard_are_never_trained_on(split):
    array = zarr.open_array(split / SHARDS[1] / "tokens")
    values = np.array(array[:])
    array[64:72], array[128:136] = values[128:136], values[64:72]  # with sound checksums
    with pytest.raises(DamagedDataError, match=r"chunk (8|16) is not the one that was"):
        read_all(split)
    assert [damage.path.name for damage in verify_split(split)] == ["2", "4"]


def test_a_later_file_of_another_shard_is_never_trained_on(split):
    exchange(split / SHARDS[0] / "tokens/c/3", split / SHARDS[1] / "tokens/c/3")
    with pytest.raises(DamagedDataError, match="not the one that was written there"):
        read_all(split)
    assert len(verify_split(split)) == 2


def test_any_path_of_a_sound_data_set_is_read(split, monkeypatch):
    home = split.parents[1]
    (home / "elsewhere" / "deep").mkdir(parents=True)
    (home / "link").symlink_to(split.parent)
    (home / "a[b] %20#?é").mkdir()
    shutil.copytree(split, home / "a[b] %20#?é" / "train")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "elsewhere" / "deep")
    expected = FlatTokens(str(split.parent), "train", 2, 8).batch(3).tokens
    for path in ("../../data", "~/data", "../../link", "./../deep/../../data/", "~/a[b] %20#?é"):
        assert np.array_equal(FlatTokens(path, "train", 2, 8).batch(3).tokens, expected), path
        assert verify_split(Path(os.path.expanduser(path)) / "train") == []


@pytest.mark.parametrize("name", ["a\\b", os.fsdecode(b"\xff"), "a.__lock"])
def test_a_path_that_tensorstore_cannot_open_is_refused_before_anything_is_made(
    tmp_path, write_documents, name
):
    with pytest.raises(ValueError, match=r"cannot hold a data set, since .*: rename it"):
        write_documents(tmp_path / name, DOCUMENTS)
    assert list(tmp_path.iterdir()) == []
