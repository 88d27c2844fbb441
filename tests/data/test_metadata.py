import json
from pathlib import Path

import pytest

from lmlib.data import Metadata, Shard, TokenizerIdentity, read_metadata

METADATA = Metadata(
    shards=(Shard("shard_00000", 5, 2), Shard("shard_00001", 7, 1)),
    tokens=12,
    documents=3,
    bytes=40,
    gzip_bytes=None,
    vocab_size=300,
    max_token_id=299,
    tokenizer=TokenizerIdentity("bytes", None),
    bos_id=0,
    eos_id=None,
    source={"dataset": ["a.jsonl"], "name": None},
)


def test_round_trip(tmp_path: Path) -> None:
    METADATA.write(tmp_path)
    assert read_metadata(tmp_path) == METADATA
    assert [file.name for file in tmp_path.iterdir()] == ["metadata.json"]


def test_a_split_without_metadata_is_unfinished(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"unfinished.*metadata\.json"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("version", [0, 2, "1"])
def test_another_version_is_refused(tmp_path: Path, version: object) -> None:
    METADATA.write(tmp_path)
    file = tmp_path / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": version}))
    with pytest.raises(ValueError, match=f"version {version!r}, but this library reads"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format": "lmlib flat tokens"}', "null"])
def test_damaged_metadata_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "metadata.json").write_text(content)
    with pytest.raises(ValueError, match=r"metadata\.json is damaged"):
        read_metadata(tmp_path)


def test_missing_and_unknown_entries_are_damage(tmp_path: Path) -> None:
    METADATA.write(tmp_path)
    file = tmp_path / "metadata.json"
    whole = json.loads(file.read_text())
    for changed in ({k: v for k, v in whole.items() if k != "tokens"}, whole | {"extra": 1}):
        file.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match="damaged"):
            read_metadata(tmp_path)
