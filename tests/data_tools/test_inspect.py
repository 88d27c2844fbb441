"""Descriptions, samples, verification and batches of small data sets, against lists by hand."""

import hashlib
import json
import re
import shutil
from collections import Counter

import numpy as np
import pytest
import zarr
from byte_texts import BOS, EOS, RAGGED, TEXTS, write_ids, write_texts, writer_of_texts
from folder_contents import files_of
from forged_digests import sign
from forked_processes import run_forked
from refusals import refusals
from seqax_data import write_seqax

from data_tools.inspect.batches import is_masked, row_text
from data_tools.inspect.description import (
    Sample,
    describe_split,
    document_lengths,
    samples,
    split_folders,
    usable_decoder,
)
from data_tools.inspect.showing import description_text, lengths_text, percentile, sample_text
from data_tools.inspect.verification import verify_split
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import TokenizerIdentity, read_split
from lmlib.data.stored.shard_writer import ShardWriter
from lmlib.data.stored.split import open_split
from lmlib.data.synthetic import Synthetic


def test_a_finished_split(tmp_path):
    folder = write_texts(tmp_path, shards=2)
    split = describe_split(folder)
    size = sum(len(text.encode()) for text in TEXTS)
    tokens = size + 2 * 5
    assert (split.format, split.shards, split.unfinished) == ("lmlib", 2, {})
    assert split.totals == read_split(folder)
    assert (split.totals.documents, split.totals.tokens) == (5, tokens)
    assert split.disk_bytes == sum(map(len, files_of(folder).values()))

    lines = description_text(split).splitlines()
    assert lines[0] == str(folder)
    shown = dict(map(str.strip, line.strip().split("  ", 1)) for line in lines[1:])
    assert shown["text"].startswith(f"{size} bytes, ")
    expected = {
        "shards": "2 of 2 finished",
        "tokens": f"{tokens}",
        "documents": f"5, {tokens / 5:.1f} tokens each on average",
        "framing": f"BOS {BOS}, EOS {EOS}",
        "vocabulary": "258 ids",
    }
    assert shown | expected == shown


def test_an_unfinished_split(tmp_path):
    folder = write_texts(tmp_path, shards=3)
    shutil.rmtree(folder / "shard_00001_of_00003")
    shutil.rmtree(folder / "shard_00002_of_00003")
    writer = writer_of_texts(tmp_path, 1, 3)
    writer.append(np.zeros(70, np.int64), text_bytes=70)
    writer.close()
    split = describe_split(folder)
    assert (split.shards, split.totals.documents) == (3, 2)
    whole_files = {"shard_00001_of_00003": 64, "shard_00002_of_00003": 0}  # of 32
    assert split.unfinished == whole_files
    assert "1 of 3 finished" in description_text(split)
    assert "shard_00001_of_00003, 64 tokens on disk so far" in description_text(split)
    assert document_lengths(folder).total() == 2

    shutil.rmtree(folder / "shard_00000_of_00003")
    begun = describe_split(folder)
    totals = begun.totals
    assert (totals.documents, totals.vocab_size, totals.max_token_id) == (0, 258, -1)
    assert totals.tokenizer == TokenizerIdentity("bytes", None)
    reasons = [(damage.path.name, damage.reason) for damage in verify_split(folder)]
    assert ("shard_00001_of_00003", "is unfinished") in reasons
    assert ("shard_00002_of_00003", "is missing") in reasons


def test_a_seqax_split(tmp_path):
    write_seqax(tmp_path, list(filter(None, RAGGED)))
    split = describe_split(tmp_path / "train")
    assert (split.format, split.totals.documents, split.totals.tokens) == ("seqax", 7, 66)
    text = description_text(split)
    for name in ("text", "vocabulary", "tokenizer"):
        assert re.search(rf"^  {name} +unknown$", text, re.MULTILINE)
    with pytest.raises(ValueError, match="has no checksums to verify: convert it"):
        verify_split(tmp_path / "train")


def test_document_lengths(tmp_path):
    lengths = document_lengths(write_ids(tmp_path, RAGGED))
    assert lengths == Counter(map(len, RAGGED))
    ordered = sorted(map(len, RAGGED))
    for percent, place in ((1, 0), (10, 0), (30, 2), (31, 3), (50, 4), (100, 9)):
        assert percentile(lengths, percent) == ordered[place]
    text = lengths_text(lengths).splitlines()
    shown = [re.sub(" +", " ", line) for line in text[1:8]]
    ranges = ("0", "1", "2 to 3", "4 to 7", "8 to 15", "16 to 31", "32 to 63")
    bars = (40, 14, 27, 27, 14, 0, 14)
    for line, name, count, bar in zip(shown, ranges, (3, 1, 2, 2, 1, 0, 1), bars, strict=True):
        assert line == f" {name} tokens {count} documents {'█' * bar}".rstrip()
    assert text[-2:] == [
        "  of documents   1%  10%  50%  90%  99%  100%",
        "  tokens, up to   0    0    2    8   40    40",
    ]
    assert lengths_text(Counter()) == "  no documents"


