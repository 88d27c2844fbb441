"""One reader reads all stored JSON: the same values, or a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlib.storage.stored_json import DEEPEST, MOST, parse_json, read_json, read_text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(), parts, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_any_value_is_read_as_it_was_written(value: Any) -> None:
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == value


@given(VALUES, st.text(max_size=5), st.lists(st.sampled_from(["list", "object"]), max_size=5))
def test_a_name_that_comes_twice_is_refused_wherever_it_is(
    value: Any, name: str, around: list[str]
) -> None:
    entry = f"{json.dumps(name)}: {json.dumps(value)}"
    text = f"{{{entry}, {entry}}}"
    for outer in around:
        text = f"[0, {text}]" if outer == "list" else f'{{"a": {text}}}'
    with pytest.raises(
        ValueError, match=r"it has the name '.*' twice|it has the name \".*\" twice"
    ):
        parse_json(text)


@pytest.mark.parametrize("outer", [("[", "]"), ('{"a":', "}")])
def test_depth_has_a_bound(outer: tuple[str, str]) -> None:
    begin, end = outer
    parse_json(begin * DEEPEST + "1" + end * DEEPEST)
    for depth in (DEEPEST + 1, 1_000_000):
        with pytest.raises(ValueError, match="nested"):
            parse_json(begin * depth + "1" + end * depth)


def test_objects_and_lists_have_a_bound() -> None:
    with pytest.raises(ValueError, match="more than 2,000,000 objects and lists"):
        parse_json("[" + "{}," * MOST + "{}]")


@pytest.mark.parametrize("text", ["", "{", "[1,]", "9" * 5_000, "\ufeff{}", '"\x00"'])
def test_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_files_are_read_up_to_a_size(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text('{"a": [1]}')
    assert read_json(file) == {"a": [1]} and read_text(file) == '{"a": [1]}'
    with pytest.raises(ValueError, match="more than 9 bytes"):
        read_json(file, 9)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_json(file)
