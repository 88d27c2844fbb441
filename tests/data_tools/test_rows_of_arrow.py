"""Columns of Parquet and Arrow files that hold text in less usual ways."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_tools.rows.block import Row, TextField
from data_tools.rows.files import Files

TEXTS = ["first", "", "zwei\nLinien", "ünï 🤖", "x" * 3000]


def rows_of(source: Files) -> list[Row]:
    return [row for block in source.blocks(0, 1) for row in block.rows(source.field)]


@pytest.mark.parametrize("kind", [".parquet", ".arrow", ".stream.arrow"])
@pytest.mark.parametrize(
    "type_of_text",
    [pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()],
)
def test_columns_of_any_type_that_holds_text(
    tmp_path: Path, kind: str, type_of_text: pa.DataType
) -> None:
    if kind == ".parquet" and type_of_text == pa.string_view():
        pytest.skip("older Parquet writers have no such type")
    file = tmp_path / f"data{kind}"
    column = pa.array([*TEXTS, None]).cast(type_of_text)
    table = pa.table({"nested": [{"a": [1]}] * 6, "text": column})
    if kind == ".parquet":
        pq.write_table(table, file)
    else:
        new = pa.ipc.new_stream if kind == ".stream.arrow" else pa.ipc.new_file
        with pa.OSFile(str(file), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    assert [row.text for row in rows_of(Files([str(file)]))] == [*TEXTS, None]
    rows = rows_of(Files([str(file)], field=TextField("nested")))
    assert {row.text for row in rows} == {None}
    assert "has no string in column 'nested' but {'a': [1]}" in str(rows[0])


def test_bad_strings_of_a_dictionary_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.arrow"
    values = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([1, 0]), values)})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    bad, good = rows_of(Files([str(file)]))
    assert (good.text, bad.problem) == ("a", "is not UTF-8 text (byte 0)")


@pytest.mark.parametrize("kind", [".parquet", ".arrow"])
def test_one_large_group_is_read_in_small_blocks(tmp_path: Path, kind: str) -> None:
    """Also of a dictionary that is larger than a block, and without the other columns."""
    texts = [str(number) * 5_000 for number in range(1000)]
    column = pa.array(texts).dictionary_encode()
    table = pa.table({"text": column, "other": [text[::-1] for text in texts]})
    file = tmp_path / f"data{kind}"
    if kind == ".parquet":
        pq.write_table(table, file)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    source = Files([str(file)])
    blocks = list(source.blocks(0, 1))
    assert max(block.size for block in blocks) < 4 * 2**20
    assert [row.text for block in blocks for row in block.rows(source.field)] == texts
