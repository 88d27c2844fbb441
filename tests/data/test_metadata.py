import json
from dataclasses import replace
from pathlib import Path

import pytest
from forged_digests import sign

from lmlib.data.stored.metadata import (
    ARRAYS,
    ShardMetadata,
    SplitMetadata,
    TokenizerIdentity,
    arrays_of,
    read_shard,
    read_split,
    tokenizers_differ,
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


def write(folder: Path, *shards: ShardMetadata) -> list[Path]:
    folders = [folder / shard.name for shard in shards]
    for place, shard in zip(folders, shards, strict=True):
        place.mkdir()
        shard.write(place)
    return folders


def test_round_trip(tmp_path: Path) -> None:
    (first, _) = write(tmp_path, FIRST, SECOND)
    assert read_shard(first) == FIRST
    assert [file.name for file in first.iterdir()] == ["metadata.json"]
    assert read_split(tmp_path) == SplitMetadata((FIRST, SECOND))


def test_a_split_sums_its_shards() -> None:
    split = SplitMetadata((FIRST, SECOND))
    assert (split.tokens, split.documents, split.targets, split.bytes) == (12, 3, 9, 40)
    assert (split.gzip_bytes, split.skipped_rows, split.max_token_id) == (40, 2, 299)
    assert (split.dropped_documents, split.dropped_tokens) == (2, 100)
    assert (split.cut_documents, split.cut_tokens) == (4, 120)
    assert SplitMetadata((FIRST, replace(SECOND, gzip_bytes=None))).gzip_bytes is None


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no shard"):
        read_split(tmp_path)
    write(tmp_path, SECOND)
    with pytest.raises(FileNotFoundError, match="unfinished: shard_00000_of_00002 of 2 shards"):
        read_split(tmp_path)
    (tmp_path / FIRST.name).mkdir()
    with pytest.raises(FileNotFoundError, match="unfinished: shard_00000_of_00002"):
        read_split(tmp_path)


def test_shards_of_different_data_sets_are_refused(tmp_path: Path) -> None:
    write(tmp_path, FIRST, replace(SECOND, vocab_size=301))
    with pytest.raises(ValueError, match="vocab_size 301, but shard_00000_of_00002 has 300"):
        read_split(tmp_path)


def test_shards_of_two_preparations_are_refused(tmp_path: Path) -> None:
    write(tmp_path, FIRST, replace(SECOND, data_set="08" * 16))
    with pytest.raises(ValueError, match=r"has data_set .* are of different data sets"):
        read_split(tmp_path)


def test_shards_of_two_cuts_are_refused(tmp_path: Path) -> None:
    write(tmp_path, FIRST, SECOND, replace(FIRST, shards=3))
    with pytest.raises(ValueError, match="splits into 2 and 3"):
        read_split(tmp_path)


def test_a_renamed_shard_is_refused(tmp_path: Path) -> None:
    (first,) = write(tmp_path, FIRST)
    first.rename(tmp_path / SECOND.name)
    with pytest.raises(ValueError, match="it is of shard 0 of 2"):
        read_shard(tmp_path / SECOND.name)


@pytest.mark.parametrize("version", [0, 1, 2, 3, 5, "4"])
def test_another_version_is_refused(tmp_path: Path, version: object) -> None:
    (first,) = write(tmp_path, FIRST)
    file = first / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": version}))
    with pytest.raises(ValueError, match=f"version {version!r}, but this library reads"):
        read_shard(first)


def test_a_split_of_version_1_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text("{}")
    with pytest.raises(ValueError, match="version 1, but this library reads"):
        read_split(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format": "lmlib flat tokens"}', "null"])
def test_damaged_metadata_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "metadata.json").write_text(content)
    with pytest.raises(ValueError, match=r"metadata\.json is damaged"):
        read_shard(tmp_path)


def test_missing_and_unknown_entries_are_damage(tmp_path: Path) -> None:
    (first,) = write(tmp_path, FIRST)
    file = first / "metadata.json"
    whole = json.loads(file.read_text())
    for changed in ({k: v for k, v in whole.items() if k != "tokens"}, whole | {"extra": 1}):
        file.write_text(json.dumps(changed))
        sign(first)
        with pytest.raises(ValueError, match=r"damaged .*TypeError"):
            read_shard(first)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("content", "poems", "content.*poems"),
        ("content", "conversations", "its digests are"),
        ("dropped_tokens", -1, "its dropped_tokens is -1"),
        ("cut_documents", None, "cut_documents.*None"),
    ],
)
def test_entries_that_make_no_sense_are_damage(
    tmp_path: Path, entry: str, value: object, message: str
) -> None:
    (first,) = write(tmp_path, FIRST)
    file = first / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {entry: value}))
    sign(first)
    with pytest.raises(ValueError, match=f"is damaged .*{message}"):
        read_shard(first)


def test_pairs_are_two_by_two(tmp_path: Path) -> None:
    digests = {name: "70" * 16 for name in arrays_of("pairs")}
    odd = replace(FIRST, shards=1, documents=3, content="pairs", digests=digests)
    (only,) = write(tmp_path, odd)
    with pytest.raises(ValueError, match="its 3 documents are no pairs"):
        read_shard(only)


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    (first,) = write(tmp_path, FIRST)
    file = first / "metadata.json"
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 3):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=r"damaged|version"):
            read_shard(first)


def test_tokenizers_differ_if_their_files_do() -> None:
    one, other = TokenizerIdentity("here", "aa"), TokenizerIdentity("there", "aa")
    assert not tokenizers_differ(one, other)
    assert tokenizers_differ(one, TokenizerIdentity("here", "bb"))
    assert not tokenizers_differ(TokenizerIdentity("bytes", None), TokenizerIdentity("bytes", None))
    assert tokenizers_differ(TokenizerIdentity("bytes", None), one)
    assert not tokenizers_differ(one, None) and not tokenizers_differ(None, None)
