"""Documents one by one, epochs, positions and attention, against loops over documents."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lmlib.data.batch import Batch, has_whole_rows, place
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.permutation import permute
from lmlib.data.stages import Stages
from lmlib.parallel.mesh import make_mesh

S = 9


def document_row(document: list[int], length: int) -> dict[str, list]:
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


def assert_rows(batch: Batch, rows: list[dict[str, list]]) -> None:
    for field in rows[0]:
        np.testing.assert_array_equal(
            getattr(batch, field), [row[field] for row in rows], err_msg=field
        )


@pytest.mark.parametrize("seed", [None, 3])
def test_one_document_in_each_row(
    example: Path, example_documents: list[list[int]], seed: int | None
) -> None:
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
def test_so_many_epochs(example: Path, packed: bool, epochs: int) -> None:
    source = FlatTokens(str(example), "train", 4, S, epochs=epochs, packed=packed)
    assert source.batches is not None
    rows = np.concatenate([source.sequence_numbers(step) for step in range(source.batches)])
    counted = np.bincount(rows[rows >= 0], minlength=source.sequences)
    assert (counted == epochs).all()
    # What is past the last epoch is padding, and only the last batch has any.
    assert (rows[: epochs * source.sequences] >= 0).all()
    assert len(rows) - epochs * source.sequences < 4
    beyond = source.batch(source.batches)
    assert not beyond.loss_mask.any() and not beyond.segment_ids.any()


def test_positions_along_the_row(example: Path) -> None:
    reset = FlatTokens(str(example), "train", 3, S)
    along = FlatTokens(str(example), "train", 3, S, reset_positions=False)
    for step in range(3):
        batch = along.batch(step)
        used = batch.segment_ids > 0
        np.testing.assert_array_equal(batch.positions, np.where(used, np.arange(S)[None], 0))
        for field in ("tokens", "targets", "segment_ids", "loss_mask"):
            np.testing.assert_array_equal(getattr(batch, field), getattr(reset.batch(step), field))


def test_attention_across_documents_is_for_those_who_ask(example: Path) -> None:
    apart = FlatTokens(str(example), "train", 3, S)
    across = FlatTokens(str(example), "train", 3, S, attend_across_documents=True)
    for step in range(apart.steps_per_epoch):
        batch = across.batch(step)
        used = apart.batch(step).segment_ids > 0
        np.testing.assert_array_equal(batch.segment_ids, used)
        np.testing.assert_array_equal(batch.loss_mask, apart.batch(step).loss_mask)
    assert max(apart.batch(step).segment_ids.max() for step in range(5)) > 1


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        ({}, False),
        ({"begin_with_documents": True}, False),
        ({"packed": False}, True),
        ({"attend_across_documents": True}, True),
    ],
)
def test_whole_rows_are_said_of_those_whose_every_row_is_one_segment(
    example: Path, settings: dict, whole: bool
) -> None:
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


def test_rows_that_are_called_whole_and_are_not_are_refused(example: Path) -> None:
    source = source_of(example)
    source.whole_rows = True
    rows = NamedSharding(make_mesh(devices=jax.devices()[:1]), PartitionSpec())
    with pytest.raises(ValueError, match="FlatTokens, step 2: whole_rows is True, but a row holds"):
        place(source, 2, rows)


def source_of(example: Path, **settings: bool) -> FlatTokens:
    return FlatTokens(str(example), "train", 3, S, **settings)


@pytest.mark.parametrize("length", [2, 9, 40])
@pytest.mark.parametrize("seed", [None, 3])
def test_rows_that_begin_with_a_document(
    example: Path, example_documents: list[list[int]], length: int, seed: int | None
) -> None:
    """An epoch predicts each of a document's first tokens once, from all before it: its (position,
    token, target) are those of a loop over documents."""
    source = FlatTokens(str(example), "train", 4, length, seed=seed, begin_with_documents=True)
    expected = Counter(
        (position, *cut[position : position + 2])
        for cut in (document[: length + 1] for document in example_documents)
        for position in range(len(cut) - 1)
    )
    for epoch in range(2):
        found: Counter[tuple[int, ...]] = Counter()
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


def test_rows_that_begin_with_a_document_are_full_of_short_ones(
    tmp_path: Path, write_documents: Callable
) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 300)
    write_documents(tmp_path, [[1] * length for length in lengths])
    source = FlatTokens(str(tmp_path), "train", 1, 63, begin_with_documents=True)
    assert source.sequences <= -(-lengths.sum() // 64) + 1


def test_settings_that_make_no_sense(example: Path) -> None:
    with pytest.raises(ValueError, match="epochs of at least 1, not 0"):
        FlatTokens(str(example), "train", 1, 1, epochs=0)


def test_no_document_starts_are_kept_in_memory(tmp_path: Path, write_documents: Callable) -> None:
    """A batch reads the starts near its tokens only: damage elsewhere is not met."""
    documents = [[n % 300] for n in range(3000)]
    write_documents(tmp_path, documents, chunk_length=8, file_length=4096)
    (file,) = tmp_path.glob("train/*/document_starts/c/0")
    content = bytearray(file.read_bytes())
    content[1024 * 8 + 4] ^= 1  # of the second thousand
    file.write_bytes(content)
    source = FlatTokens(str(tmp_path), "train", 1, 8, seed=None)
    for step in (0, 300):
        expected = [n % 300 for n in range(8 * step, 8 * step + 8)]
        assert source.batch(step).tokens.tolist() == [expected]
    with pytest.raises(ValueError, match="document_starts cannot be read"):
        source.batch(150)
