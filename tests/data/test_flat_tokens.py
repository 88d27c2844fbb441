import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from byte_texts import BOS, EOS, TEXTS, write_ids, write_texts
from forged_digests import sign

from lmlib.data.batch import Batch
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.permutation import permute
from lmlib.data.stored.damage import DamagedDataError

FIELDS = ("tokens", "targets", "segment_ids", "positions", "loss_mask")


def reference_row(documents: list[list[int]], index: int, length: int) -> dict[str, list]:
    """Sequence `index`, token by token; `documents` in the order in which they are stored."""
    flat = [(token, number) for number, document in enumerate(documents) for token in document]
    row: dict[str, list] = {field: [] for field in FIELDS}
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


def assert_rows(batch: Batch, rows: list[dict[str, list]]) -> None:
    for field in FIELDS:
        array = getattr(batch, field)
        assert array.dtype == (np.bool_ if field == "loss_mask" else np.int32)
        np.testing.assert_array_equal(array, [row[field] for row in rows], err_msg=field)


@pytest.mark.parametrize("length", [1, 7, 64, 1000])
@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("seed", [None, 11])
def test_batches_match_a_loop_over_tokens(
    example: Path,
    example_documents: list[list[int]],
    length: int,
    batch_size: int,
    seed: int | None,
) -> None:
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


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_an_epoch_predicts_every_token_but_the_first_once(
    example: Path, example_documents: list[list[int]], batch_size: int
) -> None:
    source = FlatTokens(str(example), "train", batch_size, 13, seed=5, epochs=1)
    batches = [source.batch(step) for step in range(source.steps_per_epoch)]
    seen = np.concatenate([batch.targets[batch.segment_ids > 0] for batch in batches])
    flat = np.concatenate(example_documents)[1:]
    np.testing.assert_array_equal(np.sort(seen), np.sort(flat))
    # A document's first token is never a target, so each document but empty ones costs one.
    documents = sum(1 for document in example_documents if document)
    assert sum(int(batch.loss_mask.sum()) for batch in batches) == len(flat) + 1 - documents

    beyond = source.batch(source.steps_per_epoch)
    for field in FIELDS:
        assert not getattr(beyond, field).any()


def test_epochs_differ_and_repeat_the_same_sequences(example: Path) -> None:
    source = FlatTokens(str(example), "train", 1, 8, seed=0)
    first, second = (
        [
            source.batch(epoch * source.sequences + i).tokens.tobytes()
            for i in range(source.sequences)
        ]
        for epoch in (0, 1)
    )
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("rows", [slice(0, 3), slice(2, 6), slice(5, 5), slice(0, 6, 2)])
def test_some_rows_equal_those_of_the_whole_batch(example: Path, rows: slice) -> None:
    source = FlatTokens(str(example), "train", 6, 10)
    for step in (0, 3, source.steps_per_epoch - 1):
        whole, part = source.batch(step), source.batch(step, rows)
        jax.tree.map(lambda w, p: np.testing.assert_array_equal(w[rows], p), whole, part)


def test_properties(example: Path, example_documents: list[list[int]]) -> None:
    source = FlatTokens(str(example), "train", 4, 10)
    flat = np.concatenate(example_documents)
    assert source.metadata is not None
    assert len(source.metadata.shards) == 4
    assert source.tokens == len(flat)
    assert source.documents == len(example_documents)
    assert source.metadata.bytes == 2 * len(flat)
    assert source.max_token_id == flat.max()
    assert source.tokenizer_path is None
    assert source.steps_per_epoch == int(np.ceil(source.sequences / 4))
    assert source.batches is None
    assert FlatTokens(str(example), "train", 4, 10, epochs=1).batches == source.steps_per_epoch
    assert source.compressed_bits_per_byte == {}


@pytest.mark.parametrize("last", [[], [7, 8]])
def test_bytes_per_target_counts_what_the_loss_counts(
    tmp_path: Path, write_documents: Callable, last: list[int]
) -> None:
    write_documents(tmp_path, [[1, 2, 3], [], [4], last], shards=3)
    source = FlatTokens(str(tmp_path), "train", 2, 2, epochs=1)
    targets = sum(source.batch(step).loss_mask.sum() for step in range(source.steps_per_epoch))
    assert source.bytes_per_target == source.metadata.bytes / targets


def test_missing_data_set_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"python -m data_tools\.pretokenize"):
        FlatTokens(str(tmp_path / "nowhere"), "train", 1, 1)


