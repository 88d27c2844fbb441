"""Duplicates are found in all files, left out of all splits and shards, and listed."""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.held_out import Part
from data_tools.pretokenize.duplicates import (
    PERMUTATIONS,
    bands,
    duplicates_in,
    find_duplicates,
    read_duplicates,
)
from data_tools.pretokenize.texts import pretokenize
from data_tools.rows.files import Files
from data_tools.rows.source import Texts
from data_tools.tokenizer import ByteTokenizer
from lmlib.data.stored.metadata import read_split

REPOSITORY = Path(__file__).parents[2]
WORDS = [f"word{number}" for number in range(2000)]


def similarity(one, other):
    """The Jaccard similarity of the sets of five successive words."""
    first, second = (
        {tuple(words[at : at + 5]) for at in range(len(words) - 4)}
        for words in (one.lower().split(), other.lower().split())
    )
    return len(first & second) / len(first | second)


@given(st.lists(st.sampled_from(["a", "b", "", "A", "a ", "ß"]), max_size=12))
def test_the_first_of_equal_texts_stays(texts):
    found = find_duplicates(Texts(texts), "exact")
    firsts = [texts.index(text) for text in texts]
    removed = [(n, first) for n, first in enumerate(firsts) if n != first]
    assert [(each.removed, each.same_as) for each in found.removed] == [
        (f"document {number}", f"document {first}") for number, first in removed
    ]
    assert found.documents == len(texts)
    source = found.without(Texts(texts))
    rest = [row.text for block in source.blocks(0, 1) for row in block.rows(source.field)]
    assert rest == list(dict.fromkeys(texts))


def changed(words, count, rng):
    """The text of `words` with `count` of them replaced."""
    words = list(words)
    for place in rng.sample(range(len(words)), count):
        words[place] = f"new{rng.random()}"
    return " ".join(words)


def test_minhash_finds_similar_texts_and_no_others():
    """Against the sets themselves: the estimate's standard error is 0.035 at 0.8."""
    rng = random.Random(0)
    texts, pairs = [], []
    for number in range(150):
        words = rng.choices(WORDS, k=400)
        texts += [" ".join(words), changed(words, number % 30, rng)]
        pairs.append(similarity(*texts[-2:]))
    assert sum(0.7 < each < 0.9 for each in pairs) > 20
    found = find_duplicates(Texts(texts), "minhash", 0.8)
    removed = {int(each.removed.split()[1]): each for each in found.removed}
    assert all(number % 2 for number in removed)  # two different texts share nothing
    for number, exact in enumerate(pairs):
        each = removed.get(2 * number + 1)
        if exact > 0.9:
            assert each is not None
        if exact < 0.7:
            assert each is None
        if each is not None:
            assert each.same_as == f"document {2 * number}"
            assert abs(each.similarity - exact) < 0.15


def test_case_punctuation_and_short_texts():
    texts = ["One two three.", "one  TWO, three!", "one two", "?", "!", "?", "one two three four"]
    found = find_duplicates(Texts(texts), "minhash", 1.0)
    assert [(each.removed, each.same_as) for each in found.removed] == [
        ("document 1", "document 0"),
        ("document 5", "document 3"),
    ]


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.7, 0.8, 0.95, 1.0])
def test_bands_miss_at_most_a_twentieth(threshold):
    count = bands(threshold)
    rows = PERMUTATIONS // count
    assert 1 - (1 - threshold**rows) ** count >= 0.95
    if count > 1:  # half as many miss more
        assert 1 - (1 - threshold ** (2 * rows)) ** (count // 2) < 0.95


def test_shards_splits_and_workers_leave_out_the_same(tmp_path):
    rng = random.Random(0)
    texts = [str(rng.randrange(40)) * rng.randrange(1, 500) for _ in range(300)]
    texts += rng.choices(texts, k=200)
    for part in range(2):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[250 * part : 250 * part + 250])
        (tmp_path / f"{part}.jsonl").write_text("".join(lines))
    files = Files([str(tmp_path)], pattern="*.jsonl")
    expected = set(texts)
    for shards, workers in ((1, 0), (3, 2)):
        out = tmp_path / f"out{shards}"
        found = duplicates_in(out / "duplicates.jsonl", files, "exact", 0.8, workers=workers)
        source, kept = found.without(files), 0
        for split, held_out in (("train", False), ("validation", True)):
            part = Part(0.2, held_out)
            made = pretokenize(source, ByteTokenizer(), out, split, part=part, shards=shards)
            kept += made.documents
        assert kept == len(expected)
        assert read_split(out / "train").shards[0].source["duplicates"] == 500 - len(expected)
    one, other = (tmp_path / f"out{shards}" / "duplicates.jsonl" for shards in (1, 3))
    assert one.read_bytes() == other.read_bytes()


def test_the_list_is_used_again_only_for_the_same_source_and_method(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 3)
    source, file = Files([str(tmp_path / "a.jsonl")]), tmp_path / "out" / "duplicates.jsonl"
    found = duplicates_in(file, source, "exact", 0.8)
    assert read_duplicates(file) == found
    assert [json.loads(line)["removed"] for line in file.read_text().splitlines()] == [
        *(2, f"{tmp_path / 'a.jsonl'}, byte 14", f"{tmp_path / 'a.jsonl'}, byte 28")
    ]
    assert duplicates_in(file, source, "exact", 0.5) == found
    with pytest.raises(FileExistsError, match=r"another source, or by another method"):
        duplicates_in(file, source, "minhash", 0.8)
    (tmp_path / "a.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(FileExistsError, match=r"another source, or by another method"):
        duplicates_in(file, Files([str(tmp_path / "a.jsonl")]), "exact", 0.8)
    content = file.read_text()
    for stop in (0, 10, len(content) - 9, content.index("\n") + 1):
        file.write_text(content[:stop])
        with pytest.raises(ValueError, match=r"duplicates\.jsonl is damaged"):
            read_duplicates(file)


@pytest.mark.landing
def test_the_command_says_how_many_it_left_out(tmp_path):
    texts = ["one two three four five six", "ONE two three four five six!", "other words"]
    lines = (json.dumps({"text": text}) + "\n" for text in itertools.chain(texts, texts))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    flags = ["--dataset=a.jsonl", "--tokenizer=bytes", "--out=out", "--deduplicate=minhash"]

    def run(*more):
        command = [sys.executable, "-m", "data_tools.pretokenize", *flags, *more]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={"PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
        )

    done = run("--workers=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("duplicates: 4 of 6 texts, 66.7%, in ")
    assert read_split(tmp_path / "out/train").documents == 2
    assert (
        "threshold of similarity must be in (0, 1], not 2.0"
        in run("--minhash_threshold=2", "--out=new").stderr
    )
