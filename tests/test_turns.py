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


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans())), st.integers(1, 5))
def test_every_case_has_its_turn_and_every_test_one_in_each(cases, turns):
    cases = [Case(f"test_{test}[{i}]", slow) for i, (test, slow) in enumerate(cases)]
    asked = [set(cases) - set(left_for_another(cases, f"{turn}/{turns}")) for turn in range(turns)]
    assert set().union(*asked) == set(cases)
    for each in asked:
        assert {case for case in cases if not case.slow} <= each
        assert {case.nodeid.partition("[")[0] for case in cases} == {
            case.nodeid.partition("[")[0] for case in each
        }


@pytest.mark.parametrize("turn", ["3", "1/0", "a/3", "1/3/5", "-1/3"])
def test_what_is_no_turn_is_refused(turn):
    with pytest.raises(pytest.UsageError, match=f"--turn={turn}: it is K/N"):
        left_for_another([], turn)
