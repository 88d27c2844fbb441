import gzip
import itertools
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from folder_contents import files_of
from forked_processes import run_forked
from own_texts import write_own_texts

from data_tools import command_line as command_line_module
from data_tools.command_line import ProgressLine
from data_tools.held_out import Part, fraction_to_hold_out, hash_of
from data_tools.inspect.description import document_lengths
from data_tools.pretokenize.report import next_command
from data_tools.pretokenize.texts import pretokenize, pretokenize_shard
from data_tools.rows import records
from data_tools.rows.block import TextField
from data_tools.rows.files import Files
from data_tools.rows.source import Texts, row_source
from data_tools.tokenizer import ByteTokenizer, JsonTokenizer
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import read_split

TEXTS = ["hello", "", "ünï 🤖", "x" * 100]
BOS, EOS = 256, 257


def tokens_of(path, split="train"):
    """All tokens of a split, in order."""
    source = FlatTokens(str(path), split, 1, 16, seed=None)
    batches = [source.batch(step) for step in range(source.steps_per_epoch)]
    targets = [batch.targets[batch.segment_ids > 0] for batch in batches]
    return [int(batches[0].tokens[0, 0]), *np.concatenate(targets).tolist()]


def test_documents_are_framed_and_counted(tmp_path):
    source = Texts(TEXTS, {"dataset": "by hand"})
    metadata = pretokenize(source, ByteTokenizer(), tmp_path, "train")
    framed = [[BOS, *text.encode(), EOS] for text in TEXTS]
    assert tokens_of(tmp_path) == list(itertools.chain(*framed))
    assert metadata == read_split(tmp_path / "train")
    assert metadata.documents == 4
    assert metadata.bytes == sum(len(text.encode()) for text in TEXTS)
    assert metadata.targets == sum(map(len, framed)) - 4
    assert (metadata.vocab_size, metadata.max_token_id) == (258, 257)
    assert (metadata.bos_id, metadata.eos_id) == (BOS, EOS)
    assert metadata.source == {"dataset": "by hand", "max_tokens": None}
    assert metadata.gzip_bytes is None


def test_max_tokens_ends_with_a_whole_document(tmp_path):
    settings = {"max_tokens": 8, "gzip_baseline": True}
    metadata = pretokenize(TEXTS, ByteTokenizer(), tmp_path, "train", **settings)
    assert (metadata.documents, metadata.tokens) == (2, 9)
    assert metadata.gzip_bytes == sum(len(gzip.compress(text.encode(), 9)) for text in TEXTS[:2])
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        pretokenize(TEXTS, ByteTokenizer(), tmp_path, "more", max_tokens=0)
    (tmp_path / "lines.jsonl").write_text('{"text": "abc"}\n' * 100)
    source, settings = Files([str(tmp_path / "lines.jsonl")]), {"shards": 4, "max_tokens": 100}
    metadata = pretokenize(source, ByteTokenizer(), tmp_path / "out", "train", **settings)
    assert [shard.tokens for shard in metadata.shards] == [25, 25, 25, 25]


def test_the_tokenizer_is_kept(tmp_path):
    tokenizer = train_byte_level_bpe(TEXTS, 260)
    pretokenize(TEXTS, tokenizer, tmp_path, "train")
    source = FlatTokens(str(tmp_path), "train", 1, 4)
    assert source.tokenizer_path == tmp_path / "tokenizer.json"
    assert source.tokenizer_path.read_text(encoding="utf-8") == tokenizer.tokenizer_json
    assert source.tokenizer == tokenizer.identity

    source.tokenizer_path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json has sha256"):
        FlatTokens(str(tmp_path), "train", 1, 4)


