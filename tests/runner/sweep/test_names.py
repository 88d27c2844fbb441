"""Names of points: different, stable, and safe for file systems."""

import re

from hypothesis import given
from hypothesis import strategies as st

from runner.sweep.names import LONGEST, is_safe, names_of

PATHS = ["seed", "optimizer.peak_lr", "model.a.dim", "model.b.dim", "optimizer.betas[1]"]
texts = st.one_of(
    st.floats(allow_nan=False).map(repr),
    st.integers().map(repr),
    st.text(st.sampled_from("aB1/ .,=-\0é"), max_size=150),
)
settings_of_points = st.lists(
    st.dictionaries(st.sampled_from(PATHS), texts, max_size=4),
    min_size=1,
    max_size=8,
    unique_by=lambda point: tuple(sorted(point.items())),
)


def test_a_name_says_what_differs():
    points = [{"optimizer.peak_lr": "0.001", "seed": "0"}, {"compute.dtype": "'bfloat16'"}, {}]
    assert names_of(points) == ["peak_lr=0.001,seed=0", "dtype=bfloat16", "base"]


def test_as_much_of_a_path_as_tells_it_from_others():
    points = [{"data.batch_size": "4", "validation.batch_size": "8"}]
    assert names_of(points) == ["data.batch_size=4,validation.batch_size=8"]


@given(settings_of_points)
def test_all_names_are_safe_and_different(points):
    names = names_of(points)
    assert len({name.casefold() for name in names}) == len(points)
    for name in names:
        assert is_safe(name) and len(name) <= LONGEST
        assert re.fullmatch(r"[\w.,=+-]+", name, re.ASCII) and name[0] not in ".-"


def test_what_is_there_keeps_its_name_and_no_other_takes_it():
    first = names_of([{"compute.dtype": "float32"}])
    assert first == ["dtype=float32"]
    (other,) = names_of([{"compute.dtype": "'float32'"}], taken=first)
    assert re.fullmatch(r"dtype=float32-[0-9a-f]{8}", other)
