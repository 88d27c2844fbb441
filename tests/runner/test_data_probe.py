"""Whether a run that goes on would get the batches that it was trained on."""

import shutil

import pytest
from byte_texts import write_ids

from data_tools.hf_stream import HFStream
from lmlib.data import TokenizerIdentity
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.synthetic import Synthetic
from runner.training.data_probe import changed, probe

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
    [
        {"seed": 1},
        {"batch_size": 8},
        {"sequence_length": 8},
        {"packed": False},
        {"attend_across_documents": True},
        {"reset_positions": False},
    ],
    ids=str,
)
def test_another_order_is_a_change(folder, settings):
    found = changed(tokens(folder, **settings), probe(tokens(folder), 3))
    assert found is not None and "is not what it was" in found


def test_other_texts_are_a_change(folder, tmp_path):
    write_ids(tmp_path, [*DOCUMENTS[:-1], [7]])
    assert changed(tokens(tmp_path), probe(tokens(folder), 3)) is not None


def test_a_mixture_that_changes_later_is_told_by_the_last_batch():
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
