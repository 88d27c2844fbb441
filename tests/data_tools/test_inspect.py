"""Descriptions, samples, verification and batches of small data sets, against lists by hand."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import fiddle as fdl
import numpy as np
import pytest
import zarr

from data_tools.convert import to_seqax
from data_tools.inspect import (
    DocumentLengths,
    LengthBin,
    SavedRun,
    batch_rows,
    decoder,
    describe_split,
    document_lengths,
    open_split,
    samples,
    split_folders,
    verify_split,
)
from data_tools.inspect.report import description_text, lengths_text, row_text, sample_text
from data_tools.tokenizer import train_byte_level_bpe
from lmlib.data import FlatTokens, ShardWriter, Synthetic, TokenizerIdentity
from lmlib.data.mixture import Mixture, Stage
from lmlib.experiment import Experiment
from runner import configs

REPOSITORY = Path(__file__).parents[2]
BOS, EOS = 256, 257
TEXTS = ["hello", "", "ünï\ncode", "x" * 70, "the end"]
RAGGED = [[1] * length for length in (3, 0, 1, 8, 40, 0, 5, 7, 2, 0)]


def write_texts(path: Path, shards: int = 1, split: str = "train") -> Path:
    """The texts as bytes, framed; returns the split's folder."""
    for shard in range(shards):
        writer = writer_of_texts(path, shard, shards, split)
        for text in TEXTS[shard::shards]:
            writer.append(np.frombuffer(text.encode(), np.uint8), text_bytes=len(text.encode()))
        writer.finish()
    return path / split


def writer_of_texts(path: Path, shard: int, shards: int, split: str = "train") -> ShardWriter:
    return ShardWriter(
        path,
        split,
        shard=shard,
        shards=shards,
        vocab_size=258,
        bos_id=BOS,
        eos_id=EOS,
        tokenizer=TokenizerIdentity("bytes", None),
        source={"dataset": "by hand"},
        file_length=32,
        chunk_length=8,
    )


def write_ids(path: Path, documents: Sequence[Sequence[int]], **settings) -> Path:
    """Documents of ids in one shard; returns the split's folder."""
    writer = ShardWriter(
        path, "train", **{"vocab_size": 300, "file_length": 32, "chunk_length": 8} | settings
    )
    for document in documents:
        writer.append(np.array(document, np.int64), text_bytes=1)
    writer.finish()
    return path / "train"


def framed_tokens() -> int:
    return sum(len(text.encode()) + 2 for text in TEXTS)


def test_a_finished_split(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, shards=2)
    split = describe_split(folder)
    assert (split.format, split.shards, split.finished, split.documents) == ("lmlib", 2, True, 5)
    assert split.tokens == framed_tokens()
    assert split.bytes == sum(len(text.encode()) for text in TEXTS)
    assert (split.vocab_size, split.max_token_id) == (258, EOS)
    assert (split.bos_id, split.eos_id) == (BOS, EOS)
    assert split.tokenizer == TokenizerIdentity("bytes", None)
    assert split.source == {"dataset": "by hand"}
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert split.disk_bytes == sum(len(file.read_bytes()) for file in files)

    lines = description_text(split).splitlines()
    assert lines[0] == str(folder)
    shown = dict(line.strip().split("  ", 1) for line in lines[1:])
    assert shown["shards"].strip() == "2 of 2 shards finished"
    assert shown["tokens"].strip() == f"{framed_tokens()} tokens"
    assert shown["framing"].strip() == "BOS 256, EOS 257"


