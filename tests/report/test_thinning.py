"""A thinned series hides nothing: its band holds every value, its marks every NaN."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlib.report.points import at, axes, stretch, thinned
from lmlib.runs.series import Series

VALUES = st.floats(-1e300, 1e300) | st.sampled_from([math.nan, math.inf, -math.inf])


@st.composite
def measured(draw):
    steps = sorted(draw(st.sets(st.integers(1, 500), max_size=60)))
    values = draw(st.lists(VALUES, min_size=len(steps), max_size=len(steps)))
    return Series(np.array(steps, np.int64), np.array(values, np.float64))


@given(series=measured(), most=st.integers(1, 40))
def test_points_are_what_a_loop_over_their_steps_finds(series, most):
    steps = stretch(series, most)
    points = thinned(series, steps)
    assert len(points.first_P) <= max(most, 2)
    by_stretch = {}
    for step, value in zip(*series, strict=True):
        by_stretch.setdefault((step - 1) // steps, []).append((step, value))
    assert len(points.first_P) == len(by_stretch)
    for number, members in enumerate(by_stretch.values()):
        finite = [value for _, value in members if math.isfinite(value)]
        assert series.steps_N[points.first_P[number]] == members[0][0]
        assert points.count_P[number] == len(members)
        assert points.not_finite_P[number] == len(members) - len(finite)
        if not finite:
            assert math.isnan(points.mean_P[number]) and math.isnan(points.least_P[number])
            continue
        assert points.least_P[number] == min(finite)
        assert points.greatest_P[number] == max(finite)
        mean = math.fsum(value / len(finite) for value in finite)
        assert points.mean_P[number] == pytest.approx(mean, rel=1e-6, abs=1e290)
        assert min(finite) <= points.mean_P[number] <= max(finite)


def test_a_short_series_stays_as_it_is():
    series = Series(np.arange(1, 1001), np.linspace(3.0, 2.0, 1000))
    assert stretch(series, 1000) == 1
    assert np.array_equal(thinned(series, 1).mean_P, series.values_N)


def test_points_of_several_runs_are_of_the_same_steps():
    whole = Series(np.arange(1, 101), np.ones(100))
    late = Series(np.arange(38, 101), np.ones(63))
    steps = [{(step - 1) // 10 for step in series.steps_N} for series in (whole, late)]
    firsts = [series.steps_N[thinned(series, 10).first_P] for series in (whole, late)]
    assert [len(each) for each in firsts] == [len(each) for each in steps] == [10, 7]
    assert set(firsts[1][1:]) <= set(firsts[0])


def lines(**metrics):
    steps_N = np.arange(1, 1 + len(next(iter(metrics.values()))))
    return {name: Series(steps_N, np.array(each, np.float64)) for name, each in metrics.items()}


def test_wall_time_is_the_time_of_steps_over_the_goodput():
    """10 s of start-up, steps of 1 s with 0.25 s of waiting, a pause of 6 s after the third."""
    ends_at = [11.0, 12.0, 13.0, 20.0]
    found = axes(
        lines(
            step=[1, 2, 3, 4],
            step_seconds=[1.0] * 4,
            data_wait_seconds=[0.25] * 4,
            goodput=[0.75 * made / end for made, end in enumerate(ends_at, 1)],
        )
    )
    assert found["seconds"].values_N == pytest.approx(ends_at)
    assert found.keys() == {"step", "seconds"}


def test_flops_add_up_and_tokens_never_fall():
    found = axes(lines(step=[1, 2, 3], step_flops=[5.0, 5.0, 10.0], tokens=[8, 16, math.nan]))
    assert list(found["flops"].values_N) == [5.0, 10.0, 20.0]
    assert list(found["tokens"].values_N) == [8.0, 16.0, 16.0]
    assert list(at(found["flops"], np.array([2, 3]))) == [10.0, 20.0]
