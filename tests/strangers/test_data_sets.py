"""Data sets from a stranger: nothing outside is touched, nothing is allocated on their word."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import zarr
import zstandard
from byte_texts import RAGGED, write_ids
from folder_contents import files_of
from forged_digests import sign
from seqax_data import write_seqax
from strangers import assert_refused, link, outcomes, sparse, text

from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.stored.shard_writer import ShardWriter

SHARD = "train/shard_00000_of_00001"
TOKENIZER = '{"made": "up"}'

FLAT_TOKENS = """
from lmlib.data.flat_tokens import FlatTokens
from data_tools.inspect.description import describe_split, document_lengths
from data_tools.inspect.verification import verify_split
from pathlib import Path
"""
TRAIN = """
    for packed in (True, False):
        source = FlatTokens(arguments, "train", 2, 8, packed=packed)
        for step in range(source.steps_per_epoch):
            source.batch(step)
"""
LOOK = """
    folder = Path(arguments, "train")
    assert bool(verify_split(folder)) != arguments.endswith("sound"), "verify finds nothing"
    describe_split(folder)
    document_lengths(folder)
"""


def changed(name, **entries):
    """Sets entries of the JSON file `name` of a data set; `a__b` is entry b of entry a."""

    def change(data_set):
        file = data_set / name
        content = json.loads(file.read_text())
        for path, value in entries.items():
            *outer, last = path.split("__")
            place = content
            for part in outer:
                place = place[int(part) if part.isdecimal() else part]
            place[last] = value
        file.write_text(json.dumps(content))

    return change


def together(*changes):
    def change(data_set):
        for each in changes:
            each(data_set)

    return change


def values(name, *numbers):
    """Overwrites the first values of an array, with valid checksums."""

    def change(data_set):
        array = zarr.open_array(data_set / SHARD / name)
        array[: len(numbers)] = np.array(numbers, array.dtype)

    return change


def bomb(data_set):
    """One chunk of 4 GB of zeros, in a few hundred KB of zstd."""
    sizes = zstandard.ZstdCompressor().compressobj()
    million = bytes(1 << 20)
    chunk = b"".join(sizes.compress(million) for _ in range(4096)) + sizes.flush()
    (data_set / SHARD / "tokens/c/0").write_bytes(chunk)
    changed(f"{SHARD}/tokens/zarr.json", chunk_grid__configuration__chunk_shape=[1 << 31])(data_set)
    codecs = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "zstd", "configuration": {"level": 3, "checksum": False}},
    ]
    changed(f"{SHARD}/tokens/zarr.json", codecs=codecs)(data_set)


META, TOKENS = f"{SHARD}/metadata.json", f"{SHARD}/tokens/zarr.json"
STARTS, FIRSTS = f"{SHARD}/document_starts/zarr.json", f"{SHARD}/first_documents/zarr.json"
HUGE = 10**15
DEEP = "[" * 1_000_000
SHARDING = "codecs__0__configuration__chunk_shape"
FILES = "chunk_grid__configuration__chunk_shape"

ATTACKS = {
    "tokens": together(changed(META, tokens=HUGE), changed(TOKENS, shape=[HUGE])),
    "documents": together(changed(META, documents=HUGE), changed(STARTS, shape=[HUGE])),
    "chunks": changed(TOKENS, **{SHARDING: [HUGE], FILES: [HUGE]}),
    "chunks of nothing": changed(TOKENS, **{SHARDING: [0]}),
    "two dimensions": changed(TOKENS, shape=[3, 3]),
    "other numbers": changed(TOKENS, data_type="float64"),
    "another codec": changed(TOKENS, codecs__0__configuration__codecs=[{"name": "gzip"}]),
    "other names of files": changed(
        TOKENS, chunk_key_encoding={"name": "v2", "configuration": {"separator": "../"}}
    ),
    "another store": changed(TOKENS, storage_transformers=[{"name": "file:///etc"}]),
    "a bomb": bomb,
    "a long metadata.json": sparse(META, 5 << 30),
    "a long zarr.json": sparse(TOKENS, 5 << 30),
    "a long file": sparse(f"{SHARD}/tokens/c/0", 1 << 40),
    "a long tokenizer.json": sparse("tokenizer.json", 5 << 30),
    "a deep metadata.json": text(META, DEEP),
    "an entry twice": lambda data_set: text(
        META, (data_set / META).read_text().replace("{", '{"tokens": 9,', 1)
    )(data_set),
    "no number of tokens": changed(META, tokens="many"),
    "an infinite vocabulary": changed(META, vocab_size=float("inf")),
    "a long number": text(META, '{"format": ' + "9" * 10_000 + "}"),
    "no tokenizer's name": changed(META, tokenizer={"name": ["x"], "sha256": None}),
    "an index that decreases": values("first_documents", 0, 5, 2),
    "an index below": values("first_documents", 0, 2**63),
    "documents beyond": values("document_starts", 0, 2**40, 2**62, 2**63 + 1),
    "documents that decrease": values("document_starts", 9, 5, 3),
    "a linked metadata.json": link(META),
    "a linked zarr.json": link(TOKENS),
    "a linked file": link(f"{SHARD}/tokens/c/0"),
    "a linked shard": link(SHARD),
}

ZARRAY = "train/encoded_tokens/.zarray"
SEQAX_ATTACKS = {
    "seqax tokens": changed(ZARRAY, shape=[HUGE]),
    "seqax tokens in chunks": changed(ZARRAY, shape=[HUGE], chunks=[HUGE]),
    "seqax starts": changed("train/seq_starts/.zarray", shape=[HUGE], filters=[{"id": "delta"}]),
    "seqax long": sparse("train/.zattrs", 5 << 30),
    "seqax deep": text(ZARRAY, DEEP),
    "seqax link": link("train/encoded_tokens/0"),
}
ALL = ATTACKS | SEQAX_ATTACKS

# Training does not read it.
HARMLESS_TO_TRAIN = {"seqax starts"}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """A folder with a data set for each attack, and a secret beside them."""
    folder = tmp_path_factory.mktemp("strangers")
    sound = folder / "sound"
    digest = hashlib.sha256(TOKENIZER.encode()).hexdigest()
    write_ids(sound, RAGGED, tokenizer=TokenizerIdentity("x", digest), tokenizer_json=TOKENIZER)
    write_seqax(folder / "seqax sound", RAGGED)
    for name, attack in ALL.items():
        shutil.copytree(
            folder / ("seqax sound" if name in SEQAX_ATTACKS else "sound"), folder / name
        )
        attack(folder / name)
        if name in ATTACKS and not (folder / name / SHARD).is_symlink():
            sign(folder / name / SHARD)
    return folder


def of_all(folder, call):
    """Returns the end of `call` for each data set; the sound one must be opened."""
    cases = {name: str(folder / name) for name in ("sound", "seqax sound", *ALL)}
    before = {path: files_of(path) for path in folder.glob("* outside") if path.is_dir()}
    found = outcomes(FLAT_TOKENS, call, cases, folder)
    assert found["sound"] == ("opened", "")
    assert {path: files_of(path) for path in before} == before
    return found


@pytest.fixture(scope="module")
def trained(attacked):
    return of_all(attacked, TRAIN)


@pytest.fixture(scope="module")
def looked_at(attacked):
    return of_all(attacked, LOOK)


@pytest.mark.parametrize("name", sorted(ALL.keys() - HARMLESS_TO_TRAIN))
def test_training_refuses_it(trained, name):
    assert_refused(trained[name], "DamagedDataError", "LinkError", "ValueError")


@pytest.mark.parametrize("name", ALL)
def test_inspect_finds_it(looked_at, name):
    """Verification does, and neither the description nor the lengths take harm."""
    if looked_at[name] != ("opened", ""):
        assert_refused(looked_at[name], "DamagedDataError", "LinkError", "ValueError")


# A shard that someone else began


@pytest.fixture
def begun(tmp_path):
    """A data set with a shard that was left unfinished, and a folder outside with a file."""
    writer = ShardWriter(tmp_path / "data", "train", vocab_size=300, file_length=8, chunk_length=8)
    writer.close()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("precious")
    return tmp_path / "data" / SHARD


def go_on(begun):
    writer = ShardWriter(begun.parents[1], "train", vocab_size=300, file_length=8, chunk_length=8)
    try:
        for document in RAGGED:
            writer.append(np.array(document, np.int64), text_bytes=1)
        writer.finish()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "name",
    [
        "tokens/c",
        "document_starts.partial",
        "metadata.json.tmp",
        "writer.lock",
        ".",
    ],
)
def test_a_writer_writes_through_no_link(begun, name):
    outside = begun.parents[2] / "outside"
    path = begun / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(True)
    folder = name in (".", "tokens", "tokens/c", "document_starts")
    path.symlink_to(outside if folder else outside / "precious")
    with pytest.raises(FileExistsError, match="is a link, and no writer makes any"):
        go_on(begun)
    assert files_of(outside) == {"precious": b"precious"}


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("written", 10**18),
        ("written", "all"),
        ("marked__documents", 10**15),
        ("marked__tokens", 1.5),
    ],
)
def test_a_journal_that_makes_no_sense_is_refused(begun, entry, value):
    changed(f"{SHARD}/journal.json", **{"written": 8, entry: value})(begun.parents[1])
    with pytest.raises((ValueError, OSError), match="delete"):
        go_on(begun)
