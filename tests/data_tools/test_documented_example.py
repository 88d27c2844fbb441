"""The worked example of docs/flat-tokens.md, built byte by byte from the page."""

import json
import re
import struct
from pathlib import Path

import pytest
from numcodecs.checksum32 import CRC32C
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from data_tools.pretokenize.texts import pretokenize
from data_tools.rows.files import Files
from data_tools.rows.source import Texts
from data_tools.tokenizer import ByteTokenizer
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import read_shard

PAGE = Path(__file__).parents[2] / "docs" / "flat-tokens.md"
FOLDER = Path("two/train/shard_00000_of_00001")
INNER_CHUNK = 16 * 1024  # tokens
INNER_CHUNKS = 1024  # in a file
CHECKED = CRC32C(location="end")  # bytes, then their checksum
ABSENT = struct.pack("<2Q", 2**64 - 1, 2**64 - 1)


def file_of(values, inner_chunk_bytes):
    """A file with one inner chunk."""
    chunk = CHECKED.encode(values.ljust(inner_chunk_bytes, b"\0")).tobytes()
    index = struct.pack("<2Q", 0, len(chunk)) + ABSENT * (INNER_CHUNKS - 1)
    return chunk + CHECKED.encode(index).tobytes()


@pytest.fixture(scope="module")
def documented_metadata():
    return PAGE.read_text(encoding="utf-8").split("```json\n")[1].split("```")[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("example")
    (folder / "two.jsonl").write_text('{"text": "hi"}\n{"text": "a"}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the page's command names a file in the current folder
        pretokenize(Files(["two.jsonl"]), ByteTokenizer(), "two", "train")
    return folder


def test_the_arrays_have_the_documented_bytes(written, documented_metadata):
    tokens = struct.pack("<7H", 256, 104, 105, 257, 256, 97, 257)
    expected = {
        "tokens": file_of(tokens, 2 * INNER_CHUNK),
        "document_starts": file_of(struct.pack("<2Q", 0, 4), 8 * 1024),
        "first_documents": file_of(struct.pack("<2Q", 0, 2), 8 * 1024),
    }
    for name, content in expected.items():
        assert (written / FOLDER / name / "c" / "0").read_bytes() == content, name

    digests = {
        "tokens": struct.pack("<Q", xxh3_64_intdigest(tokens)),
        "document_starts": struct.pack("<Q", xxh3_64_intdigest(struct.pack("<2Q", 0, 4))),
        "first_documents": struct.pack("<Q", xxh3_64_intdigest(struct.pack("<2Q", 0, 2))),
    }
    described = json.loads(documented_metadata)["digests"]
    for name, content in digests.items():
        array = written / FOLDER / name
        assert (array / "chunk_digests").read_bytes() == content, name
        both = (array / "zarr.json").read_bytes() + content
        assert described[name] == xxh3_128_hexdigest(both)
    before, own = documented_metadata.split('  "digest": ')
    assert json.loads(own.removesuffix("}\n")) == xxh3_128_hexdigest(before.encode())

    page = PAGE.read_text(encoding="utf-8")
    assert f"{len(expected['tokens']):,} bytes long" in page
    shown = [bytes.fromhex(found) for found in re.findall(r"`((?:[0-9a-f]{2} *)+)`", page)]
    chunk_end = 2 * INNER_CHUNK + 4
    file = expected["tokens"]
    checksums = [file[chunk_end - 4 : chunk_end], file[-4:]]
    assert shown == [tokens, *checksums, digests["tokens"]]


def test_the_metadata_is_the_documented_one(written, documented_metadata):
    assert (written / FOLDER / "metadata.json").read_text() == documented_metadata
    assert read_shard(written / FOLDER).tokens == 7
    names = sorted(entry.name for entry in (written / FOLDER).iterdir())
    assert names == ["document_starts", "first_documents", "metadata.json", "tokens"]


def test_the_sequences_are_the_documented_ones(written):
    rows = re.findall(r"^\| (\d) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1"]
    batch = FlatTokens(str(written / "two"), "train", 2, 4, seed=None).batch(0)
    fields = ("tokens", "targets", "segment_ids", "positions", "loss_mask")
    for number, cells in rows:
        for field, cell in zip(fields, cells.split(" | "), strict=True):
            found = getattr(batch, field)[int(number)].astype(int).tolist()
            assert found == [int(value) for value in cell.split()], field


def test_texts_from_python_give_the_same_arrays(written, tmp_path):
    pretokenize(Texts(["hi", "a"]), ByteTokenizer(), tmp_path / "two", "train")
    for file in (tmp_path / FOLDER).glob("*/c/0"):
        assert file.read_bytes() == (written / file.relative_to(tmp_path)).read_bytes()
