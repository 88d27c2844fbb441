"""A teacher's output reaches the rows that it was made from; other data and damage are refused."""

from dataclasses import replace

import numpy as np
import pytest

from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.stored.metadata import DamagedDataError
from lmlib.data.stored.teacher import IDS, LOG_PROBABILITIES, TeacherMetadata, TeacherWriter

S, K = 9, 3
ROWS_IN_A_FILE = 5


def open_data(example, **settings):
    return FlatTokens(str(example), **({"split": "train", "sequence_length": S} | settings))


def said(sequences):
    """Anything that differs from sequence to sequence."""
    random = np.random.default_rng(1)
    ids = random.integers(0, 300, (sequences, S, K))
    return ids, np.log(random.random((sequences, S, K)))


def begun(folder, data, **changes):
    metadata = TeacherMetadata("run@3", "0" * 32, 300, K, data.seen, {})
    return TeacherWriter(str(folder), replace(metadata, **changes), ROWS_IN_A_FILE * S * K)


def write(folder, data):
    writer = begun(folder, data)
    ids, log_probabilities = said(data.sequences)
    for rows in np.array_split(np.arange(data.sequences), 7):
        writer.add(ids[rows], log_probabilities[rows])
    writer.finish()


@pytest.fixture(scope="module")
def taught(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers") / "taught"
    write(folder, open_data(example, batch_size=1))
    return folder


@pytest.mark.parametrize("seed", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_each_row_has_what_was_said_of_its_sequence(example, taught, seed):
    data = open_data(example, batch_size=7, seed=seed, epochs=2, teacher=str(taught))
    plain = open_data(example, batch_size=7, seed=seed, epochs=2)
    ids, log_probabilities = said(data.sequences)
    for step in range(data.batches):
        batch, numbers = data.batch(step), data.sequence_numbers(step)
        np.testing.assert_array_equal(batch.tokens, plain.batch(step).tokens)
        is_row_B11 = (numbers >= 0)[:, None, None]
        np.testing.assert_array_equal(batch.teacher_ids, np.where(is_row_B11, ids[numbers], 0))
        np.testing.assert_array_equal(
            batch.teacher_log_probabilities,
            np.where(is_row_B11, log_probabilities[numbers].astype(np.float16), 0),
        )
        part = data.batch(step, slice(2, 5))
        np.testing.assert_array_equal(part.teacher_ids, batch.teacher_ids[2:5])
    assert plain.batch(0).teacher_ids is None
    assert data.teacher_k == K
    assert plain.contents().keys() == {str(example / "train")}
    assert data.contents().keys() == {str(example / "train"), str(taught)}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("sequence_length", 8),
        pytest.param("packed", False, marks=pytest.mark.slow),
        pytest.param("reset_positions", False, marks=pytest.mark.slow),
    ],
)
def test_a_teacher_of_other_sequences_is_refused(example, taught, setting, value):
    with pytest.raises(ValueError, match=rf"saw other sequences.* (sequences|{setting}) "):
        open_data(example, batch_size=2, teacher=str(taught), **{setting: value})


@pytest.mark.slow
def test_a_teacher_of_other_data_is_refused(example_documents, taught, tmp_path, write_documents):
    changed = [[1, *document[1:]] if document else [] for document in example_documents]
    write_documents(tmp_path, changed, shards=4)
    with pytest.raises(ValueError, match="saw other sequences: it has data "):
        open_data(tmp_path, batch_size=2, teacher=str(taught))


@pytest.mark.parametrize("array", [IDS, LOG_PROBABILITIES])
def test_a_changed_bit_of_the_first_sequence_is_refused_at_once(example, tmp_path, array):
    write(tmp_path / "taught", open_data(example, batch_size=1))
    file = tmp_path / "taught" / array / "c" / "0"
    content = bytearray(file.read_bytes())
    content[3] ^= 4
    file.write_bytes(content)
    with pytest.raises(DamagedDataError, match=array):
        open_data(example, batch_size=2, teacher=str(tmp_path / "taught"))


def test_a_writer_goes_on_where_another_stopped(example, taught, tmp_path):
    data, folder = open_data(example, batch_size=1), tmp_path / "taught"
    ids, log_probabilities = said(data.sequences)
    writer = begun(folder, data)
    writer.add(ids[:13], log_probabilities[:13])
    writer.close()
    with pytest.raises(FileNotFoundError, match="unfinished"):
        open_data(example, batch_size=2, teacher=str(folder))
    with pytest.raises(FileExistsError, match="begun with teacher 'run@3', not 'run@4'"):
        begun(folder, data, teacher="run@4")
    writer = begun(folder, data)
    assert writer.written == 10  # whole files
    writer.add(ids[10:], log_probabilities[10:])
    writer.finish()
    names = {path.relative_to(taught) for path in taught.rglob("*") if path.is_file()}
    assert names == {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert all((taught / name).read_bytes() == (folder / name).read_bytes() for name in names)
    with pytest.raises(FileExistsError, match="finished"):
        begun(folder, data)


def test_all_parts_of_a_mixture_have_a_teacher_or_none(example, taught):
    stages = [Stage({"one": 1, "other": 1})]
    one = open_data(example, batch_size=4, teacher=str(taught))
    assert Mixture({"one": one, "other": one}, stages).batch(1).teacher_ids.shape == (4, S, K)
    other = open_data(example, batch_size=4)
    with pytest.raises(ValueError, match="teacher_k 3, but source 'other' has None"):
        Mixture({"one": one, "other": other}, stages)