def test_an_unfinished_split(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, shards=3)
    shutil.rmtree(folder / "shard_00001_of_00003")
    shutil.rmtree(folder / "shard_00002_of_00003")
    writer = writer_of_texts(tmp_path, 1, 3)
    writer.append(np.zeros(70, np.int64), text_bytes=70)
    writer.close()
    split = describe_split(folder)
    assert (split.shards, split.finished, split.documents) == (3, False, 2)
    assert [(shard.name, shard.tokens) for shard in split.unfinished] == [
        ("shard_00001_of_00003", 64),  # whole files of 32
        ("shard_00002_of_00003", 0),
    ]
    assert "1 of 3 shards finished" in description_text(split)
    assert "shard_00001_of_00003, 64 tokens on disk so far" in description_text(split)
    assert document_lengths(folder).documents == 2

    shutil.rmtree(folder / "shard_00000_of_00003")
    begun = describe_split(folder)
    assert (begun.documents, begun.vocab_size, begun.max_token_id) == (0, 258, -1)
    assert begun.tokenizer == TokenizerIdentity("bytes", None)
    reasons = [(damage.path.name, damage.reason) for damage in verify_split(folder)]
    assert ("shard_00001_of_00003", "is unfinished") in reasons
    assert ("shard_00002_of_00003", "is missing") in reasons


def test_a_seqax_split(tmp_path: Path) -> None:
    write_ids(tmp_path / "lmlib", RAGGED)
    to_seqax(tmp_path / "lmlib", tmp_path / "seqax", tokens_chunk_length=8)
    split = describe_split(tmp_path / "seqax/train")
    assert (split.format, split.documents, split.tokens) == ("seqax", 7, 66)
    assert (split.bytes, split.vocab_size, split.tokenizer) == (None, None, None)
    lengths = document_lengths(tmp_path / "seqax/train")
    assert lengths.lengths_L.tolist() == [1, 2, 3, 5, 7, 8, 40]
    assert verify_split(tmp_path / "seqax/train") == []


def test_document_lengths(tmp_path: Path) -> None:
    lengths = document_lengths(write_ids(tmp_path, RAGGED))
    assert lengths.documents == len(RAGGED)
    expected = np.unique([len(document) for document in RAGGED], return_counts=True)
    np.testing.assert_array_equal(lengths.lengths_L, expected[0])
    np.testing.assert_array_equal(lengths.counts_L, expected[1])
    assert lengths.bins() == [
        LengthBin(0, 0, 3),
        LengthBin(1, 1, 1),
        LengthBin(2, 3, 2),
        LengthBin(4, 7, 2),
        LengthBin(8, 15, 1),
        LengthBin(16, 31, 0),
        LengthBin(32, 63, 1),
    ]
    ordered = sorted(map(len, RAGGED))
    for percent, place in ((1, 0), (10, 0), (30, 2), (31, 3), (50, 4), (100, 9)):
        assert lengths.percentile(percent) == ordered[place]
    text = lengths_text(lengths).splitlines()
    assert text[1] == f"         0 tokens  3 documents  {'█' * 40}"
    assert text[-1].endswith("100% up to 40 tokens")
    none = DocumentLengths(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert none.bins() == []
    assert lengths_text(none) == "  no documents"


def test_samples_show_what_is_stored(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, shards=2)
    ordered = [text for shard in range(2) for text in TEXTS[shard::2]]
    flat = [i for text in ordered for i in (BOS, *text.encode(), EOS)]
    stored = open_split(folder)
    found = samples(stored, 5, length=20)
    assert found == samples(stored, 5, length=20)
    assert found != samples(stored, 5, length=20, seed=1)
    for sample in found:
        ids = [token for piece in sample.pieces for token in piece]
        assert ids == flat[sample.start : sample.stop]
        assert len(ids) == 20
        assert sample.begins_document == (ids[0] == BOS)
        assert all(piece[0] == BOS for piece in sample.pieces[1:])
        assert all(BOS not in piece[1:] for piece in sample.pieces)

    (whole,) = samples(stored, 1, length=1000)
    decode = decoder(tmp_path, TokenizerIdentity("bytes", None))
    assert sample_text(whole, decode).splitlines()[1:6] == [
        "  ── a document begins ──",
        "    │ hello",
        "  ── a document begins ──",
        "    │ ünï",
        "    │ code",
    ]
    assert "    256 104 101 108 108 111 257\n" in sample_text(whole, None)
    assert decoder(tmp_path, None) is None


def test_a_data_sets_own_tokenizer_decodes(tmp_path: Path) -> None:
    tokenizer = train_byte_level_bpe(["low lower lowest"] * 9, 270)
    write_ids(
        tmp_path, [[1]], tokenizer=tokenizer.identity, tokenizer_json=tokenizer.tokenizer_json
    )
    alphabet = json.loads(tokenizer.tokenizer_json)["model"]["vocab"]
    decode = decoder(tmp_path, tokenizer.identity)
    assert decode is not None
    assert decode([0, *(alphabet[letter] for letter in "wolle"), 1]) == "wolle"


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
    damages = verify_split(folder)
    assert damages
    assert any(re.search(expected, damage.reason) for damage in damages), damages


def test_empty_documents_and_empty_splits_are_whole(tmp_path: Path) -> None:
    for number, documents in enumerate([RAGGED, [], [[]], [[], []], [[], [1]], [[1], []], [[1]]]):
        folder = write_ids(tmp_path / str(number), documents)
        assert verify_split(folder) == []
        assert document_lengths(folder).documents == len(documents)
        assert describe_split(folder).tokens == sum(map(len, documents))
        assert sum(len(sample.pieces) for sample in samples(open_split(folder), 2)) == min(
            1, sum(map(len, documents))
        ) * sum(1 for document in documents if document)


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
    write_ids(tmp_path / "lmlib", RAGGED)
    to_seqax(tmp_path / "lmlib", tmp_path / "out", tokens_chunk_length=8, starts_chunk_length=4)
    file = tmp_path / "out/train" / name
    if length is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:length])
    assert file in [damage.path for damage in verify_split(tmp_path / "out/train")]