def test_samples_show_what_is_stored(tmp_path):
    folder = write_texts(tmp_path, shards=2)
    ordered = [text for shard in range(2) for text in TEXTS[shard::2]]
    flat = [i for text in ordered for i in (BOS, *text.encode(), EOS)]
    stored = open_split(folder)
    found = samples(stored, 5, length=20)
    assert found == samples(stored, 5, length=20)
    assert found != samples(stored, 5, length=20, seed=1)
    for sample in found:
        ids = [token for piece in sample.pieces for token in piece]
        assert ids == flat[sample.start : sample.start + 20]
        assert len(ids) == 20
        assert sample.begins_document == (ids[0] == BOS)
        assert all(piece[0] == BOS for piece in sample.pieces[1:])
        assert all(BOS not in piece[1:] for piece in sample.pieces)

    (whole,) = samples(stored, 1, length=1000)
    decode = usable_decoder(tmp_path, TokenizerIdentity("bytes", None))
    assert sample_text(whole, decode).splitlines()[1:6] == [
        "  ── a document begins ──",
        "    │ hello",
        "  ── a document begins ──",
        "    │ ünï",
        "    │ code",
    ]
    assert "    256 104 101 108 108 111 257\n" in sample_text(whole, None)
    assert usable_decoder(tmp_path, None) is None


def test_a_data_sets_own_tokenizer_decodes(tmp_path):
    tokenizer = train_byte_level_bpe(["low lower lowest"] * 9, 270)
    write_ids(
        tmp_path, [[1]], tokenizer=tokenizer.identity, tokenizer_json=tokenizer.tokenizer_json
    )
    alphabet = json.loads(tokenizer.tokenizer_json)["model"]["vocab"]
    decode = usable_decoder(tmp_path, tokenizer.identity)
    assert decode([0, *(alphabet[letter] for letter in "wolle"), 1]) == "wolle"


def test_empty_documents_and_empty_splits_are_whole(tmp_path):
    for number, documents in enumerate([RAGGED, [], [[]], [[], []], [[], [1]], [[1], []], [[1]]]):
        folder = write_ids(tmp_path / str(number), documents)
        assert verify_split(folder) == []
        assert document_lengths(folder).total() == len(documents)
        assert describe_split(folder).totals.tokens == sum(map(len, documents))
        assert sum(len(sample.pieces) for sample in samples(open_split(folder), 2)) == min(
            1, sum(map(len, documents))
        ) * sum(1 for document in documents if document)


