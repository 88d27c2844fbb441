"""A thinned series hides nothing: its band holds every value, its marks every NaN."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlib.report.points import at, axes, downsample, steps_per_point
from lmlib.runs.series import Series

VALUES = st.floats(-1e300, 1e300) | st.sampled_from([math.nan, math.inf, -math.inf])


@st.composite
def measured(draw):
    steps = sorted(draw(st.sets(st.integers(1, 500), max_size=60)))
    values = draw(st.lists(VALUES, min_size=len(steps), max_size=len(steps)))
    return Series(np.array(steps, np.int64), np.array(values, np.float64))


@given(series=measured(), most=st.integers(1, 40))
def test_points_are_what_a_loop_over_their_steps_finds(series, most):
    steps = steps_per_point(series, most)
    points = downsample(series, steps)
    assert len(points.first_P) <= max(most, 2) and (steps == 1 or len(series.steps_N) > most)
    by_stretch = {}
    for step, value in zip(*series, strict=True):
        by_stretch.setdefault((step - 1) // steps, []).append((step, value))
    assert len(points.first_P) == len(by_stretch)
    for point, members in zip(zip(*points, strict=True), by_stretch.values(), strict=True):
        first, count, mean, least, greatest, not_finite = point
        finite = [value for _, value in members if math.isfinite(value)]
        assert series.steps_N[first] == members[0][0]
        assert (count, not_finite) == (len(members), len(members) - len(finite))
        if not finite:
            assert math.isnan(mean) and math.isnan(least)
            continue
        assert (least, greatest) == (min(finite), max(finite))
        expected = math.fsum(value / len(finite) for value in finite)
        assert mean == pytest.approx(expected, rel=1e-6, abs=1e290)
        assert least <= mean <= greatest


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
