"""Documents with a loss mask: stored, put whole into rows, and pairs of them."""

import filecmp
import re
from collections import Counter

import jax
import numpy as np
import pytest
import zarr
from folder_contents import files_of
from forged_digests import sign
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusals

from data_tools.inspect.verification import verify_split
from lmlib import llama
from lmlib.compute import Compute
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.shard_writer import ShardWriter
from lmlib.data.whole_documents import arranged, best_fit_decreasing
from lmlib.losses.next_token import batch_loss

SMALL = {"vocab_size": 300, "file_length": 16, "chunk_length": 4}
LENGTHS = [3, 7, 2, 9, 5, 4, 4, 8]  # tokens of documents whose ids tell where they belong


def documents(lengths=LENGTHS):
    return [10 * number + np.arange(length) for number, length in enumerate(lengths)]


def masks(lengths=LENGTHS):
    """The second half of each document, and its first token, which is never a target."""
    return [(np.arange(n) >= n // 2) | (np.arange(n) == 0) for n in lengths]


def begun(path, content="conversations", **more):
    return ShardWriter(path, "train", content=content, **SMALL | more)


def write(path, content="conversations", lengths=LENGTHS):
    writer = begun(path, content)
    for first in range(0, len(lengths), 2):
        two = slice(first, first + 2)
        writer.extend(
            np.concatenate(documents(lengths)[two]),
            np.array(lengths[two]),
            0,
            loss_mask=np.concatenate(masks(lengths)[two]),
            cut_documents=1,
        )
    writer.finish()
    return path / "train"


def rows_of(source):
    """For each row its documents' ids and whether each but the first is a target."""
    found = []
    for step in range(source.steps_per_epoch):
        batch = source.batch(step)
        for row in range(source.batch_size):
            segments = batch.segment_ids[row]
            ids, targets = [], []
            for segment in range(1, segments.max() + 1):
                here = np.flatnonzero(segments == segment)
                ids.append([*batch.tokens[row, here].tolist()])
                targets.append(batch.loss_mask[row, here].tolist())
                assert batch.positions[row, here].tolist() == [*range(len(here))]
                last = int(batch.targets[row, here[-1]])
                if last // 10 == ids[-1][0] // 10 and last:
                    ids[-1].append(last)
                else:
                    assert not targets[-1].pop()
            found.append((ids, targets))
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_each_conversation_lies_whole_in_one_row(tmp_path, packed):
    assert verify_split(write(tmp_path)) == []
    source = FlatTokens(str(tmp_path), "train", 1, 11, epochs=1, packed=packed)
    assert (source.content, source.pairs, source.bytes_per_target) == ("conversations", False, None)
    assert source.metadata.targets == sum(int(mask[1:].sum()) for mask in masks())
    assert source.metadata.cut_documents == 4
    rows = rows_of(source)
    assert len(rows) == source.sequences == (4 if packed else 8)
    found = {
        ids[0] // 10: (ids, targets) for row in rows for ids, targets in zip(*row, strict=True)
    }
    for number, (ids, mask) in enumerate(zip(documents(), masks(), strict=True)):
        assert found[number] == (ids.tolist(), mask[1:].tolist())
    again = FlatTokens(str(tmp_path), "train", 3, 11, epochs=1, packed=packed).batch(1)
    np.testing.assert_array_equal(again.tokens[0], source.batch(3).tokens[0])


def test_the_answers_of_a_pair_are_neighbours(tmp_path):
    folder = write(tmp_path, "pairs")
    assert verify_split(folder) == []
    source = FlatTokens(str(tmp_path), "train", 1, 24, epochs=1)
    assert source.pairs
    pairs = [
        (chosen[0] // 10, rejected[0] // 10)
        for ids, _ in rows_of(source)
        for chosen, rejected in zip(ids[::2], ids[1::2], strict=True)
    ]
    assert sorted(pairs) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    with pytest.raises(ValueError, match="leave attend_across_documents out"):
        FlatTokens(str(tmp_path), "train", 1, 24, attend_across_documents=True)
    with pytest.raises(ValueError, match=r"1 of the pairs in .* = 11 tokens, .* longest 12,"):
        FlatTokens(str(tmp_path), "train", 1, 11)


def test_too_long_conversations_are_refused(tmp_path):
    write(tmp_path)
    FlatTokens(str(tmp_path), "train", 1, 8)
    with pytest.raises(
        ValueError,
        match=r"1 of the conversations in .* have more than sequence_length \+ 1 = 8 tokens, the "
        "longest 9, .* take a sequence_length of 8, or prepare .* --max_length=8",
    ):
        FlatTokens(str(tmp_path), "train", 1, 7)


@given(lengths=st.lists(st.integers(0, 20)), capacity=st.integers(20, 50))
def test_packing_puts_each_unit_into_one_row(lengths, capacity):
    lengths_U = np.array(lengths, np.int64)
    row_U = best_fit_decreasing(lengths_U, capacity)
    fill = Counter[int]()
    for row, length in zip(row_U.tolist(), lengths, strict=True):
        fill[row] += length
    assert max(fill.values(), default=0) <= capacity
    assert sorted(fill) == list(range(len(fill)))
    free = list[int]()  # of each row, while the longest units come first
    for unit in sorted(range(len(lengths)), key=lambda unit: -lengths[unit]):
        free += [capacity] * int(row_U[unit] == len(free))
        enough = [room for room in free if room >= lengths[unit]]
        assert free[row_U[unit]] == min(enough), "another row had less room, but enough"
        free[row_U[unit]] -= lengths[unit]
    # At most one row is half empty: else two of them would be one.
    assert sum(2 * tokens < capacity for tokens in fill.values()) <= 1
    edges_U = np.concatenate([[0], np.cumsum(lengths_U)])
    rows = arranged(edges_U, capacity, packed=True)
    spans = [span for row in range(rows.rows) for span in rows.spans(row)]
    assert sorted(spans) == sorted(zip(edges_U[:-1].tolist(), edges_U[1:].tolist(), strict=True))


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=2, max_size=12),
    stops=st.lists(st.integers(0, 12)),
)
def test_an_abandoned_shard_is_continued_to_the_same_bytes(tmp_path_factory, lengths, stops):
    path = tmp_path_factory.mktemp("continued")

    def go(where, stop):
        if (where / "train/shard_00000_of_00001/metadata.json").exists():
            return
        writer = begun(where)
        for number in range(writer.position or 0, len(lengths)):
            if number == stop:
                return writer.close()
            writer.mark(number)
            writer.extend(
                documents(lengths)[number] % 300,
                np.array([lengths[number]]),
                0,
                loss_mask=masks(lengths)[number],
            )
        writer.finish()

    go(path / "whole", None)
    for stop in [*stops, None]:
        go(path / "parted", stop)
    assert files_of(path / "whole") == files_of(path / "parted")
    assert not filecmp.dircmp(path / "whole", path / "parted").left_only


def test_another_mask_cannot_go_on_with_a_shard(tmp_path):
    ids, lengths = np.arange(20), np.array([20])
    writer = begun(tmp_path)
    writer.extend(ids, lengths, 0, loss_mask=ids > 3)
    writer.close()
    with pytest.raises(ValueError, match="documents differ from those"):
        begun(tmp_path).extend(ids, lengths, 0, loss_mask=ids > 4)


@pytest.mark.parametrize(("content", "lengths", "mask", "message"), refusals(__file__, "documents"))
def test_documents_that_do_not_fit_are_refused(tmp_path, content, lengths, mask, message):
    loss_mask = None if mask is None else np.array(mask)
    with pytest.raises(ValueError, match=message):
        begun(tmp_path, content).extend(np.arange(4), np.array(lengths), 0, loss_mask=loss_mask)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [(1, 1, "has targets .*, but the arrays have"), (2, 7, "holds 7, which is neither 0 nor 1")],
)
def test_verify_compares_the_mask_with_the_metadata(tmp_path, place, value, message):
    folder = write(tmp_path, lengths=[6, 6])
    shard = folder / "shard_00000_of_00001"
    mask = zarr.open_array(shard / "loss_mask")
    mask[place] = value
    sign(shard)
    assert re.search(message, " ".join(damage.reason for damage in verify_split(folder)))