def test_folders_that_are_not_data_sets_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        split_folders(tmp_path / "nothing")
    with pytest.raises(ValueError, match="neither a data set of flat tokens nor a split"):
        split_folders(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a folder"):
        split_folders(tmp_path / "file")
    folder = write_texts(tmp_path)
    assert split_folders(tmp_path) == split_folders(folder) == [folder]
    with pytest.raises(ValueError, match="is one shard: give its split"):
        split_folders(folder / "shard_00000_of_00001")


def command(folder, *arguments):
    return run_forked("-m", "data_tools.inspect", *arguments, cwd=folder)


def test_the_command_shows_a_data_set_or_a_batch(tmp_path):
    write_texts(tmp_path / "data")
    done = command(tmp_path, "data", "--samples=2", "--sample_length=200")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("data/train\n  format ")
    assert "  document lengths\n" in done.stdout and "    │ hello\n" in done.stdout
    options = ["--batch=1", "--rows=1", "--batch_size=3", "--sequence_length=9", "--seed=4"]
    done = command(tmp_path, "data", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step 1: 3 rows of 9 tokens, 1 shown\n\nrow 0 (sequence ")


def test_the_status_of_the_command(tmp_path):
    folder = write_texts(tmp_path / "data")
    (folder / "shard_00000_of_00001/tokens/c/1").unlink()
    done = command(tmp_path, "data", "--verify")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == [
        "damaged: data/train/shard_00000_of_00001/tokens/c/1: is missing",
        "data/train: damaged in 1 place",
    ]


def test_control_characters_do_not_reach_the_terminal():
    sample = Sample(start=0, begins_document=False, pieces=[[1]])
    text = sample_text(sample, lambda ids: "a\x1b[2J\r\tb\x00é\nc")
    assert text.splitlines()[1:] == ["    │ a\\x1b[2J\\r\tb\\x00é", "    │ c"]


def test_rows_of_a_batch(tmp_path):
    write_texts(tmp_path)
    source = FlatTokens(str(tmp_path), "train", 1, 12, seed=None)
    decode = usable_decoder(tmp_path, source.tokenizer)
    lines = row_text(source.batch(0), 0, decode, "sequence 0 of 9").splitlines()
    assert lines[:7] == [
        "row 0 (sequence 0 of 9): 12 tokens, 10 targets in the loss",
        "  places 0 to 6: segment 1, positions 0 to 6",
        "    tokens    256   104   101   108   108   111   257",
        "    targets   104   101   108   108   111   257 (256)",
        "    │ hello",
        "  ── another document; its first token is no target in the loss ──",
        "  places 7 to 8: segment 2, positions 0 to 1",
    ]
    assert "  places 9 to 11: segment 3, positions 0 to 2" in lines


def test_rows_whose_documents_share_a_segment_are_cut_as_well(tmp_path):
    write_texts(tmp_path)
    source = FlatTokens(
        str(tmp_path), "train", 1, 12, seed=None, attend_across_documents=True, epochs=1
    )
    text = row_text(source.batch(0), 0, None)
    cuts = ["places 0 to 6: segment 1", "places 7 to 8: segment 1", "places 9 to 11: segment 1"]
    assert re.findall(r"places .*: segment \d", text) == cuts
    text = row_text(source.batch(1000), 0, None)
    assert text == "row 0: 0 tokens, 0 targets in the loss\n  places 0 to 11: padding"


def test_text_of_a_conversation_that_is_no_target_is_marked(tmp_path):
    writer = ShardWriter(
        tmp_path,
        "train",
        content="conversations",
        vocab_size=258,
        tokenizer=TokenizerIdentity("bytes", None),
    )
    for text, answer in (("Hi? yes.", "yes."), ("Oh no", "no")):
        mask = np.arange(len(text)) >= text.index(answer)
        writer.extend(np.array([*text.encode()]), np.array([len(text)]), 0, loss_mask=mask)
    writer.finish()
    source = FlatTokens(str(tmp_path), "train", 1, 12, seed=None)
    assert is_masked(source) and not is_masked(Synthetic(64, 2, 5))
    batch, decode = source.batch(0), usable_decoder(tmp_path, source.tokenizer)
    text = row_text(batch, 0, decode, masked=True)
    assert [line for line in text.splitlines() if line[4:6] in ("┊ ", "│ ")] == [
        "    ┊ Hi? ",
        "    │ yes.",
        "    ┊ Oh ",
        "    │ no",
    ]
    assert text.splitlines()[0] == "row 0: 12 tokens, 6 targets in the loss"
    assert "targets (105)  (63)  (32)   121   101   115    46  (79)" in text
    described = description_text(describe_split(tmp_path / "train"))
    assert re.search(r"content +conversations\n", described)
    assert re.search(r"targets +6, 46.2% of the tokens\n", described)


DAMAGES = {
    "lost": lambda content: None,
    "truncated": lambda content: content[:-9],
    "flipped": lambda content: content[:1] + bytes([content[1] ^ 4]) + content[2:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_verify_finds_any_damaged_file(tmp_path, damage):
    folder = write_texts(tmp_path, shards=2)
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        content = file.read_bytes()
        damaged = damage(content)
        file.unlink() if damaged is None else file.write_bytes(damaged)
        damages = verify_split(folder)
        assert damages, file
        if file.parent.name == "c":
            assert [damage.path for damage in damages] == [file]
        file.write_bytes(content)
    assert verify_split(folder) == []


@pytest.mark.parametrize(("entry", "change", "expected"), refusals(__file__, "verify metadata"))
def test_verify_compares_metadata_with_the_arrays(tmp_path, entry, change, expected):
    folder = write_texts(tmp_path)
    file = folder / "shard_00000_of_00001/metadata.json"
    content = json.loads(file.read_text())
    content[entry] += change
    file.write_text(json.dumps(content))
    sign(file.parent)
    assert any(expected in damage.reason for damage in verify_split(folder))


@pytest.mark.parametrize(
    ("name", "place", "value", "expected"), refusals(__file__, "verify arrays")
)
def test_verify_compares_the_arrays_with_each_other(tmp_path, name, place, value, expected):
    folder = write_texts(tmp_path)
    array = zarr.open_array(folder / "shard_00000_of_00001" / name)
    array[place] = value  # with a valid checksum
    assert verify_split(folder)
    sign(folder / "shard_00000_of_00001")
    damages = verify_split(folder)
    assert any(re.search(expected, damage.reason) for damage in damages), damages


def test_verify_checks_the_tokenizer(tmp_path, capsys):
    content = '{"made": "up"}'
    identity = TokenizerIdentity("x", hashlib.sha256(content.encode()).hexdigest())
    folder = write_ids(tmp_path, RAGGED, tokenizer=identity, tokenizer_json=content)
    assert verify_split(folder) == []
    (tmp_path / "tokenizer.json").write_text(content + " ")
    (damage,) = verify_split(folder)
    assert damage.path == tmp_path / "tokenizer.json"
    (tmp_path / "tokenizer.json").unlink()
    assert [damage.reason for damage in verify_split(folder)] == ["is missing"]
    (tmp_path / "tokenizer.json").write_text(content)
    assert usable_decoder(tmp_path, identity) is None
    assert "ids are shown, since the tokenizer cannot be used" in capsys.readouterr().err
