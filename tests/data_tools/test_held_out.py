"""Documents that are held out for validation, and documents with a separator between them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from folder_contents import files_of

from data_tools.held_out import Part, fraction_to_hold_out, hash_of
from data_tools.inspect.description import document_lengths
from data_tools.pretokenize.texts import pretokenize, pretokenize_shard
from data_tools.rows import records
from data_tools.rows.block import Row
from data_tools.rows.files import Files
from data_tools.rows.source import Texts, row_source
from data_tools.tokenizer import ByteTokenizer
from lmlib.data.flat_tokens import FlatTokens

TEXTS = [f"document {number % 900}" for number in range(1000)]  # the last hundred come twice


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Files:
    file = tmp_path_factory.mktemp("held_out") / "lines.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return Files([str(file)])


def documents(path: Path, split: str) -> list[str]:
    source = FlatTokens(str(path), split, 1, 32, seed=None, packed=False)
    batches = (source.batch(step) for step in range(source.steps_per_epoch))
    return [bytes(i for i in batch.tokens[0].tolist() if 0 < i < 256).decode() for batch in batches]


def make(source: Any, out: Path, split: str, **settings: Any) -> None:
    pretokenize(source, ByteTokenizer(), out, split, **settings)


def test_the_parts_are_disjoint_and_whole(tmp_path: Path, lines: Files) -> None:
    make(lines, tmp_path, "train", part=Part(0.1, held_out=False))
    make(lines, tmp_path, "validation", part=Part(0.1, held_out=True))
    train, validation = documents(tmp_path, "train"), documents(tmp_path, "validation")
    assert sorted(train + validation) == sorted(TEXTS)
    assert not set(train) & set(validation)
    assert 50 < len(validation) < 150
    again = Texts(reversed(TEXTS))
    make(again, tmp_path / "other order", "validation", part=Part(0.1, held_out=True))
    assert documents(tmp_path / "other order", "validation") == validation_in_order(validation)


def validation_in_order(validation: list[str]) -> list[str]:
    return [text for text in reversed(TEXTS) if text in set(validation)]


def test_the_parts_are_the_same_in_shards(tmp_path: Path, lines: Files) -> None:
    part = Part(0.1, held_out=True)
    make(lines, tmp_path / "one", "validation", part=part)
    make(lines, tmp_path / "three", "validation", part=part, shards=3)
    assert documents(tmp_path / "one", "validation") == documents(tmp_path / "three", "validation")
    for shard in (2, 0, 1):
        target = (lines, ByteTokenizer(), tmp_path / "alone", "validation")
        pretokenize_shard(*target, part=part, shard=shard, shards=3)
    assert files_of(tmp_path / "three") == files_of(tmp_path / "alone")
    with pytest.raises(FileExistsError, match=r"validation_fraction 0\.1, not 0\.2"):
        make(lines, tmp_path / "one", "validation", part=Part(0.2, held_out=True))


def test_a_part_without_documents_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'validation'.*raise --validation_fraction"):
        make(["one", "two"], tmp_path, "validation", part=Part(1e-9, held_out=True))
    with pytest.raises(ValueError, match=r"'train'.*lower --validation_fraction=0\.9 if all"):
        make(["one", "one"], tmp_path, "train", part=Part(0.9, held_out=False))
    with pytest.raises(ValueError, match=r"between 0 and 1, not 1\.5"):
        Part(1.5, held_out=True)


@pytest.mark.parametrize("documents", [5, 30, 3_000])
def test_a_fraction_that_is_proposed_holds_out_something_and_not_most(documents: int) -> None:
    texts = [f"document {i}" for i in range(documents)]
    fraction = fraction_to_hold_out({hash_of(text): len(text) for text in texts})
    assert fraction is not None
    held_out = [text for text in texts if Part(fraction, held_out=True).has(text)]
    assert 0.01 * documents <= len(held_out) <= 0.5 * documents
    assert fraction <= 0.02 or documents < 1_000


def test_a_single_text_cannot_be_parted() -> None:
    assert fraction_to_hold_out({hash_of("one document"): 12}) is None
    assert fraction_to_hold_out({0: 60, 2**64 - 1: 40}) is None  # each holds out 60 %


STORIES = ["one\n\nstory", "two", "ünï", "x" * 50, "end"]


def rows_of(source: Files, shards: int = 1, position: Any = None) -> list[Row]:
    shares = (source.blocks(shard, shards, position) for shard in range(shards))
    return [row for share in shares for block in share for row in block.rows(source.field)]


@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("compressed", [False, True])
def test_documents_with_a_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, compressed: bool
) -> None:
    monkeypatch.setattr(records, "BLOCK_BYTES", block_bytes)
    content = "\n<|endoftext|>\n".join([*STORIES, " "]).encode()
    file = tmp_path / ("a.txt.gz" if compressed else "a.txt")
    file.write_bytes(gzip.compress(content) if compressed else content)
    (tmp_path / "b.txt").write_text("<|endoftext|>last")
    source = row_source([str(tmp_path)], document_separator="<|endoftext|>")
    for shards in (1, 2, 5):
        assert [row.text for row in rows_of(source, shards)] == [*STORIES, "last"]
    for block in source.blocks(0, 1):
        later = [row.text for row in rows_of(source, position=block.position)]
        assert later and later == [*STORIES, "last"][-len(later) :]
    assert source.description["document_separator"] == "<|endoftext|>"


def test_a_document_that_is_too_long_is_a_bad_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_ROW_BYTES", 20)
    monkeypatch.setattr(records, "BLOCK_BYTES", 8)
    (tmp_path / "a.txt").write_text("--".join(STORIES))
    rows = rows_of(row_source([str(tmp_path / "a.txt")], document_separator="--"))
    assert [row.text for row in rows] == ["one\n\nstory", "two", "ünï", None, "end"]
    assert "a.txt, byte 24 is longer than" in str(rows[3])


def test_an_empty_separator_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="separator is empty"):
        row_source([str(tmp_path / "a.txt")], document_separator="")


@pytest.mark.parametrize("place", [".", "train", "texts.jsonl"])
def test_text_given_as_a_data_set(tmp_path: Path, place: str) -> None:
    file = tmp_path / ("train/texts.jsonl" if place == "train" else "texts.jsonl")
    file.parent.mkdir(exist_ok=True)
    file.write_text('{"text": "a"}\n')
    given = tmp_path / "texts.jsonl" if place == "texts.jsonl" else tmp_path
    with pytest.raises(FileNotFoundError, match="pretokenize it first with python -m data_tools"):
        FlatTokens(str(given), "train", 1, 4)


def test_a_home_folder_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("text")
    make(Files(["~/a.txt"]), Path("~/out/../data"), "train")
    assert document_lengths(tmp_path / "data" / "train").total() == 1
