"""Which files are read as rows, which as texts, and which are refused."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_tools.rows.block import Row, TextField
from data_tools.rows.files import Files


def rows_of(source: Files, shard: int = 0, shards: int = 1) -> list[Row]:
    blocks = source.blocks(shard, shards)
    return [row for block in blocks for row in block.rows(source.field)]


def texts_of(source: Files) -> list[str | None]:
    return [row.text for row in rows_of(source)]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("a.csv", "write its rows as JSON Lines or Parquet"),
        ("a.TSV.gz", "write its rows as JSON Lines or Parquet"),
        ("a.jsonl.bz2", "unpack it, or compress it as .gz"),
        ("a.tar.gz", "unpack it, or compress it as .gz"),
        ("a.parquet.gz", "unpack it"),
        ("b.jsonl.tmp", "an unfinished file: finish it, or leave it out"),
    ],
)
def test_what_is_neither_rows_nor_text_is_refused(tmp_path: Path, name: str, advice: str) -> None:
    (tmp_path / name).write_text("id,text\n1,one\n")
    for path, pattern in ((tmp_path / name, None), (tmp_path, None), (tmp_path, "*")):
        with pytest.raises(ValueError, match=f"{name}.*{advice}"):
            Files([str(path)], pattern=pattern)


def test_a_folder_is_read_whole_if_it_is_rows_alone_or_texts_alone(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name in (".DS_Store", "._a.jsonl", ".git/config"):
        (tmp_path / name).write_bytes(b"\xff")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n')
    assert texts_of(Files([str(tmp_path)])) == ["one"]
    (tmp_path / "README.md").write_text("about")
    with pytest.raises(ValueError, match=r"a\.jsonl, and others, such as README\.md, each of .*"):
        Files([str(tmp_path)])
    assert texts_of(Files([str(tmp_path)], pattern="*.jsonl")) == ["one"]
    assert texts_of(Files([str(tmp_path)], pattern="*")) == ["about", "one"]
    (tmp_path / ".git/config").write_text("kept")
    assert texts_of(Files([str(tmp_path)], pattern=".git/*")) == ["kept"]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (json.dumps([{"text": "a"}, {"text": "b"}]), "array"),
        (json.dumps([{"text": "a"}, {"text": "b"}], indent=1), "array"),
        ("[\n" + ",\n".join(json.dumps({"text": "a" * 50}) for _ in range(4_000)) + "]\n", "array"),
        (json.dumps({"text": "a"}, indent=1), "object"),
        ("\ufeff\n " + json.dumps([{"text": "a"}]), "array"),
    ],
)
@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz"])
def test_a_file_of_one_json_value_is_named(
    tmp_path: Path, content: str, found: str, name: str
) -> None:
    file = tmp_path / name
    file.write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    for shard in range(1 if name.endswith("gz") else 2):
        with pytest.raises(ValueError, match=rf"{name} holds one JSON {found}, .*jq -c"):
            rows_of(Files([str(file)]), shard, 2)


def test_lines_that_are_arrays_are_bad_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for first in ('["text"]', '[{"role": "user"}]'):
        file.write_text(f'{first}\n{{"text": "b"}}\n')
        bad, good = rows_of(Files([str(file)]))
        assert (bad.problem, good.text) == ("is no JSON object but list", "b")


@pytest.mark.parametrize("kind", [".parquet", ".arrow"])
def test_columns_of_one_name_are_refused_with_the_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"twice{kind}"
    columns = [pa.array([text]) for text in ("a", "b", "c", "d")]
    table = pa.Table.from_arrays(columns, names=["text", "text", "body", "x"])
    if kind == ".parquet":
        pq.write_table(table, file)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    for field in (TextField(), TextField(function="builtins:repr")):
        with pytest.raises(ValueError, match=rf"twice{kind} has 2 columns 'text': give them"):
            rows_of(Files([str(file)], field=field))
    assert texts_of(Files([str(file)], field=TextField("body"))) == ["c"]
