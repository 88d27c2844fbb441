"""A resumed run reads the right batches, and so does each of its processes."""

import dataclasses
import json
import shutil

import fiddle as fdl
import numpy as np
import pytest
from byte_texts import write_ids
from small_experiment import small

from data_tools.hf_stream.source import HFStream
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.stages import Stages
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.synthetic import Synthetic
from runner.processes.agreement import difference_of_reads
from runner.training.data_probe import changed, probe, read_by_this_process

DOCUMENTS = [[number % 250 + 1] * (number % 7 + 1) for number in range(200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens")
    write_ids(path, DOCUMENTS)
    return path


def tokens(path, **settings):
    usual = {"split": "train", "batch_size": 4, "sequence_length": 16, "seed": 0}
    return FlatTokens(str(path), **usual | settings)


def test_the_same_data_elsewhere_is_no_change(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert changed(tokens(tmp_path / "elsewhere"), probe(tokens(folder), 3)) is None


@pytest.mark.parametrize(
    "settings",
    [{"seed": 1}, {"packed": False}, {"attend_across_documents": True}, {"reset_positions": False}],
    ids=str,
)
def test_another_order_is_a_change(folder, settings):
    found = changed(tokens(folder, **settings), probe(tokens(folder), 3))
    assert found is not None and "is not what it was" in found


@pytest.mark.parametrize(
    ("batch_size", "told"),
    [
        (2, "so rows 6 to 11, counted from 0, would repeat"),
        (8, "so rows 12 to 23, counted from 0, would be left out"),
    ],
)
def test_rows_that_another_batch_size_repeats_or_leaves_out_are_named(folder, batch_size, told):
    was, now = tokens(folder), tokens(folder, batch_size=batch_size)
    found = changed(now, probe(was, 3))
    assert found is not None and found.startswith(
        f"its batches had 4 rows of 16 tokens, and these have {batch_size} rows of 16 tokens, "
    )
    assert told in found and f"later_stage(begin=3, batch_size={batch_size})" in found
    rows = np.concatenate([was.sequence_numbers(step) for step in range(8)])
    np.testing.assert_array_equal(rows[3 * batch_size :][:2], now.sequence_numbers(3)[:2])
    # The new stages change nothing before, and go on with row 12.
    staged = Stages([(0, was), (3, now)])
    assert changed(staged, probe(was, 3)) is None
    np.testing.assert_array_equal(
        staged.batch(3, slice(0, 2)).tokens, was.batch(3, slice(0, 2)).tokens
    )


def test_another_batch_size_is_a_change_though_the_rows_looked_at_agree(folder):
    was, now = (tokens(folder, batch_size=size) for size in (16, 32))
    found = changed(now, probe(was, 1))
    assert found is not None and "rows 16 to 31, counted from 0, would be left out" in found


def test_a_later_change_of_a_mixture_is_found_by_the_last_batch():
    sources = {name: Synthetic(300, 16, 8, seed=seed) for name, seed in (("one", 1), ("two", 2))}
    even, other = Stage({"one": 1, "two": 1}), Stage({"one": 1}, begin=3)
    constant, changing = Mixture(sources, [even]), Mixture(sources, [even, other])
    assert changed(changing, probe(constant, 3)) is None
    assert changed(changing, probe(constant, 5)) == (
        "the batch of step 5 is not what it was: other texts, or another order"
    )


def test_another_tokenizer_is_named_even_where_the_ids_agree(tmp_path):
    for name in ("bytes", "letters"):
        write_ids(tmp_path / name, DOCUMENTS, tokenizer=TokenizerIdentity(name, None))
    found = changed(tokens(tmp_path / "letters"), probe(tokens(tmp_path / "bytes"), 1))
    assert found is not None and "'bytes'" in found and "'letters'" in found


def test_a_stream_and_stored_tokens_are_not_taken_for_each_other(folder, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "hello"}\n')
    stream = HFStream(str(file), "bytes", 4, 16)
    for one, other in ((stream, tokens(folder)), (tokens(folder), stream)):
        found = changed(one, probe(other, 2))
        assert found is not None
    assert changed(stream, probe(stream, 2)) is None


class OwnRows(Synthetic):
    """A source of a user's that reads a file and says nothing of it."""

    def __init__(self, file):
        super().__init__(300, 8, 16, seed=int(np.loadtxt(file)))


def as_gathered(read):
    facts = {"host": "here"} | {name: dataclasses.asdict(each) for name, each in read.items()}
    return json.loads(json.dumps(facts))


@pytest.fixture
def difference(tmp_path, monkeypatch):
    """Returns the output of processes for a config, each in a folder written by one of `write`."""

    def difference(cfg, *write):
        seen = []
        for number, wrote in enumerate(write):
            folder = tmp_path / f"process_{number}"
            folder.mkdir()
            monkeypatch.chdir(folder)
            wrote(folder)
            seen.append(as_gathered(read_by_this_process(fdl.build(cfg))))
        return difference_of_reads(seen)

    return difference


def stored(path="data"):
    return fdl.Config(FlatTokens, path, "train", batch_size=4, sequence_length=16)


def test_other_texts_are_named_though_the_first_rows_agree(difference, tmp_path):
    cfg = small()
    cfg.data = stored()
    cfg.data.seed = None  # rows in the order of the documents; the last document differs
    other = [*DOCUMENTS[:-1], [7] * len(DOCUMENTS[-1])]
    found = difference(
        cfg,
        lambda folder: write_ids(folder / "data", DOCUMENTS),
        lambda folder: write_ids(folder / "data", other),
    )
    assert found is not None
    assert found.startswith("data of process 1 differs from process 0 (")
    for number in range(2):
        assert f"{tmp_path}/process_{number}/data/train on " in found
    rows = [FlatTokens(f"{tmp_path}/process_{n}/data", "train", 4, 16, None) for n in (0, 1)]
    np.testing.assert_array_equal(rows[0].batch(0).tokens, rows[1].batch(0).tokens)


def writes(file, *contents):
    """Functions that write the working folders of processes."""
    return [lambda folder, text=text: (folder / file).write_text(text) for text in contents]


def ids(*names):
    def write(folder, name):
        identity = TokenizerIdentity(name, None)
        write_ids(folder / "data", DOCUMENTS, tokenizer=identity)

    return [lambda folder, name=name: write(folder, name) for name in names]


LINES = [f'{{"text": "{text}"}}\n' for text in ("hello", "world")]


@pytest.mark.parametrize(
    ("data", "write", "agree"),
    [
        pytest.param(stored(), ids("bytes", "bytes", "bytes"), True, marks=pytest.mark.landing),
        (stored(), ids("bytes", "letters"), False),
        (fdl.Config(OwnRows, "seed.txt"), writes("seed.txt", "3", "4"), False),  # told by its rows
        (fdl.Config(HFStream, "texts.jsonl", "bytes", 8, 16), writes("texts.jsonl", *LINES), False),
    ],
    ids=["copies", "another tokenizer", "a source of its own", "files of a stream"],
)
def test_processes_that_read_other_data_are_refused(difference, data, write, agree):
    cfg = small()
    cfg.data = data
    found = difference(cfg, *write)
    assert (found is None) == agree
    assert agree or "data of process 1 differs from process 0" in found


@pytest.mark.landing
def test_validation_and_each_part_of_a_mixture_are_compared(difference):
    cfg = small()
    sources = {"same": stored("same"), "other": stored("other")}
    cfg.validation = {
        "mixed": fdl.Config(Mixture, sources, [fdl.Config(Stage, {"same": 1, "other": 1})])
    }

    def write(folder, last):
        write_ids(folder / "same", DOCUMENTS)
        write_ids(folder / "other", [*DOCUMENTS, [last]])

    found = difference(cfg, lambda f: write(f, 1), lambda f: write(f, 1), lambda f: write(f, 2))
    assert found is not None
    assert found.startswith(
        "validation['mixed'].sources['other'] of process 2 differs from process 0"
    )