def test_rows_of_a_batch(tmp_path: Path) -> None:
    write_texts(tmp_path)
    source = FlatTokens(str(tmp_path), "train", 1, 12, seed=None)
    (row,) = batch_rows(source.batch(0))
    assert [(piece.start, piece.stop, piece.segment_id) for piece in row.pieces] == [
        (0, 7, 1),
        (7, 9, 2),
        (9, 12, 3),
    ]
    assert row.pieces[0].tokens == (BOS, *b"hello", EOS)
    assert row.pieces[0].targets == (*b"hello", EOS, BOS)
    assert row.pieces[0].loss_mask == (True,) * 6 + (False,)
    assert row.pieces[2].positions == (0, 1, 2)
    assert (row.places, row.targets_in_loss) == (12, 10)
    decode = decoder(tmp_path, source.tokenizer)
    assert row_text(row, decode, 0, 9).splitlines()[:7] == [
        "row 0 (sequence 0 of 9): 12 tokens, 10 targets in the loss",
        "  places 0 to 6: segment 1, positions 0 to 6",
        "    tokens   256 104 101 108 108 111 257",
        "    targets  104 101 108 108 111 257 (256)",
        "    │ hello",
        "  ── another document; its first token is no target in the loss ──",
        "  places 7 to 8: segment 2, positions 0 to 1",
    ]


def test_rows_whose_documents_share_a_segment_are_cut_as_well(tmp_path: Path) -> None:
    write_texts(tmp_path)
    source = FlatTokens(
        str(tmp_path), "train", 1, 12, seed=None, attend_across_documents=True, epochs=1
    )
    (row,) = batch_rows(source.batch(0))
    assert [piece.start for piece in row.pieces] == [0, 7, 9]
    assert {piece.segment_id for piece in row.pieces} == {1}
    (padding,) = batch_rows(source.batch(1000))[0].pieces
    assert (padding.start, padding.stop, padding.segment_id) == (0, 12, 0)
    text = row_text(batch_rows(source.batch(1000))[0], None, -1, source.sequences)
    assert text == "row 0: 12 tokens, 0 targets in the loss\n  places 0 to 11: padding"


