"""Reading data sets of seqax, which zarr itself writes."""

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqax_data import write_seqax

from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import DamagedDataError
from lmlib.experiment import Experiment
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.parallel.mesh import make_mesh

SMALL = [[1, 2], [3, 4, 5], [6, 7, 8]]


def reference_row(documents: Sequence[Sequence[int]], sequence: int, length: int) -> dict:
    """Row `sequence` in the stored order, from a plain list of documents."""
    flat = np.array(list(itertools.chain(*documents)))
    document = np.repeat(np.arange(len(documents)), [len(each) for each in documents])
    span = np.arange(sequence * length, min((sequence + 1) * length, len(flat) - 1))
    row = {
        "tokens": flat[span],
        "targets": flat[span + 1],
        "segment_ids": document[span] - document[span[0]] + 1,
        "positions": [int((document[span[:i]] == document[p]).sum()) for i, p in enumerate(span)],
        "loss_mask": document[span] == document[span + 1],
    }
    return {name: np.pad(values, (0, length - len(span))) for name, values in row.items()}


def test_three_documents_by_hand(tmp_path: Path) -> None:
    write_seqax(tmp_path, SMALL)
    source = FlatTokens(str(tmp_path), "train", 1, 8, seed=None)
    assert (source.tokens, source.documents, source.max_token_id) == (8, 3, 8)
    assert source.tokenizer is None and source.metadata is None and source.bytes_per_target is None
    batch = source.batch(0)
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 4, 5, 6, 7, 0]])
    np.testing.assert_array_equal(batch.targets, [[2, 3, 4, 5, 6, 7, 8, 0]])
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 2, 2, 2, 3, 3, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 0, 1, 2, 0, 1, 0]])
    np.testing.assert_array_equal(batch.loss_mask, [[1, 0, 1, 1, 0, 1, 1, 0]])


@settings(max_examples=20)
@given(
    documents=st.lists(
        st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), min_size=1, max_size=6
    ).filter(lambda documents: sum(map(len, documents)) > 1),
    length=st.integers(1, 12),
)
def test_batches_match_numpy(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], length: int
) -> None:
    path = tmp_path_factory.mktemp("seqax")
    write_seqax(path, documents)
    source = FlatTokens(str(path), "train", 1, length, seed=None, epochs=1)
    assert source.batches == -(-(sum(map(len, documents)) - 1) // length)
    for step in range(source.batches):
        batch = source.batch(step)
        for name, expected in reference_row(documents, step, length).items():
            np.testing.assert_array_equal(getattr(batch, name)[0], expected, err_msg=name)


def test_both_splits(tmp_path: Path) -> None:
    write_seqax(tmp_path, SMALL)
    write_seqax(tmp_path, [[9, 9, 9]], "validation")
    validation, train = (
        FlatTokens(str(tmp_path), split, 1, 2) for split in ("validation", "train")
    )
    assert validation.max_token_id == 9
    assert validation.contents().keys() == {str(tmp_path / "validation")}
    assert set(validation.contents().values()).isdisjoint(train.contents().values())
    with pytest.raises(FileNotFoundError, match="it has train, validation"):
        FlatTokens(str(tmp_path), "test", 1, 2)
    for settings_ in ({"packed": False}, {"begin_with_documents": True}):
        with pytest.raises(ValueError, match=r"starts cannot be read.*data_tools\.convert"):
            FlatTokens(str(tmp_path), "train", 1, 2, **settings_)


@pytest.mark.parametrize("chunk", ["0", "1"])
@pytest.mark.parametrize("length", [None, 0, 10])
def test_a_lost_or_truncated_chunk_is_never_zeros(
    tmp_path: Path, chunk: str, length: int | None
) -> None:
    write_seqax(tmp_path, SMALL)
    file = tmp_path / "train/encoded_tokens" / chunk
    if length is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:length])
    source = FlatTokens(str(tmp_path), "train", 1, 8)
    with pytest.raises(DamagedDataError, match=f"encoded_tokens/{chunk}"):
        source.batch(0)


ATTRIBUTES, STARTS = ".zattrs", "seq_starts/.zarray"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        *((file, text, file) for file in (ATTRIBUTES, STARTS) for text in (None, "", "{}", "[1]")),
        *((STARTS, {"shape": shape}, "has shape") for shape in ([], [2, 2], [0], ["8"], None)),
        ("encoded_tokens/.zarray", {"dtype": "<f4"}, "has dtype '<f4'"),
        *(
            (ATTRIBUTES, {"max_token_id": value}, "has max_token_id")
            for value in ("many", None, -1, 1.5, True)
        ),
    ],
)
def test_a_description_that_makes_no_sense_is_named(
    tmp_path: Path, file: str, content: str | dict | None, message: str
) -> None:
    write_seqax(tmp_path, SMALL)
    path = tmp_path / "train" / file
    before = json.loads(path.read_text())
    path.unlink()
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(before | content))
    with pytest.raises(DamagedDataError, match=f"{file}.*{message}|{message}"):
        FlatTokens(str(tmp_path), "train", 1, 2)


@pytest.mark.several_devices
def test_a_vocabulary_too_small_stops_a_run(tmp_path: Path) -> None:
    write_seqax(tmp_path, SMALL)
    (tmp_path / "train/.zattrs").write_text(json.dumps({"max_token_id": 160}))
    experiment = Experiment(
        model=functools.partial(llama, vocab=160, embed=64, layers=1, heads=8, kv_heads=4, mlp=64),
        data=FlatTokens(str(tmp_path), "train", 8, 8),
        optimizer=functools.partial(adamw, peak_lr=1e-3),
        mesh=make_mesh(data=8),
        steps=1,
    )
    with pytest.raises(ValueError, match="ids up to 160, but the model's vocabulary ends at 159"):
        experiment.check()
