"""Tables and texts stay within 100 columns."""

import pytest

from lmlib.terminal.table import WIDTH, columns, wrapped

NAMES = [
    f"optimizer.peak_lr={rate},model.embed={size},seed=0" for rate in (1, 2) for size in (3, 4)
]


def test_a_narrow_table_has_one_line_a_row():
    assert columns([("a", "bcd", "e"), ("fg", "", "hi")]) == "a   bcd  e\nfg       hi"
    assert columns([]) == ""


@pytest.mark.parametrize(
    "rows",
    [
        [("run", *["a long title of this column"] * 7), ("x", *["1.25"] * 7)],
        [("point", "loss", "reason"), *((name * 3, "1.25", "no room " * 30) for name in NAMES)],
        [[f"title{i}" for i in range(10)], ["123456789"] * 10],
    ],
    ids=["titles", "names", "many columns"],
)
def test_a_wide_table_is_wrapped_and_loses_nothing(rows):
    lines = columns(rows).splitlines()
    assert max(map(len, lines)) <= WIDTH
    given = "".join(cell for row in rows for cell in row)
    assert sorted("".join(lines).replace(" ", "")) == sorted(given.replace(" ", ""))


def test_aligned_columns_stay_aligned_below_wrapped_titles():
    rows = [("run", *["bytes sent per step"] * 6), ("x", *"123456")]
    *titles, row = columns(rows).splitlines()
    assert all(titles[0][row.index(digit)] == "b" for digit in "123456")


def test_a_path_in_the_last_column_stays_whole():
    path = "/" + "folder/" * 20
    lines = columns([("the run's files", path), ("tokens a second, mean", "1.2 M")]).splitlines()
    assert lines == [f"the run's files        {path}", "tokens a second, mean  1.2 M"]


def test_sentences_are_wrapped_at_spaces_and_items_are_indented():
    text = "- " + "word " * 40 + "\nshort\n\n" + "x" * 120
    first, second, third, *rest = wrapped(text).splitlines()
    assert len(first) <= WIDTH and first.startswith("- word") and second.startswith("  word")
    assert [third.strip(" word"), *rest] == ["", "short", "", "x" * 120]
