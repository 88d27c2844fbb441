"""Mixtures against a walk from the first sequence, which is how one would do it with history."""

from collections import Counter
from fractions import Fraction
from itertools import count

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_source import NUMBER, Numbered, Stream

from lmlib.data.mixture import PERIOD, Mixture, Stage, apportion, interleave
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.synthetic import Synthetic


def numbered(names, batch_size=4):
    return {name: Numbered(ord(name) - ord("a"), batch_size) for name in names}


def taken(batch):
    """The batch's rows as "a0": source a, its sequence 0."""
    code_and_number = (divmod(int(token), NUMBER) for token in batch.tokens[:, 0])
    return [f"{chr(ord('a') + code)}{number}" for code, number in code_and_number]


def reference_pattern(counts):
    """Tijdeman's algorithm as he states it, in fractions and by search."""
    shares = [Fraction(each, sum(counts)) for each in counts]
    slack = Fraction(1, 2 * len(counts) - 2) if len(counts) > 1 else Fraction(1)
    so_far, pattern = [0] * len(counts), []
    for place in range(1, sum(counts) + 1):
        deadlines = {
            index: next(k for k in count(place) if k * share - so_far[index] > 1 - slack)
            for index, share in enumerate(shares)
            if place * share - so_far[index] >= slack
        }
        pattern.append(min(deadlines, key=lambda index: (deadlines[index], index)))
        so_far[pattern[-1]] += 1
    return pattern


def reference_batches(stages, batch_size, steps):
    """The first batches as `taken` gives them, walking from the first sequence."""
    batches, given_out, place = [], Counter(), 0
    for step in range(steps):
        for stage in stages:
            if stage.begin == step:
                names, place = sorted(stage.weights), 0
                pattern = reference_pattern([stage.counts[name] for name in names])
        batches.append([])
        for _ in range(batch_size):
            name = names[pattern[place % len(pattern)]]
            batches[-1].append(f"{name}{given_out[name]}")
            given_out[name] += 1
            place += 1
    return batches


weights = st.dictionaries(
    st.sampled_from("abcde"), st.integers(1, 9) | st.floats(0.5, 9.0), min_size=1
)


@st.composite
def compositions(draw):
    """Positive counts with the sum 1,024, in any proportions."""
    cuts = sorted(draw(st.sets(st.integers(1, PERIOD - 1), max_size=9)))
    return np.diff([0, *cuts, PERIOD]).tolist()


@st.composite
def stage_arguments(draw):
    begins = [0, *np.cumsum(draw(st.lists(st.integers(1, 5), max_size=3))).tolist()]
    return [(draw(weights), begin) for begin in begins]


def mixture_of(stages, batch_size):
    names = sorted(set().union(*(stage.weights for stage in stages)))
    return Mixture(numbered("".join(names), batch_size), stages)


def test_values_known_by_hand():
    # 3 : 1 is a a b a; equal weights alternate; b rests while only c is read, then goes on.
    mixture = Mixture(
        numbered("abc"),
        [
            Stage({"a": 3, "b": 1}),
            Stage({"a": 0.5, "b": 0.5}, begin=2),
            Stage({"c": 7}, begin=4),
            Stage({"c": 2, "b": 2}, begin=5),
        ],
    )
    assert [" ".join(taken(mixture.batch(step))) for step in range(6)] == [
        "a0 a1 b0 a2",
        "a3 a4 b1 a5",
        "a6 b2 a7 b3",
        "a8 b4 a9 b5",
        "c0 c1 c2 c3",
        "b6 c4 b7 c5",
    ]
    assert mixture.sequences_before(0) == {"a": 0, "b": 0, "c": 0}
    assert mixture.sequences_before(1) == {"a": 3, "b": 1, "c": 0}
    assert mixture.sequences_before(5) == {"a": 10, "b": 6, "c": 4}
    assert mixture.sequences_before(6) == {"a": 10, "b": 8, "c": 6}


