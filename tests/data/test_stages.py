"""Stages against a walk over all rows, and against one source without stages."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_source import Numbered, Stream

from lmlib.data.batch import source_at
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.stages import Continued, Stages
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.synthetic import Synthetic
from lmlib.data.text import HasText
from lmlib.experiment.stages import DataStage, batches_of


def numbers(batch):
    return batch.tokens[:, 0].tolist()


@st.composite
def stages_of(draw):
    """Up to four stages with their begins."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    begins = [0, *itertools.accumulate(lengths)]
    sizes = st.tuples(st.integers(1, 6), st.integers(1, 7))
    return [(begin, Numbered(0, *draw(sizes))) for begin in begins]


@given(stages_of())
def test_each_stage_goes_on_where_the_one_before_it_ends(sources):
    stages = Stages(sources)
    begins = dict(sources)
    source, row = sources[0][1], 0
    for step in range(sources[-1][0] + 4):
        if step in begins:
            end, source = row * source.sequence_length, begins[step]
            row = math.ceil(end / source.sequence_length)
        expected = list(range(row, row + source.batch_size))
        assert numbers(stages.batch(step)) == expected
        assert stages.batch(step).tokens.shape == (source.batch_size, source.sequence_length)
        sized = stages.at(step)
        assert (sized.batch_size, sized.sequence_length) == (len(expected), source.sequence_length)
        row += source.batch_size


@given(stages_of(), st.integers(0, 30), st.integers(0, 6), st.integers(0, 6), st.integers(1, 3))
def test_any_rows_of_a_batch_are_those_of_the_whole(sources, step, start, stop, stride):
    stages, rows = Stages(sources), slice(start, stop, stride)
    whole, part = stages.batch(step), stages.batch(step, rows)
    jax.tree.map(lambda each, one: np.testing.assert_array_equal(each[rows], one), whole, part)


def test_a_stage_has_the_properties_of_its_source(example):
    flat = FlatTokens(str(example), "train", 4, 8, epochs=1)
    stages = Stages([(0, Synthetic(300, 2, 4)), (3, flat)])
    later = stages.at(3)
    assert isinstance(later, Continued) and isinstance(later, HasText)
    assert later.text_codec() == flat.text_codec()
    assert later.max_token_id == flat.max_token_id
    assert later.pairs is False and later.teacher_k is None
    assert stages.max_token_id == 299
    assert stages.at(2) is source_at(stages, 2) and source_at(flat, 9) is flat


def test_a_stage_ends_with_its_source():
    stages = Stages([(0, Numbered(0, 2, 3)), (5, Numbered(0, 4, 3, batches=10))])
    # Rows 0 to 9 came before: of 40 thirty are left, seven batches and a half.
    assert stages.batches == 5 + 7
    assert Stages([(0, Numbered(0, 2)), (99, Numbered(0, 4, batches=10))]).batches == 99
    assert Stages([(0, Numbered(0, 2, batches=10)), (5, Numbered(0, 4))]).batches is None


ONE, OTHER = TokenizerIdentity("one", "1" * 64), TokenizerIdentity("other", "2" * 64)


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        ([], "at least one stage"),
        ([(3, Numbered())], "the first stage begins at step 0, not 3"),
        (
            [(0, Numbered()), (4, Numbered()), (4, Numbered())],
            "a stage that begins at step 4 comes after one that begins at step 4",
        ),
        (
            [(0, Numbered()), (4, Numbered()), (2, Numbered())],
            "a stage that begins at step 2 comes after one that begins at step 4",
        ),
        (
            [(0, Numbered(tokenizer=ONE)), (4, Numbered(tokenizer=OTHER))],
            "pretokenize both with one tokenizer",
        ),
        (
            [(0, Numbered()), (4, Stream())],
            "from step 4 on is a Stream, whose batches depend",
        ),
        (
            [(0, Synthetic(50, 2, 4)), (1, Synthetic(50, 2, 4, teacher_k=3))],
            "has teacher_k None, but the stage from step 1 on has 3",
        ),
    ],
)
def test_stages_that_make_no_sense_are_refused(sources, told):
    with pytest.raises(ValueError, match=told):
        Stages(sources)


