import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlib.data import FlatTokensWriter, TokenizerIdentity, read_metadata

IDS = st.integers(0, 299) | st.just(0)  # zeros, the fill value, come often


def stored(path: Path) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return ts.open(spec | {"fill_missing_data_reads": False}).result().read().result()


@settings(deadline=None, max_examples=40)
@given(
    documents=st.lists(st.lists(IDS, max_size=70), min_size=1, max_size=12),
    bos_id=st.none() | st.just(0),
    eos_id=st.none() | st.just(1),
    max_shard_tokens=st.integers(1, 100),
    chunk_length=st.integers(1, 9),
    chunks_per_file=st.integers(1, 4),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    bos_id: int | None,
    eos_id: int | None,
    max_shard_tokens: int,
    chunk_length: int,
    chunks_per_file: int,
) -> None:
    path = tmp_path_factory.mktemp("round_trip")
    writer = FlatTokensWriter(
        path,
        "train",
        vocab_size=300,
        bos_id=bos_id,
        eos_id=eos_id,
        max_shard_tokens=max_shard_tokens,
        chunk_length=chunk_length,
        file_length=chunk_length * chunks_per_file,
    )
    for document in documents:
        writer.append(np.array(document, np.int64), len(document), 1)
    prefix = [] if bos_id is None else [bos_id]
    suffix = [] if eos_id is None else [eos_id]
    framed = [prefix + document + suffix for document in documents]
    total = sum(map(len, framed))
    assert (writer.tokens, writer.documents) == (total, len(documents))
    if total == 0:
        with pytest.raises(ValueError, match="held no tokens"):
            writer.finish()
        assert not (path / "train" / "metadata.json").exists()
        return

    metadata = writer.finish()
    assert read_metadata(path / "train") == metadata
    assert (metadata.tokens, metadata.documents) == (total, len(documents))
    assert metadata.bytes == sum(map(len, documents))
    assert metadata.gzip_bytes == len(documents)
    assert metadata.max_token_id == max(max(document) for document in framed if document)

    found = []
    for shard in metadata.shards:
        folder = path / "train" / shard.name
        tokens, starts = stored(folder / "tokens"), stored(folder / "document_starts")
        assert (tokens.dtype, starts.dtype) == (np.uint16, np.uint64)
        assert (len(tokens), len(starts)) == (shard.tokens, shard.documents)
        in_shard = [part.tolist() for part in np.split(tokens, starts[1:].astype(int))]
        assert starts[0] == 0
        # Every document but the last began before the shard was full.
        assert sum(map(len, in_shard[:-1])) < max_shard_tokens
        found += in_shard
    assert found == framed


def test_files_are_zarr_3_with_checksums(tmp_path: Path, write_documents: Callable) -> None:
    write_documents(tmp_path, [[1, 2, 3]] * 30)
    folder = tmp_path / "train" / "shard_00000" / "tokens"
    array = json.loads((folder / "zarr.json").read_text())
    assert (array["zarr_format"], array["node_type"], array["shape"]) == (3, "array", [90])
    assert array["chunk_grid"]["configuration"]["chunk_shape"] == [32]
    (codec,) = array["codecs"]
    assert codec["name"] == "sharding_indexed"
    assert codec["configuration"]["chunk_shape"] == [8]
    for part in ("codecs", "index_codecs"):
        assert [inner["name"] for inner in codec["configuration"][part]] == ["bytes", "crc32c"]
    assert sorted(file.name for file in (folder / "c").iterdir()) == ["0", "1", "2"]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_width_of_a_token(
    tmp_path: Path, write_documents: Callable, vocab_size: int, dtype: type
) -> None:
    write_documents(tmp_path, [[0, vocab_size - 1]], vocab_size=vocab_size)
    tokens = stored(tmp_path / "train" / "shard_00000" / "tokens")
    assert tokens.dtype == dtype
    assert tokens.tolist() == [0, vocab_size - 1]


@pytest.mark.parametrize("bad", [-1, 300])
def test_token_outside_the_vocabulary(tmp_path: Path, bad: int) -> None:
    writer = FlatTokensWriter(tmp_path, "train", vocab_size=300)
    writer.append(np.array([5]), 1)
    with pytest.raises(ValueError, match="document 1 has token ids"):
        writer.append(np.array([3, bad]), 2)


def test_gzip_bytes_are_unknown_unless_all_are_known(tmp_path: Path) -> None:
    writer = FlatTokensWriter(tmp_path, "train", vocab_size=300)
    for gzip_bytes in (3, None, 4):
        writer.append(np.array([5]), 1, gzip_bytes)
    assert writer.finish().gzip_bytes is None


def test_a_finished_split_is_never_overwritten(tmp_path: Path, write_documents: Callable) -> None:
    write_documents(tmp_path, [[1, 2]])
    with pytest.raises(FileExistsError, match="already finished"):
        write_documents(tmp_path, [[3, 4]])
    assert stored(tmp_path / "train" / "shard_00000" / "tokens").tolist() == [1, 2]


def test_an_unfinished_split_is_replaced(tmp_path: Path, write_documents: Callable) -> None:
    abandoned = FlatTokensWriter(
        tmp_path, "train", vocab_size=300, max_shard_tokens=2, file_length=2, chunk_length=2
    )
    for _ in range(5):
        abandoned.append(np.array([7, 8, 9]), 1)
    write_documents(tmp_path, [[1, 2]])
    assert [shard.name for shard in read_metadata(tmp_path / "train").shards] == ["shard_00000"]
    names = sorted(entry.name for entry in (tmp_path / "train").iterdir())
    assert names == ["metadata.json", "shard_00000"]


def test_foreign_files_are_never_deleted(tmp_path: Path, write_documents: Callable) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "thesis.txt").write_text("ten years of work")
    with pytest.raises(FileExistsError, match=r"thesis\.txt"):
        write_documents(tmp_path, [[1, 2]])
    assert (tmp_path / "train" / "thesis.txt").exists()


def test_splits_share_one_tokenizer(tmp_path: Path) -> None:
    def write(split: str, tokenizer: TokenizerIdentity | None) -> None:
        writer = FlatTokensWriter(tmp_path, split, vocab_size=300, tokenizer=tokenizer)
        writer.append(np.array([1, 2]), 2)
        writer.finish()

    write("train", TokenizerIdentity("bytes", None))
    write("validation", TokenizerIdentity("bytes", None))
    for other in (None, TokenizerIdentity("other", "00")):
        with pytest.raises(ValueError, match="share one tokenizer"):
            write("test", other)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"bos_id": 300}, "bos_id 300"),
        ({"eos_id": -1}, "eos_id -1"),
        ({"chunk_length": 7}, "multiple of chunk_length"),
        ({"max_shard_tokens": 0}, "max_shard_tokens"),
        ({"split": "../elsewhere"}, "plain folder name"),
    ],
)
def test_settings_that_make_no_sense(
    tmp_path: Path, write_documents: Callable, setting: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_documents(tmp_path, [[1, 2]], **setting)
