import json
from dataclasses import replace

import pytest
from forged_digests import sign
from refusals import refusals

from lmlib.data.stored.metadata import (
    ARRAYS,
    DamagedDataError,
    ShardMetadata,
    SplitMetadata,
    TokenizerIdentity,
    read_shard,
    read_split,
)

FIRST = ShardMetadata(
    shard=0,
    shards=2,
    content="text",
    tokens=5,
    documents=2,
    targets=3,
    bytes=30,
    gzip_bytes=20,
    skipped_rows=1,
    dropped_documents=1,
    dropped_tokens=50,
    cut_documents=2,
    cut_tokens=60,
    vocab_size=300,
    max_token_id=299,
    tokenizer=TokenizerIdentity("bytes", None),
    bos_id=0,
    eos_id=None,
    source={"datasets": ["a.jsonl"], "name": None},
    data_set="07" * 16,
    digests={name: "70" * 16 for name in ARRAYS},
)
SECOND = replace(FIRST, shard=1, tokens=7, documents=1, targets=6, bytes=10, max_token_id=8)


def write(folder, *shards):
    folders = [folder / shard.name for shard in shards]
    for place, shard in zip(folders, shards, strict=True):
        place.mkdir()
        shard.write(place)
    return folders


def test_a_split_sums_its_shards(tmp_path):
    (first, _) = write(tmp_path, FIRST, SECOND)
    assert read_shard(first) == FIRST
    assert [file.name for file in first.iterdir()] == ["metadata.json"]
    split = read_split(tmp_path)
    assert (split.tokens, split.documents, split.targets, split.bytes) == (12, 3, 9, 40)
    assert (split.gzip_bytes, split.skipped_rows, split.max_token_id) == (40, 2, 299)
    assert (split.dropped_documents, split.dropped_tokens) == (2, 100)
    assert (split.cut_documents, split.cut_tokens) == (4, 120)
    assert (split.vocab_size, split.source, split.shards) == (300, FIRST.source, (FIRST, SECOND))
    assert SplitMetadata.of((FIRST, replace(SECOND, gzip_bytes=None))).gzip_bytes is None


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no shards"):
        read_split(tmp_path)
    write(tmp_path, SECOND)
    (tmp_path / FIRST.name).mkdir()
    with pytest.raises(FileNotFoundError, match="unfinished: shard_00000_of_00002 of 2 shards"):
        read_split(tmp_path)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([replace(SECOND, vocab_size=301)], "vocab_size 301, but shard_00000_of_00002 has 300"),
        ([replace(SECOND, data_set="08" * 16)], r"has data_set .* are of different data sets"),
        ([SECOND, replace(FIRST, shards=3)], "splits into 2 and 3"),
    ],
)
def test_shards_that_do_not_belong_together_are_refused(tmp_path, others, message):
    write(tmp_path, FIRST, *others)
    with pytest.raises(ValueError, match=message):
        read_split(tmp_path)


@pytest.mark.parametrize("version", [3, 5, "4"])
def test_another_version_is_refused(tmp_path, version):
    (first,) = write(tmp_path, FIRST)
    file = first / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": version}))
    with pytest.raises(ValueError, match=f"version {version!r}, but this library reads"):
        read_shard(first)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metadata.json").write_text("{}")  # of version 1, of the whole split
    with pytest.raises(ValueError, match="version 1, but this library reads"):
        read_split(tmp_path / "old")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format": "lmlib flat tokens"}', "null"])
def test_damaged_metadata_names_the_file(tmp_path, content):
    (tmp_path / "metadata.json").write_text(content)
    with pytest.raises(DamagedDataError, match=r"metadata\.json is damaged"):
        read_shard(tmp_path)


@pytest.mark.parametrize(("entries", "message"), refusals(__file__, "metadata entries"))
def test_entries_that_make_no_sense_are_damage(tmp_path, entries, message):
    """`...` stands for an entry that is missing."""
    (first,) = write(tmp_path, FIRST)
    file = first / "metadata.json"
    content = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
    sign(first)
    with pytest.raises(DamagedDataError, match=f"is damaged .*{message}"):
        read_shard(first)


def test_any_flipped_bit_is_noticed(tmp_path):
    (first,) = write(tmp_path, FIRST)
    file = first / "metadata.json"
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 3):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=r"damaged|version"):
            read_shard(first)