def test_counts_known_by_hand():
    # Quotas 146.29, 292.57 and 585.14: the place left goes to the second.
    assert apportion([1, 2, 4]) == [146, 293, 585]
    assert apportion([1.0, 2.0, 4.0]) == apportion([10**30, 2 * 10**30, 4 * 10**30])
    assert apportion([1, 1, 1]) == [342, 341, 341]
    assert apportion([5]) == [1024]
    assert apportion([1, 1023]) == [1, 1023]
    assert apportion([0.9996, 0.0009771]) == [1023, 1]  # as the message below recommends
    assert Stage({"z": 1, "y": 1, "x": 1}).counts == {"x": 342, "y": 341, "z": 341}


@given(st.lists(st.integers(1, 10**6) | st.floats(1e-3, 1e3), min_size=1, max_size=50))
def test_counts_are_quotas_rounded_up_or_down(weights):
    counts = apportion(weights)
    assert sum(counts) == PERIOD
    total = sum(map(Fraction, weights))
    lost = [PERIOD * Fraction(w) / total - n for w, n in zip(weights, counts, strict=True)]
    assert all(-1 < each < 1 for each in lost)
    assert max(lost) <= min(lost) + 1  # otherwise a place would be better elsewhere


@settings(max_examples=20)
@given(compositions())
def test_every_prefix_of_the_pattern_keeps_the_proven_bound(counts):
    pattern = np.array(interleave(counts))
    taken_PN = np.cumsum(pattern[:, None] == np.arange(len(counts)), axis=0)
    share_PN = np.arange(1, PERIOD + 1)[:, None] * np.array(counts)  # in units of 1 / PERIOD
    deviation = int(np.abs(PERIOD * taken_PN - share_PN).max())
    bound = 1 - Fraction(1, 2 * len(counts) - 2) if len(counts) > 1 else 0
    assert Fraction(deviation, PERIOD) <= bound


@pytest.mark.slow
@settings(max_examples=12)
@given(stage_arguments(), st.sampled_from([1, 7, 32, 300]))
def test_equals_a_walk_from_the_first_sequence(arguments, batch_size):
    stages = [Stage(*each) for each in arguments]
    mixture = mixture_of(stages, batch_size)
    steps = stages[-1].begin + 4
    expected = reference_batches(stages, batch_size, steps)
    order = reversed(range(steps))  # history plays no part
    assert {step: taken(mixture.batch(step)) for step in order} == dict(enumerate(expected))

    # No sequence of a source is lost, repeated or out of its order.
    names = [row[0] for batch in expected for row in batch]
    totals = mixture.sequences_before(steps)
    assert Counter(names) == Counter(totals)
    for name, total in totals.items():
        mine = [row for batch in expected for row in batch if row[0] == name]
        assert mine == [f"{name}{number}" for number in range(total)]


@settings(max_examples=12)
@given(stage_arguments(), weights, st.integers(1, 5))
def test_a_later_stage_leaves_earlier_batches_alone(arguments, weights, pause):
    stages = [Stage(*each) for each in arguments]
    begin = stages[-1].begin + pause
    before, after = mixture_of(stages, 6), mixture_of([*stages, Stage(weights, begin)], 6)
    for step in range(begin):
        assert taken(before.batch(step)) == taken(after.batch(step))


def test_a_step_far_away():
    # 2**40 steps of 4 are 2**32 periods; of each, a gives 768 sequences.
    mixture = Mixture(
        {"a": Synthetic(9, 4, 3), "b": Synthetic(9, 4, 3, 1)}, [Stage({"a": 3, "b": 1})]
    )
    assert mixture.sequences_before(2**40) == {"a": 3 * 2**40, "b": 2**40}
    expected = Synthetic(9, 4, 3).batch(3 * 2**38, slice(0, 2))
    jax.tree.map(np.testing.assert_array_equal, mixture.batch(2**40, slice(0, 2)), expected)