def save_run(path: Path, workdir: Path, **more) -> Path:
    data = fdl.Config(
        FlatTokens, path=str(path), split="train", batch_size=3, sequence_length=9, seed=4, **more
    )
    validation = fdl.Config(Synthetic, vocab_size=64, batch_size=2, sequence_length=5)
    configs.save(fdl.Config(Experiment, data=data, validation=validation, steps=3), workdir)
    return workdir / "config.json"


def test_the_data_of_a_run(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    file = save_run(tmp_path / "data", tmp_path / "run", reset_positions=False)
    run = SavedRun(file)
    assert run.data_sets() == [(tmp_path / "data", "train")]
    assert run.data_sets("validation") == []
    expected = FlatTokens(
        str(tmp_path / "data"), "train", 3, 9, seed=4, reset_positions=False
    ).batch(2)
    found = run.source().batch(2)
    for field in ("tokens", "targets", "segment_ids", "positions", "loss_mask"):
        np.testing.assert_array_equal(getattr(found, field), getattr(expected, field))
    assert run.source("validation").sequence_length == 5
    with pytest.raises(ValueError, match="train and validation, not 'test'"):
        run.source("test")


def test_the_data_of_a_run_on_a_mixture(tmp_path: Path) -> None:
    sources = {}
    for name in ("code", "prose"):
        write_texts(tmp_path / name)
        sources[name] = fdl.Config(
            FlatTokens, path=str(tmp_path / name), split="train", batch_size=2, sequence_length=6
        )
    stages = [fdl.Config(Stage, weights={"code": 1.0, "prose": 3.0})]
    mixture = fdl.Config(Mixture, sources=sources, stages=stages)
    configs.save(fdl.Config(Experiment, data=mixture, steps=3), tmp_path)
    run = SavedRun(tmp_path / "config.json")
    assert run.data_sets() == [(tmp_path / "code", "train"), (tmp_path / "prose", "train")]
    expected = fdl.build(mixture).batch(5)
    np.testing.assert_array_equal(run.source().batch(5).tokens, expected.tokens)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"root": 1, "objects": {}}', None])
def test_what_is_no_run_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
        with pytest.raises(ValueError, match=r"config\.json is no config\.json that a run"):
            SavedRun(file)
    else:
        with pytest.raises(FileNotFoundError):
            SavedRun(file)


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        split_folders(tmp_path / "nothing")
    with pytest.raises(ValueError, match="neither a data set of flat tokens nor a split"):
        split_folders(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is no folder"):
        split_folders(tmp_path / "file")
    folder = write_texts(tmp_path)
    assert split_folders(tmp_path) == split_folders(folder) == [folder]
    with pytest.raises(ValueError, match="is one shard: give its split"):
        split_folders(folder / "shard_00000_of_00001")


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "data_tools.inspect", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "utf-8"},
    )


def test_the_command_shows_a_data_set(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    done = command(tmp_path, "data", "--samples=2", "--sample_length=200")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("data/train\n  format ")
    assert "  document lengths\n" in done.stdout
    assert "    │ hello\n" in done.stdout


def test_the_command_shows_the_batch_of_a_run(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    save_run(tmp_path / "data", tmp_path / "run")
    done = command(tmp_path, "run/config.json", "--batch=1", "--rows=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 1: 3 rows of 9 tokens, 1 shown\nrow 0 (sequence ")


def test_the_status_of_the_command(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "data")
    (folder / "shard_00000_of_00001/tokens/c/1").unlink()
    done = command(tmp_path, "data", "--verify")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == [
        "damaged: data/train/shard_00000_of_00001/tokens/c/1: is missing",
        "data/train: damaged in 1 place",
    ]
    done = command(tmp_path, "data", "--batch=-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "inspect: a batch's step must be at least 0, not -1\n"