@pytest.mark.slow
def test_the_loss_of_a_row_is_the_sum_of_those_of_its_conversations(tmp_path):
    rng = np.random.default_rng(0)
    writer = ShardWriter(tmp_path, "train", content="conversations", vocab_size=64)
    lengths = rng.integers(3, 30, 40)
    tokens = rng.integers(0, 64, lengths.sum())
    writer.extend(tokens, lengths, 0, loss_mask=rng.random(len(tokens)) < 0.5)
    made = writer.finish()
    model = llama(vocab=64, embed=32, layers=2, heads=2, mlp=64, key=jax.random.key(0))

    def loss(packed):
        source = FlatTokens(str(tmp_path), "train", 1, 63, packed=packed)
        total, targets = 0.0, 0
        compute = Compute(dtype="float32")
        of_batch = jax.jit(lambda batch: batch_loss(model, batch, compute)[0].loss_sum)
        for step in range(source.steps_per_epoch):
            batch = source.batch(step)
            total += float(of_batch(batch))
            targets += int(batch.loss_mask.sum())
        return total, targets, source.sequences

    (together, targets, rows), (alone, targets_alone, documents) = loss(True), loss(False)
    assert targets == targets_alone == made.targets
    assert rows < documents == 40
    np.testing.assert_allclose(together, alone, rtol=1e-5)
