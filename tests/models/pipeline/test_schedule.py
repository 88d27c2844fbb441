"""The schedule of a pipeline, against what it promises: who computes what, in which order."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlib.models.pipeline.schedule import Schedule

schedules = st.builds(Schedule, st.integers(2, 6), st.integers(1, 4), st.integers(1, 4))


@given(schedules)
def test_each_microbatch_goes_through_all_chunks_in_order(schedule):
    work = schedule.work()
    for microbatch in range(schedule.microbatches):
        slots, stages = np.nonzero(work.counts & (work.microbatch == microbatch))
        visits = sorted(
            zip(slots, work.round[slots, stages], stages, strict=True), key=lambda visit: visit[0]
        )
        # One chunk after the other, each at the next stage in the very next slot.
        expected = itertools.product(range(schedule.rounds), range(schedule.stages))
        assert [visit[1:] for visit in visits] == list(expected)
        assert np.all(np.diff([visit[0] for visit in visits]) == 1)


@given(schedules)
def test_the_bubble_is_that_of_the_formula(schedule):
    stages, rounds = schedule.stages, schedule.rounds
    idle = 1 - schedule.work().counts.mean()
    # Narayanan et al. 2021, §2.2: (p - 1) / (m v) of the time that is used.
    of_used = (stages - 1) / (schedule.microbatches * rounds)
    assert schedule.bubble == pytest.approx(idle)
    assert schedule.bubble / (1 - schedule.bubble) == pytest.approx(of_used)


@given(schedules)
def test_microbatches_are_back_at_the_stage_where_they_waited(schedule):
    """Those of a group move up by one stage when the first takes one, and when the last puts one
    back."""
    waiting = np.arange(schedule.microbatches).reshape(schedule.groups, schedule.stages)
    place = waiting.copy()
    work, begins, ends = schedule.work(), schedule.begins(), schedule.ends()
    for slot in range(schedule.slots):
        if (group := begins[slot]) >= 0:
            assert place[group, 0] == work.microbatch[slot, 0]
            place[group] = np.roll(place[group], -1)
        if (group := ends[slot]) >= 0:
            place[group] = np.roll(place[group], -1)
            place[group, -1] = work.microbatch[slot, -1]
    np.testing.assert_array_equal(place, waiting)
