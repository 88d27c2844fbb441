"""Verification of small data sets in which something was changed."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import zarr
from byte_texts import RAGGED, write_ids, write_texts
from forged_digests import sign
from seqax_data import write_seqax

from data_tools.inspect.description import decoder
from data_tools.inspect.verification import verify_split
from lmlib.data.stored.metadata import TokenizerIdentity


@pytest.mark.parametrize("kind", ["flip", "truncate", "delete"])
def test_verify_finds_every_damaged_file(tmp_path: Path, kind: str) -> None:
    folder = write_texts(tmp_path, shards=2)
    assert verify_split(folder) == []
    shard = folder / "shard_00001_of_00002"
    chosen = [shard / "tokens/c/0", shard / "tokens/c/2", shard / "document_starts/c/0"]
    chosen.append(folder / "shard_00000_of_00002/first_documents/c/0")
    for file in chosen:
        content = bytearray(file.read_bytes())
        if kind == "flip":
            content[1] ^= 4
            file.write_bytes(content)
        elif kind == "truncate":
            file.write_bytes(content[:-1])
        else:
            file.unlink()
    assert sorted(damage.path for damage in verify_split(folder)) == sorted(chosen)


def test_any_lost_file_is_found(tmp_path: Path) -> None:
    folder = write_texts(tmp_path)
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        content = file.read_bytes()
        file.unlink()
        assert verify_split(folder), file
        file.write_bytes(content)
    assert verify_split(folder) == []


@pytest.mark.parametrize(
    ("entry", "change", "expected"),
    [
        ("max_token_id", -1, "has max_token_id 256, but the arrays have 257"),
        ("targets", 1, "has targets"),
        ("tokens", 1, "promises"),
        ("documents", -1, "promises"),
        ("vocab_size", -5, "outside the vocabulary of 253"),
    ],
)
def test_verify_compares_metadata_with_the_arrays(
    tmp_path: Path, entry: str, change: int, expected: str
) -> None:
    folder = write_texts(tmp_path)
    file = folder / "shard_00000_of_00001/metadata.json"
    content = json.loads(file.read_text())
    content[entry] += change
    file.write_text(json.dumps(content))
    sign(file.parent)
    assert any(expected in damage.reason for damage in verify_split(folder))


@pytest.mark.parametrize(
    ("name", "place", "value", "expected"),
    [
        ("document_starts", 0, 1, "begins with 1"),
        ("document_starts", 2, 50_000, "decreases|beyond the tokens"),
        ("document_starts", 3, 0, "decreases"),
        ("document_starts", 3, 90, "first_documents|disagrees|decreases"),
        ("document_starts", 4, 200, "beyond the tokens"),
        ("first_documents", 1, 9, "disagrees with document_starts at 1"),
        ("tokens", 5, 299, "has max_token_id 257, but the arrays have 299"),
    ],
)
def test_verify_compares_the_arrays_with_each_other(
    tmp_path: Path, name: str, place: int, value: int, expected: str
) -> None:
    folder = write_texts(tmp_path)
    array = zarr.open_array(folder / "shard_00000_of_00001" / name)
    array[place] = value  # with a valid checksum
    assert verify_split(folder)
    sign(folder / "shard_00000_of_00001")
    damages = verify_split(folder)
    assert damages
    assert any(re.search(expected, damage.reason) for damage in damages), damages


def test_verify_checks_the_tokenizer(tmp_path: Path) -> None:
    content = '{"made": "up"}'
    identity = TokenizerIdentity("x", hashlib.sha256(content.encode()).hexdigest())
    folder = write_ids(tmp_path, RAGGED, tokenizer=identity, tokenizer_json=content)
    assert verify_split(folder) == []
    (tmp_path / "tokenizer.json").write_text(content + " ")
    (damage,) = verify_split(folder)
    assert damage.path == tmp_path / "tokenizer.json"
    (tmp_path / "tokenizer.json").unlink()
    assert [damage.reason for damage in verify_split(folder)] == ["is missing"]
    with pytest.raises(ValueError, match=r"not a valid|cannot"):
        (tmp_path / "tokenizer.json").write_text(content)
        decoder(tmp_path, identity)


@pytest.mark.parametrize("name", ["encoded_tokens/2", "encoded_tokens/0", "seq_starts/1"])
@pytest.mark.parametrize("length", [None, 20])
def test_verify_of_seqax(tmp_path: Path, name: str, length: int | None) -> None:
    write_seqax(tmp_path, RAGGED, filtered=False)
    file = tmp_path / "train" / name
    if length is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:length])
    assert file in [damage.path for damage in verify_split(tmp_path / "train")]
