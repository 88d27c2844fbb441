"""Flat tokens against loops over tokens and over documents, and refused files."""

import itertools
import json
import shutil
from collections import Counter

import jax
import numpy as np
import pytest
from forged_digests import sign
from jax.sharding import NamedSharding, PartitionSpec
from refusals import refusals

from lmlib.data.batch import has_whole_rows, place
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.permutation import permute
from lmlib.data.stages import Stages
from lmlib.data.stored.metadata import DamagedDataError
from lmlib.data.synthetic import Synthetic
from lmlib.parallel.mesh import make_mesh

FIELDS = ("tokens", "targets", "segment_ids", "positions", "loss_mask")


def reference_row(documents, index, length):
    """Sequence `index`, token by token; `documents` in the order in which they are stored."""
    flat = [(token, number) for number, document in enumerate(documents) for token in document]
    row = {field: [] for field in FIELDS}
    segment, position = 0, 0
    for p in range(index * length, (index + 1) * length):
        if p + 1 >= len(flat):
            values = (0, 0, 0, 0, False)
        else:
            (token, document), (target, next_document) = flat[p], flat[p + 1]
            begins = p == index * length or flat[p - 1][1] != document
            segment, position = (segment + 1, 0) if begins else (segment, position + 1)
            values = (token, target, segment, position, document == next_document)
        for field, value in zip(FIELDS, values, strict=True):
            row[field].append(value)
    return row


def assert_rows(batch, rows):
    for field in rows[0]:
        array = getattr(batch, field)
        assert array.dtype == (np.bool_ if field == "loss_mask" else np.int32)
        np.testing.assert_array_equal(array, [row[field] for row in rows], err_msg=field)


