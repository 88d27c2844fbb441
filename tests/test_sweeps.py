"""The combinators of sweeps, beside loops written out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlib.sweeps import axis, chain, product, sample, zipped

values = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@given(values, values, values)
def test_a_product_is_loops_within_loops(first, second, third):
    expected = [{"a": a, "b": b, "c": c} for a in first for b in second for c in third]
    axes = axis("a", *first), axis("b", *second), axis("c", *third)
    assert product(*axes) == expected
    assert product(product(*axes[:2]), axes[2]) == expected


@given(values, st.lists(st.booleans(), min_size=1, max_size=5))
def test_a_chain_has_each_point_once_in_the_order_of_coming(first, second):
    found = chain(axis("a", *first), axis("a", *second))
    # 1 and True are equal, and two settings.
    assert [repr(point["a"]) for point in found] == list(
        dict.fromkeys(map(repr, [*first, *second]))
    )


@given(values)
def test_zipped_goes_side_by_side(first):
    second = [value + 1 for value in first]
    found = zipped(axis("a", *first), axis("b", *second))
    assert found == [{"a": a, "b": a + 1} for a in first]


@given(st.data(), values, st.integers(0, 3))
def test_a_sample_is_a_part_in_order_and_always_the_same(data, first, seed):
    sweep = [{"place": place, "a": a} for place, a in enumerate(first)]
    count = data.draw(st.integers(1, len(sweep)))
    found = sample(sweep, count, seed)
    assert found == sample(sweep, count, seed)
    places = [point["place"] for point in found]
    assert places == sorted(set(places)) and len(places) == count
    assert all(point in sweep for point in found)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: axis("seed"), "has no values"),
        (lambda: product(axis("a", 1), axis("a", 2)), "a is set twice"),
        (lambda: zipped(axis("a", 1), axis("b", 1, 2)), r"they have \[1, 2\]"),
        (lambda: sample(axis("a", 1, 2), 3), "1 to 2 of these points, not 3"),
    ],
)
def test_invalid_sweeps_are_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()
