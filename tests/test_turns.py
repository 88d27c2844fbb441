import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from turns import left_for_another


@dataclasses.dataclass(frozen=True)
class Case:
    nodeid: str
    slow: bool

    def get_closest_marker(self, name):
        return self.slow and name == "slow"


@pytest.mark.landing
@given(st.sets(st.tuples(st.text(), st.booleans())), st.integers(1, 5), st.integers(0, 3))
def test_a_slow_case_has_one_turn_and_any_other_each(cases, turns, first):
    cases = {Case(*case) for case in cases}
    for case in cases:
        among_all = [case not in left_for_another([*cases], f"{k}/{turns}") for k in range(turns)]
        assert sum(among_all) == (1 if case.slow else turns)
        alone = [case not in left_for_another([case], f"{k}/{turns}") for k in range(turns)]
        assert alone == among_all
        assert left_for_another([case], f"{first + turns}/{turns}") == left_for_another(
            [case], f"{first}/{turns}"
        )


@pytest.mark.parametrize("turn", ["3", "1/0", "a/3", "1/3/5", "-1/3"])
def test_what_is_no_turn_is_refused(turn):
    with pytest.raises(pytest.UsageError, match=f"--turn={turn}: it is K/N"):
        left_for_another([], turn)