def test_missing_split_lists_those_present(example: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no split 'test'; it has train"):
        FlatTokens(str(example), "test", 1, 1)


def test_unfinished_split_is_refused(tmp_path: Path, example: Path) -> None:
    shutil.copytree(example, tmp_path / "copy")
    (tmp_path / "copy" / "train" / "shard_00002_of_00004" / "metadata.json").unlink()
    with pytest.raises(FileNotFoundError, match="unfinished: shard_00002_of_00004 of 4 shards"):
        FlatTokens(str(tmp_path / "copy"), "train", 1, 1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"batch_size": 0}, "batch_size of at least 1, not 0"),
        ({"sequence_length": -2}, "sequence_length of at least 1, not -2"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_that_make_no_sense(example: Path, setting: dict, message: str) -> None:
    settings = {"path": str(example), "split": "train", "batch_size": 2, "sequence_length": 2}
    with pytest.raises(ValueError, match=message):
        FlatTokens(**(settings | setting))


def test_negative_step(example: Path) -> None:
    with pytest.raises(ValueError, match="step must be at least 0, not -1"):
        FlatTokens(str(example), "train", 2, 2).batch(-1)


def test_one_token_is_no_sequence(tmp_path: Path, write_documents: Callable) -> None:
    write_documents(tmp_path, [[1]])
    with pytest.raises(ValueError, match="at least 2"):
        FlatTokens(str(tmp_path), "train", 1, 1)


def read_everything(path: Path) -> None:
    source = FlatTokens(str(path), "train", 4, 10, seed=None)
    for step in range(source.steps_per_epoch):
        source.batch(step)


def data_files(path: Path) -> list[Path]:
    return sorted((path / "train").glob("shard_*/*/c/*"))


@pytest.mark.landing
def test_every_flipped_byte_is_noticed(tmp_path: Path, write_documents: Callable) -> None:
    write_documents(tmp_path, [list(range(1, 20)), [0] * 20], file_length=16)
    for file in data_files(tmp_path):
        whole = file.read_bytes()
        # The unused part of an index repeats itself: its ends and some places between will do.
        middle = np.random.default_rng(0).integers(0, len(whole), 30).tolist()
        for place in {place % len(whole) for place in (*range(-60, 60), *middle)}:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            file.write_bytes(damaged)
            with pytest.raises(DamagedDataError, match=str(file.parent.parent)):
                read_everything(tmp_path)
        file.write_bytes(whole)
    read_everything(tmp_path)


@pytest.mark.slow
def test_truncated_and_deleted_files_are_noticed(tmp_path: Path, example: Path) -> None:
    shutil.copytree(example / "train", tmp_path / "train")
    files = data_files(tmp_path)
    assert len(files) > 10
    for file in files:
        whole = file.read_bytes()
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            with pytest.raises(DamagedDataError, match=str(file.parent.parent)):
                read_everything(tmp_path)
        file.unlink()
        with pytest.raises(DamagedDataError, match=str(file.parent.parent)):
            read_everything(tmp_path)
        file.write_bytes(whole)
    read_everything(tmp_path)


def test_arrays_that_contradict_the_metadata_are_noticed(tmp_path: Path, example: Path) -> None:
    shutil.copytree(example / "train", tmp_path / "train")
    file = tmp_path / "train" / "shard_00000_of_00004" / "metadata.json"
    content = json.loads(file.read_text())
    content["tokens"] += 1
    file.write_text(json.dumps(content))
    sign(file.parent)
    with pytest.raises(DamagedDataError, match=r"metadata\.json promises"):
        read_everything(tmp_path)


def test_missing_array_is_noticed(tmp_path: Path, example: Path) -> None:
    shutil.copytree(example / "train", tmp_path / "train")
    shutil.rmtree(tmp_path / "train" / "shard_00001_of_00004" / "tokens")
    with pytest.raises(DamagedDataError, match="shard_00001_of_00004/tokens cannot be opened"):
        read_everything(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
def test_each_document_comes_as_it_was_written(tmp_path, shards):
    write_texts(tmp_path, shards)
    source = FlatTokens(str(tmp_path), "train", 1, 8)
    expected = [[BOS, *TEXTS[n].encode(), EOS] for s in range(shards) for n in range(s, 5, shards)]
    found = list(source.each_document())
    assert [ids.tolist() for ids, _ in found] == expected
    assert all(is_target[1:].all() and not is_target[0] for _, is_target in found)


def test_each_document_of_more_than_are_read_at_once(tmp_path):
    documents = [[n % 7 + 1] * (n % 4) for n in range(600)]  # some of them empty
    write_ids(tmp_path, documents)
    found = FlatTokens(str(tmp_path), "train", 1, 8).each_document()
    assert [ids.tolist() for ids, _ in found] == documents