@pytest.mark.parametrize("length", [1, 7, 64, 1000])
@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("seed", [None, 11])
def test_batches_match_a_loop_over_tokens(example, example_documents, length, batch_size, seed):
    source = FlatTokens(str(example), "train", batch_size, length, seed)
    total = sum(map(len, example_documents))
    assert source.sequences == int(np.ceil((total - 1) / length))
    steps = min(-(-2 * source.sequences // batch_size) + 1, 60)  # more than two epochs, if short
    for step in range(steps):
        expected = []
        for number in range(step * batch_size, (step + 1) * batch_size):
            epoch, index = divmod(number, source.sequences)
            if seed is not None:
                index = int(permute(np.array(index), source.sequences, seed=seed, epoch=epoch))
            expected.append(reference_row(example_documents, index, length))
        assert_rows(source.batch(step), expected)


@pytest.mark.parametrize("rows", [slice(0, 3), slice(2, 6), slice(5, 5), slice(0, 6, 2)])
def test_some_rows_equal_those_of_the_whole_batch(example, rows):
    flat = FlatTokens(str(example), "train", 6, 10)
    sources = flat, Synthetic(97, 6, 33, seed=4, teacher_k=2)
    for source, step in itertools.product(sources, (0, 3, flat.steps_per_epoch - 1)):
        whole, part = source.batch(step), source.batch(step, rows)
        jax.tree.map(lambda w, p: np.testing.assert_array_equal(w[rows], p), whole, part)


@pytest.mark.parametrize("last", [[], [7, 8]])
def test_bytes_per_target_counts_what_the_loss_counts(tmp_path, write_documents, last):
    write_documents(tmp_path, [[1, 2, 3], [], [4], last], shards=3)
    source = FlatTokens(str(tmp_path), "train", 2, 2, epochs=1)
    targets = sum(source.batch(step).loss_mask.sum() for step in range(source.steps_per_epoch))
    assert source.bytes_per_target == source.metadata.bytes / targets


@pytest.mark.parametrize(("setting", "message"), refusals(__file__, "flat tokens"))
def test_settings_that_make_no_sense(example, setting, message):
    settings = {"path": str(example), "split": "train", "batch_size": 2, "sequence_length": 2}
    error = FileNotFoundError if setting.keys() & {"path", "split"} else ValueError
    with pytest.raises(error, match=message):
        FlatTokens(**(settings | setting))


def test_unreadable_data_is_refused(tmp_path, example, write_documents):
    with pytest.raises(ValueError, match="step must be at least 0, not -1"):
        FlatTokens(str(example), "train", 2, 2).batch(-1)
    write_documents(tmp_path / "one", [[1]])
    with pytest.raises(ValueError, match="at least 2"):
        FlatTokens(str(tmp_path / "one"), "train", 1, 1)
    shutil.copytree(example, tmp_path / "copy")
    shard = tmp_path / "copy" / "train" / "shard_00002_of_00004"
    content = json.loads((shard / "metadata.json").read_text())
    (shard / "metadata.json").write_text(json.dumps(content | {"documents": 999}))
    sign(shard)
    with pytest.raises(DamagedDataError, match=r"metadata\.json promises \(999,\)"):
        FlatTokens(str(tmp_path / "copy"), "train", 1, 1)
    shutil.rmtree(shard / "tokens")
    with pytest.raises(DamagedDataError, match="shard_00002_of_00004/tokens cannot be opened"):
        FlatTokens(str(tmp_path / "copy"), "train", 1, 1)


def read_everything(path):
    source = FlatTokens(str(path), "train", 4, 10, seed=None)
    for step in range(source.steps_per_epoch):
        source.batch(step)


def data_files(path):
    return sorted((path / "train").glob("shard_*/*/c/*"))


@pytest.mark.landing
def test_every_flipped_byte_is_noticed(tmp_path, write_documents):
    write_documents(tmp_path, [list(range(1, 20)), [0] * 20], file_length=16)
    for file in data_files(tmp_path):
        whole = file.read_bytes()
        # The unused part of an index repeats itself: its ends and some places between will do.
        middle = np.random.default_rng(0).integers(0, len(whole), 30).tolist()
        for at in {at % len(whole) for at in (*range(-60, 60), *middle)}:
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            file.write_bytes(damaged)
            with pytest.raises(DamagedDataError, match=str(file.parent.parent)):
                read_everything(tmp_path)
        file.write_bytes(whole)
    read_everything(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
def test_each_document_comes_as_it_was_written(tmp_path, write_documents, shards):
    documents = [[n % 7 + 1] * (n % 4) for n in range(600)]  # some of them empty
    write_documents(tmp_path, documents, shards=shards)
    found = list(FlatTokens(str(tmp_path), "train", 1, 8).each_document())
    assert [ids.tolist() for ids, _ in found] == documents
    assert all(is_target[1:].all() and not is_target[:1].any() for _, is_target in found)


S = 9


def document_row(document, length):
    """A row that holds one document, cut to the sequence length, token by token."""
    cut = document[: length + 1]
    used = max(0, len(cut) - 1)
    padding = [0] * (length - used)
    return {
        "tokens": cut[:used] + padding,
        "targets": cut[1:] + padding,
        "segment_ids": [1] * used + padding,
        "positions": list(range(used)) + padding,
        "loss_mask": [True] * used + [False] * (length - used),
    }


@pytest.mark.parametrize("seed", [None, 3])
def test_one_document_in_each_row(example, example_documents, seed):
    source = FlatTokens(str(example), "train", 7, S, seed=seed, packed=False)
    assert source.sequences == len(example_documents)
    for step in range(2 * source.steps_per_epoch):
        expected, numbers = [], []
        for p in range(step * 7, step * 7 + 7):
            epoch, number = divmod(p, len(example_documents))
            if seed is not None:
                points = np.array(number)
                number = int(permute(points, len(example_documents), seed=seed, epoch=epoch))
            numbers.append(number)
            expected.append(document_row(example_documents[number], S))
        assert_rows(source.batch(step), expected)
        assert source.sequence_numbers(step).tolist() == numbers


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("epochs", [1, 3])
def test_so_many_epochs(example, packed, epochs):
    source = FlatTokens(str(example), "train", 4, S, epochs=epochs, packed=packed)
    rows = np.concatenate([source.sequence_numbers(step) for step in range(source.batches)])
    counted = np.bincount(rows[rows >= 0], minlength=source.sequences)
    assert (counted == epochs).all()
    # Rows past the last epoch are padding. Only the last batch has any.
    assert (rows[: epochs * source.sequences] >= 0).all()
    assert len(rows) - epochs * source.sequences < 4
    beyond = source.batch(source.batches)
    assert not beyond.loss_mask.any() and not beyond.segment_ids.any()


def test_positions_and_segments_along_the_row_are_for_those_who_ask(example):
    usual, along, across = (
        FlatTokens(str(example), "train", 3, S, **settings)
        for settings in ({}, {"reset_positions": False}, {"attend_across_documents": True})
    )
    for step in range(usual.steps_per_epoch):
        batch = usual.batch(step)
        used = batch.segment_ids > 0
        for name in FIELDS:
            expected = getattr(batch, name)
            positions = np.where(used, np.arange(S), 0) if name == "positions" else expected
            segments = used if name == "segment_ids" else expected
            np.testing.assert_array_equal(getattr(along.batch(step), name), positions)
            np.testing.assert_array_equal(getattr(across.batch(step), name), segments)
    assert max(usual.batch(step).segment_ids.max() for step in range(5)) > 1


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        ({}, False),
        ({"begin_with_documents": True}, False),
        ({"packed": False}, True),
        ({"attend_across_documents": True}, True),
    ],
)
def test_whole_rows_hold_one_segment_each(example, settings, whole):
    source = FlatTokens(str(example), "train", 3, S, epochs=2, **settings)
    assert source.whole_rows == whole
    segments = np.concatenate([source.batch(step).segment_ids for step in range(source.batches)])
    # Ones, then padding.
    assert np.array_equal(segments, np.minimum.accumulate(segments > 0, axis=1)) == whole
    mixed = Mixture({"a": source_of(example, **settings)}, [Stage({"a": 1})])
    apart = Mixture(
        {"a": source_of(example, **settings), "b": source_of(example)}, [Stage({"a": 1, "b": 1})]
    )
    stages = Stages([(0, source_of(example)), (1, source_of(example, **settings))])
    assert (mixed.whole_rows, apart.whole_rows) == (whole, False)
    rows = NamedSharding(make_mesh(devices=jax.devices()[:1]), PartitionSpec())
    for step, expected in ((0, False), (1, whole)):
        batch = place(stages, step, rows)
        assert batch.whole_rows == has_whole_rows(stages.at(step)) == expected


def test_wrong_whole_rows_are_refused(example):
    source = source_of(example)
    source.whole_rows = True
    rows = NamedSharding(make_mesh(devices=jax.devices()[:1]), PartitionSpec())
    with pytest.raises(ValueError, match="FlatTokens, step 2: whole_rows is True, but a row holds"):
        place(source, 2, rows)


def source_of(example, **settings):
    return FlatTokens(str(example), "train", 3, S, **settings)


@pytest.mark.parametrize("length", [2, 9, 40])
@pytest.mark.parametrize("seed", [None, 3])
def test_rows_that_begin_with_a_document(example, example_documents, length, seed):
    """An epoch predicts each of a document's first tokens once, from all tokens before it: its
    (position, token, target) triples equal the ones of a loop over documents."""
    source = FlatTokens(str(example), "train", 4, length, seed=seed, begin_with_documents=True)
    expected = Counter(
        (position, *cut[position : position + 2])
        for cut in (document[: length + 1] for document in example_documents)
        for position in range(len(cut) - 1)
    )
    for epoch in range(2):
        found = Counter()
        for row in range(epoch * source.sequences, (epoch + 1) * source.sequences):
            batch = source.batch(row // 4, slice(row % 4, row % 4 + 1))
            (mask,), (positions,) = batch.loss_mask, batch.positions
            triples = np.stack([positions, batch.tokens[0], batch.targets[0]], axis=1)[mask]
            found.update(map(tuple, triples.tolist()))
            assert positions[0] == 0
            (used,) = batch.segment_ids > 0
            steps = np.diff(positions[used])
            assert ((steps == 1) | (positions[used][1:] == 0)).all()
        assert found == expected