@settings(max_examples=30)
@given(weights, st.integers(0, 600), st.slices(9))
def test_some_rows_equal_those_of_the_whole_batch_and_no_other_row_is_read(weights, step, rows):
    sources = numbered("".join(weights), batch_size=9)
    mixture = Mixture(sources, [Stage(weights)])
    whole = mixture.batch(step)
    # A source's rows come from one or two of its batches.
    assert all(len(source.reads) <= 2 for source in sources.values())
    for source in sources.values():
        source.reads.clear()
    part = mixture.batch(step, rows)
    jax.tree.map(lambda w, p: np.testing.assert_array_equal(w[rows], p), whole, part)
    assert [array.dtype for array in jax.tree.leaves(part)] == [np.int32] * 4 + [np.bool_]
    read = [f"{name}{k}" for name in sources for run in sources[name].reads for k in run]
    assert sorted(read) == sorted(taken(part))


def tokenized(*identities):
    """A mixture of a, b, … with these tokenizers."""
    sources = {
        name: Numbered(0, tokenizer=TokenizerIdentity(*identity) if identity else None)
        for name, identity in zip("ab", identities, strict=True)
    }
    return Mixture(sources, [Stage(dict.fromkeys(sources, 1))])


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([None, None], None),
        ([None, ("t", None)], ("t", None)),
        ([("t", None), ("t", "12")], ("t", "12")),
        ([("t", "12"), ("a copy of t", "12")], ("t", "12")),
        ([("t", None), ("t", None)], ("t", None)),
    ],
)
def test_tokenizers_that_may_be_the_same(known, expected):
    assert tokenized(*known).tokenizer == (TokenizerIdentity(*expected) if expected else None)


def pair(**other):
    return {"a": Numbered(0), "b": Numbered(1, **other)}


BOTH = [Stage({"a": 1, "b": 1})]
AT_5 = Stage({"a": 1}, 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture({}, BOTH), "at least one source"),
        (lambda: Mixture({"a": Stream(0)}, BOTH), "'a' is a Stream, whose batches depend on those"),
        (lambda: Mixture(pair(batch_size=8), BOTH), "batch_size 4, but source 'b' has 8: give all"),
        (lambda: Mixture(pair(sequence_length=2), BOTH), "length 1, but source 'b' has 2: give"),
        (lambda: Mixture(pair(batches=10), BOTH), "'b' ends after 10 batches.* that never end"),
        (lambda: tokenized(("t", "12"), ("t", "34")), "'a' was made by .* 'b' by .* one tokenizer"),
        (lambda: tokenized(("b", None), ("t", "34")), "'a' was made by .* 'b' by .* one tokenizer"),
        (lambda: Mixture(pair(), []), "at least one stage"),
        (lambda: Mixture(pair(), [AT_5]), "first stage begins at step 0, not 5"),
        (lambda: Mixture(pair(), [*BOTH, AT_5, AT_5]), "at step 5 comes after .* step 5"),
        (lambda: Mixture(pair(), [*BOTH, Stage({"d": 1}, 5)]), "5 weighs 'd', which is none of: a"),
        (lambda: Mixture(pair(), [Stage({"a": 1}), AT_5]), "source 'b' has a weight in no stage"),
        (lambda: Mixture(pair(), BOTH).batch(-1), "step must be at least 0, not -1"),
        (lambda: Stage({"a": 1}, -1), "step 0 or later, not -1"),
        (lambda: Stage({}, 3), "begins at step 3 has no weights"),
        (lambda: Stage({"a": 1, "b": 0}), "gives 'b' the weight 0: weights are positive; leave"),
        (lambda: Stage({"a": float("nan")}), "gives 'a' the weight nan"),
        (lambda: Stage({"a": float("inf"), "b": 1}), "gives 'a' the weight inf"),
        # The quotas are 1,023.59 and 0.41, so the first gets the last place.
        (lambda: Stage({"a": 0.9996, "b": 0.0004}), "'b' the weight 0.0004 .* at least 0.0009771"),
    ],
)
def test_invalid_mixtures_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