def test_progress_counts_up(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a" * 2**20)
    calls = []
    source = Files([str(tmp_path)])
    for shards in (1, 3):
        calls.clear()
        out = tmp_path.parent / f"out{shards}"
        settings = {"shards": shards, "progress": lambda *call: calls.append(call)}
        pretokenize(source, ByteTokenizer(), out, "train", **settings)
        counted = [(counts["documents"], counts["tokens"], counts["bytes"]) for counts, _ in calls]
        assert counted == [(n, n * (2**20 + 2), n * 2**20) for n in (1, 2, 3)]
        fractions = [fraction for _, fraction in calls]
        assert fractions == pytest.approx([1 / 3, 2 / 3, 1], abs=1e-5)


def test_a_line_shows_counts_speed_and_the_time_left(monkeypatch, capsys):
    moments = iter([0.0, 2.0, 10.0])
    monkeypatch.setattr(command_line_module, "time", SimpleNamespace(monotonic=moments.__next__))
    line = ProgressLine()
    for tokens, fraction in ((100, 0.1), (200, 0.2), (1_300, 0.6)):
        line({"documents": 7, "tokens": tokens}, fraction)
    expected = "7 documents, 1,300 tokens, 120 tokens/s, 60% done, 8.0 s left\n"
    assert capsys.readouterr().err == expected


def test_a_bad_row_leaves_the_split_unfinished(tmp_path):
    """Settings may be corrected as long as nothing is written."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    other = Files([str(tmp_path / "a.jsonl")], field=TextField("body"))
    for source, message in (
        (other, "no column 'body'"),
        (["good", "bad \ud800"], "document 1 holds a lone surrogate at character 4"),
    ):
        with pytest.raises(ValueError, match=message):
            pretokenize(source, ByteTokenizer(), tmp_path, "train")
    with pytest.raises(FileNotFoundError, match="unfinished"):
        read_split(tmp_path / "train")
    pretokenize(["good"], ByteTokenizer(), tmp_path, "train")
    assert tokens_of(tmp_path) == [BOS, *b"good", EOS]


def test_a_tokenizer_that_cannot_end_a_document_is_an_error(tmp_path):
    tokenizer = train_byte_level_bpe(TEXTS, 260)
    renamed = tokenizer.tokenizer_json.replace("<|end_of_text|>", "<|stop|>")
    with pytest.raises(ValueError, match=r"which token of renamed ends a document.*--eos_token"):
        pretokenize(TEXTS, JsonTokenizer("renamed", renamed), tmp_path, "train")
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_write_is_an_error(tmp_path):
    for texts in ([], [""]):
        message = f"no text for the split 'train', but {len(texts)} empty documents"
        with pytest.raises(ValueError, match=message):
            pretokenize(texts, ByteTokenizer(), tmp_path, "train")
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty.jsonl").write_text("")
    source = Files([str(tmp_path / "empty.jsonl")])
    with pytest.raises(ValueError, match=f"no text .* and delete {tmp_path / 'out' / 'train'}"):
        pretokenize(source, ByteTokenizer(), tmp_path / "out", "train", shards=2)


def test_a_finished_split_stays(tmp_path):
    made = pretokenize(TEXTS, ByteTokenizer(), tmp_path, "train")
    assert pretokenize(TEXTS, ByteTokenizer(), tmp_path, "train") == made
    with pytest.raises(FileExistsError, match="is finished, with source"):
        pretokenize(Texts(["other"], {"dataset": "other"}), ByteTokenizer(), tmp_path, "train")
    frames_otherwise = ByteTokenizer()
    frames_otherwise.eos_id = 0
    with pytest.raises(FileExistsError, match="is finished, with eos_id 257, not 0"):
        pretokenize(TEXTS, frames_otherwise, tmp_path, "train")
    with pytest.raises(FileExistsError, match="is finished, with tokenizer"):
        pretokenize(TEXTS, train_byte_level_bpe(TEXTS, 260), tmp_path, "train")


def test_shards_are_made_one_by_one_or_together(tmp_path):
    (tmp_path / "lines.jsonl").write_text("".join(f'{{"text": "{n}"}}\n' for n in range(500)))
    source, target = Files([str(tmp_path / "lines.jsonl")]), ByteTokenizer()
    pretokenize(source, target, tmp_path / "together", "train", shards=3)
    for shard in (2, 0, 1):
        with pytest.raises(FileNotFoundError, match=r"unfinished|no data set"):
            FlatTokens(str(tmp_path / "alone"), "train", 1, 4)
        pretokenize_shard(source, target, tmp_path / "alone", "train", shard=shard, shards=3)
    assert files_of(tmp_path / "together") == files_of(tmp_path / "alone")
    expected = ([BOS, *str(n).encode(), EOS] for n in range(500))
    assert tokens_of(tmp_path / "alone") == list(itertools.chain(*expected))


def command_line(*arguments):
    return run_forked("-m", "data_tools.pretokenize", *arguments)


def test_command_line(tmp_path):
    (tmp_path / "texts").mkdir()
    contents = {"a.txt": b"first", "b.txt": b"second", "c.txt": b"\xff", "d.bin": b"\xff"}
    for name, content in contents.items():
        (tmp_path / "texts" / name).write_bytes(content)
    out = tmp_path / "out"
    arguments = [f"--dataset={tmp_path / 'texts'}", "--tokenizer=bytes", f"--out={out}"]
    arguments += ["--pattern=*.txt", "--gzip_baseline", "--max_tokens=1e9", "--workers=1"]
    failed = command_line(*arguments)
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1
    assert "c.txt is not UTF-8 text (byte 0): repair it, or" in failed.stderr

    done = command_line(*arguments, "--on_bad_row=skip")
    skipped = f"skipped: {tmp_path / 'texts' / 'c.txt'} is not UTF-8 text (byte 0)\n"
    assert (done.returncode, done.stderr) == (0, skipped)
    assert tokens_of(out) == [BOS, *b"first", EOS, BOS, *b"second", EOS]
    (metadata,) = out.glob("train/*/metadata.json")
    assert json.loads(metadata.read_text())["gzip_bytes"] > 0
    for entry in ("documents         2\n", "tokens            15\n", "skipped rows      1\n"):
        assert entry in done.stdout
    assert "bits per byte" in done.stdout

    again = command_line(*arguments)
    assert again.returncode == 0
    assert again.stdout.splitlines()[:4] == done.stdout.splitlines()[:4]
    other = command_line(*arguments, "--max_tokens=5")
    assert other.returncode == 2
    assert other.stderr.startswith("pretokenize: ") and "is finished, with source" in other.stderr


def test_other_folders_are_not_touched(tmp_path):
    (tmp_path / "file").write_text("a")
    with pytest.raises(FileExistsError, match="file is not a folder"):
        pretokenize(TEXTS, ByteTokenizer(), tmp_path / "file", "train")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("of a model")
    with pytest.raises(FileExistsError, match="not the tokenizer that was asked for"):
        pretokenize(TEXTS, train_byte_level_bpe(TEXTS, 260), tmp_path / "model", "train")
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "of a model"
    (tmp_path / "old" / "train").mkdir(parents=True)
    (tmp_path / "old" / "train" / "metadata.json").write_text("{}")
    with pytest.raises(FileExistsError, match="data set in another format"):
        pretokenize(TEXTS, ByteTokenizer(), tmp_path / "old", "train")


def test_shards_have_one_source(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n')
    a, b = (Files([str(tmp_path / f"{name}.jsonl")]) for name in "ab")
    target = (ByteTokenizer(), tmp_path / "out", "train")
    pretokenize_shard(a, *target, shards=2)
    with pytest.raises(FileExistsError, match=r"is finished, with source datasets .*a\.jsonl"):
        pretokenize_shard(b, *target, shard=1, shards=2)


def test_training_is_proposed_once_both_splits_are_there(tmp_path):
    folder = tmp_path / "my data"
    assert next_command(str(folder)) is None
    write_own_texts(folder)
    command = next_command(str(folder))
    expected = ["--fdl_config=experiments/own_text", f"--fdl.tokens={folder}"]
    assert shlex.split(command)[1:] == ["-m", "runner", *expected, f"--workdir={folder}_run"]


NUMBERED = [f"document {number % 900}" for number in range(1000)]  # the last hundred come twice


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    file = tmp_path_factory.mktemp("held_out") / "lines.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in NUMBERED))
    return Files([str(file)])


def documents(path, split):
    source = FlatTokens(str(path), split, 1, 32, seed=None, packed=False)
    batches = (source.batch(step) for step in range(source.steps_per_epoch))
    return [bytes(i for i in batch.tokens[0].tolist() if 0 < i < 256).decode() for batch in batches]


def make(source, out, split, **settings):
    pretokenize(source, ByteTokenizer(), out, split, **settings)


def test_the_parts_are_disjoint_and_whole(tmp_path, lines):
    make(lines, tmp_path, "train", part=Part(0.1, held_out=False))
    make(lines, tmp_path, "validation", part=Part(0.1, held_out=True))
    train, validation = documents(tmp_path, "train"), documents(tmp_path, "validation")
    assert sorted(train + validation) == sorted(NUMBERED)
    assert not set(train) & set(validation)
    assert 50 < len(validation) < 150
    again = Texts(reversed(NUMBERED))
    make(again, tmp_path / "other order", "validation", part=Part(0.1, held_out=True))
    expected = [text for text in reversed(NUMBERED) if text in set(validation)]
    assert documents(tmp_path / "other order", "validation") == expected


def test_the_parts_are_the_same_in_shards(tmp_path, lines):
    part = Part(0.1, held_out=True)
    make(lines, tmp_path / "one", "validation", part=part)
    make(lines, tmp_path / "three", "validation", part=part, shards=3)
    assert documents(tmp_path / "one", "validation") == documents(tmp_path / "three", "validation")
    with pytest.raises(FileExistsError, match=r"validation_fraction 0\.1, not 0\.2"):
        make(lines, tmp_path / "one", "validation", part=Part(0.2, held_out=True))


def test_a_part_without_documents_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"'validation'.*raise --validation_fraction"):
        make(["one", "two"], tmp_path, "validation", part=Part(1e-9, held_out=True))
    with pytest.raises(ValueError, match=r"'train'.*lower --validation_fraction=0\.9 if all"):
        make(["one", "one"], tmp_path, "train", part=Part(0.9, held_out=False))
    with pytest.raises(ValueError, match=r"between 0 and 1, not 1\.5"):
        Part(1.5, held_out=True)


@pytest.mark.parametrize("documents", [5, 30, 3_000])
def test_a_fraction_that_is_proposed_holds_out_something_and_not_most(documents):
    texts = [f"document {i}" for i in range(documents)]
    fraction = fraction_to_hold_out({hash_of(text): len(text) for text in texts})
    held_out = [text for text in texts if Part(fraction, held_out=True).has(text)]
    assert 0.01 * documents <= len(held_out) <= 0.5 * documents
    assert fraction <= 0.02 or documents < 1_000
    assert fraction_to_hold_out({hash_of("one document"): 12}) is None
    assert fraction_to_hold_out({0: 60, 2**64 - 1: 40}) is None  # each holds out 60 %


STORIES = ["one\n\nstory", "two", "ünï", "x" * 50, "end"]


def rows_of(source, shards=1, position=None):
    shares = (source.blocks(shard, shards, position) for shard in range(shards))
    return [row for share in shares for block in share for row in block.rows(source.field)]


@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("compressed", [False, True])
def test_documents_with_a_separator(tmp_path, monkeypatch, block_bytes, compressed):
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


def test_a_document_that_is_too_long_is_a_bad_row(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_ROW_BYTES", 20)
    monkeypatch.setattr(records, "BLOCK_BYTES", 8)
    (tmp_path / "a.txt").write_text("--".join(STORIES))
    rows = rows_of(row_source([str(tmp_path / "a.txt")], document_separator="--"))
    assert [row.text for row in rows] == ["one\n\nstory", "two", "ünï", None, "end"]
    assert "a.txt, byte 24 is longer than" in str(rows[3])
    with pytest.raises(ValueError, match="separator is empty"):
        row_source([str(tmp_path / "a.txt")], document_separator="")


@pytest.mark.parametrize("place", [".", "train", "texts.jsonl"])
def test_text_given_as_a_data_set(tmp_path, place):
    file = tmp_path / ("train/texts.jsonl" if place == "train" else "texts.jsonl")
    file.parent.mkdir(exist_ok=True)
    file.write_text('{"text": "a"}\n')
    given = tmp_path / "texts.jsonl" if place == "texts.jsonl" else tmp_path
    with pytest.raises(FileNotFoundError, match="pretokenize it first with python -m data_tools"):
        FlatTokens(str(given), "train", 1, 4)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("text")
    make(Files(["~/a.txt"]), Path("~/out/../data"), "train")
    assert document_lengths(tmp_path / "data" / "train").total() == 1
