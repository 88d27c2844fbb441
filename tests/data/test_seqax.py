"""Reading data sets of seqax, which zarr itself writes."""

import json

import jax
import numpy as np
import pytest
from refusals import refusals
from seqax_data import write_seqax

from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import DamagedDataError

SMALL = [[1, 2], [3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize("length", [1, 7, 64])
def test_batches_are_those_of_the_same_documents_in_our_format(
    tmp_path, write_documents, example_documents, length
):
    documents = [document for document in example_documents if document]
    write_seqax(tmp_path / "seqax", documents)
    write_documents(tmp_path / "ours", documents, shards=3)
    theirs, ours = (
        FlatTokens(str(tmp_path / name), "train", 4, length, epochs=1) for name in ("seqax", "ours")
    )
    for name in ("batches", "tokens", "documents", "max_token_id"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert theirs.tokenizer is theirs.metadata is theirs.bytes_per_target is None
    for step in range(theirs.batches):
        jax.tree.map(np.testing.assert_array_equal, theirs.batch(step), ours.batch(step))


def test_both_splits(tmp_path):
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
def test_a_lost_or_truncated_chunk_is_never_zeros(tmp_path, chunk, length):
    write_seqax(tmp_path, SMALL)
    file = tmp_path / "train/encoded_tokens" / chunk
    if length is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:length])
    source = FlatTokens(str(tmp_path), "train", 1, 8)
    with pytest.raises(DamagedDataError, match=f"encoded_tokens/{chunk}"):
        source.batch(0)


@pytest.mark.parametrize(("file", "content", "message"), refusals(__file__, "seqax"))
def test_a_description_that_makes_no_sense_is_named(tmp_path, file, content, message):
    write_seqax(tmp_path, SMALL)
    path = tmp_path / "train" / file
    before = json.loads(path.read_text())
    path.unlink()
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(before | content))
    with pytest.raises(DamagedDataError, match=message):
        FlatTokens(str(tmp_path), "train", 1, 2)