def mixture(rows, *begins):
    sources = {"a": Numbered(0, rows), "b": Numbered(1, rows)}
    later = [Stage({"a": 1, "b": 9}, begin) for begin in begins]
    return Mixture(sources, [Stage({"a": 9, "b": 1}), *later])


def test_the_weights_of_a_mixture_change_at_a_step_of_the_run_or_not_at_all():
    stages = batches_of(mixture(4, 10), [DataStage(15, mixture(4, 10))], 30)
    assert [numbers(stages.batch(step)) for step in range(30)] == [
        numbers(mixture(4, 10).batch(step)) for step in range(30)
    ]
    one_weight = batches_of(mixture(4), [DataStage(15, mixture(8))], 30)
    rows = [number for step in range(30) for number in numbers(one_weight.batch(step))]
    assert rows == [number for step in range(45) for number in numbers(mixture(4).batch(step))]
    # Its step 10 would be row 80, and the run's is row 40.
    with pytest.raises(ValueError, match="at a step of its own batches"):
        batches_of(mixture(4, 10), [DataStage(15, mixture(8, 10))], 30)


def test_missing_steps_are_refused():
    stages = Stages([(0, Numbered()), (4, Numbered())])
    with pytest.raises(ValueError, match="at least 0, not -1"):
        stages.batch(-1)
    with pytest.raises(ValueError, match="begins at step 4, not at 3"):
        stages.at(4).batch(3)
    with pytest.raises(ValueError, match="begins at step 4, and the run ends after 4 steps"):
        stages.spans(4)


PIECE = 8  # tokens that are shuffled as one


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([2, 4, 8]), st.integers(1, 4)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([0, 7, None]),
)
def test_rows_cut_from_the_same_pieces_have_one_text_in_one_order(example, shapes, seed):
    """True for longer and for shorter rows. A change skips less than one row."""

    def source(rows, length):
        return FlatTokens(str(example), "train", rows, length, seed=seed, shuffled_length=PIECE)

    steps = [0, *itertools.accumulate(steps for _, _, steps in shapes)]
    sources = [source(rows, length) for rows, length, _ in shapes]
    stages = Stages(list(zip(steps, sources, strict=False)))
    tokens = sum(rows * length * steps for rows, length, steps in shapes) + len(shapes) * PIECE
    whole = source(tokens // PIECE + 1, PIECE)
    text = targets(whole.batch(0))
    place = 0
    for step in range(steps[-1]):
        length = stages.at(step).sequence_length
        place = math.ceil(place / length) * length
        found = targets(stages.batch(step))
        np.testing.assert_array_equal(found, text[place : place + len(found)])
        place += len(found)


def targets(batch):
    """Row after row; -1 for padding."""
    return np.where(batch.segment_ids > 0, batch.targets, -1).ravel()


def test_pieces_that_rows_do_not_divide_are_refused(example):
    def opened(length, **settings):
        return FlatTokens(str(example), "train", 2, 8, shuffled_length=length, **settings)

    with pytest.raises(ValueError, match="shuffled_length is 12, and must be a multiple of"):
        opened(12)
    with pytest.raises(ValueError, match="shuffled_length is -8"):
        opened(-8)
    for other in ({"packed": False}, {"begin_with_documents": True}):
        with pytest.raises(ValueError, match="each row begins with a document: leave it out"):
            opened(16, **other)


def test_an_epoch_of_pieces_has_each_sequence_once(example):
    source = FlatTokens(str(example), "train", 3, 2, epochs=2, shuffled_length=14)
    assert source.sequences % 7  # or this test shows nothing
    numbers = np.concatenate([source.sequence_numbers(step) for step in range(source.batches)])
    rows = -(-source.sequences // 7) * 7
    for epoch in (numbers[:rows], numbers[rows : 2 * rows]):
        assert sorted(epoch[epoch >= 0]) == list(range(source.sequences))
    assert (numbers[2 * rows :] == -1).all()
    assert numbers[:rows].tolist() != numbers[rows : 2 * rows].tolist()
    assert set(np.diff(numbers[:7]).tolist()) == {1}
