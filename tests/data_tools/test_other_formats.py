"""CSV, WebDataset, MDS and ArrayRecord: files of their own packages, bad rows, damage."""

import csv
import io
import json
import struct
import tarfile
from pathlib import Path

import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from data_tools.rows import array_record, delimited
from data_tools.rows.block import TextField
from data_tools.rows.files import Files

GOLDEN = Path(__file__).parent / "golden"
TEXTS = ["one", "", "drei 🤖\nLinien"]
SHOWS = TextField(function="showing:show")


@pytest.fixture
def showing(tmp_path, monkeypatch):
    """A text function that returns the whole row."""
    (tmp_path / "showing.py").write_text("def show(row):\n    return repr(row)\n")
    monkeypatch.syspath_prepend(tmp_path)


def rows_of(file, field=None):
    source = Files([str(file)], field=field)
    return [row for block in source.blocks(0, 1) for row in block.rows(source.field)]


def test_files_of_the_real_packages(showing):
    assert [row.text for row in rows_of(GOLDEN / "samples.mds")] == TEXTS
    tar = rows_of(GOLDEN / "samples.tar", TextField("txt"))
    assert [row.text for row in tar] == TEXTS
    shown = [eval(row.text) for row in rows_of(GOLDEN / "samples.mds", SHOWS)]
    assert shown[0] | {"score": b""} == {
        "text": "one",
        "id": 1,
        "meta": {"lang": "en"},
        "score": b"",
    }
    assert struct.unpack("<f", shown[2]["score"]) == (-1.0,)
    shown = [eval(row.text) for row in rows_of(GOLDEN / "samples.tar", SHOWS)]
    expected = {"id": 3, "meta": None, "score": -1.0}
    assert shown[2] == {"__key__": "set/0002", "txt": TEXTS[2], "json": expected}


def test_the_index_of_mosaic_shards_is_not_a_file_of_rows(tmp_path):
    for number in range(2):
        (tmp_path / f"shard.{number}.mds").write_bytes((GOLDEN / "samples.mds").read_bytes())
    (tmp_path / "index.json").write_text('{"shards": []}')
    assert [row.text for row in rows_of(tmp_path)] == 2 * TEXTS


cells = st.text(st.sampled_from('ab,"\t\n\r é🤖'), max_size=8)


@given(
    rows=st.lists(st.tuples(cells, cells), max_size=8),
    suffix=st.sampled_from([".csv", ".tsv"]),
    end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    block_bytes=st.integers(1, 40),
)
def test_cells_of_any_text(tmp_path_factory, rows, suffix, end, quoting, block_bytes):
    """Resumed at every block."""
    file = tmp_path_factory.mktemp("cells") / f"rows{suffix}"
    sink = io.StringIO(newline="")
    delimiter = {".csv": ",", ".tsv": "\t"}[suffix]
    writer = csv.writer(sink, delimiter=delimiter, lineterminator=end, quoting=quoting)
    if quoting == csv.QUOTE_MINIMAL:  # then csv writes some carriage returns without quotes
        rows = [tuple(cell.replace("\r", "") for cell in row) for row in rows]
    writer.writerows([("text", "other"), *rows])
    file.write_bytes(sink.getvalue().encode())
    expected = [text for text, _ in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delimited, "BLOCK_BYTES", block_bytes)
        source = Files([str(file)])
        blocks, done = list(source.blocks(0, 1)), 0
        for block in blocks:
            rest = source.blocks(0, 1, json.loads(json.dumps(block.position)))
            found = [row.text for each in rest for row in each.rows(source.field)]
            assert found == expected[done:]
            done += len(list(block.rows(source.field)))
    assert done == len(rows)


def test_bad_rows_of_a_table_are_named_with_their_lines(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_bytes(
        b'\xef\xbb\xbfid,text\n1,good\n\n2\n3,"a\nb"\n4,\xff\n5,x,y\n'
        b'6,"cut" off\n7,good\n8,"no end\n'
    )
    found = [row.text or str(row) for row in rows_of(file)]
    assert found == [
        "good",
        f"{file}, line 4, has 1 values, but the first row names 2 columns",
        "a\nb",
        f"{file}, line 7, is not UTF-8 text (byte 0)",
        f"{file}, line 8, has 3 values, but the first row names 2 columns",
        f"{file}, line 9, is not a row of values: ',' expected after '\"'",
        "good",
        f"{file}, line 11, is not a row of values: unexpected end of data",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "rows.csv, line 1, has no first row that names the columns"),
        (b"id,body\n1,a\n", "rows.csv has no column 'text'; it has 'id', 'body': choose one"),
        (b"text,text\n1,a\n", "rows.csv has 2 columns 'text': give them different names"),
    ],
)
def test_a_table_needs_a_column_of_text(tmp_path, content, message):
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / "rows.csv")


def test_a_long_cell_is_an_error(tmp_path, monkeypatch):
    """Its end would be a guess."""
    monkeypatch.setattr(delimited, "MAX_ROW_BYTES", 200_000)
    (tmp_path / "rows.csv").write_text(
        "text\n" + "a" * 150_000 + '\n"' + "b\n" * 150_000 + '"\nc\n'
    )
    with pytest.raises(OSError, match=r"rows\.csv, line 3, is longer than"):
        rows_of(tmp_path / "rows.csv")


def test_a_tar_that_was_cut_anywhere_is_named(tmp_path):
    content = (GOLDEN / "samples.tar").read_bytes()
    with tarfile.open(GOLDEN / "samples.tar") as tar:
        end = tar.getmembers()[-1].offset_data + tarfile.BLOCKSIZE
    for stop in range(0, end + tarfile.BLOCKSIZE, 128):
        (tmp_path / "cut.tar").write_bytes(content[:stop])
        with pytest.raises(OSError, match=r"cut\.tar cannot be read to its end"):
            rows_of(tmp_path / "cut.tar", TextField("txt"))


def test_bad_samples_of_a_tar_are_named(tmp_path):
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        for name, content in (
            ("1.txt", b"a"),
            ("2.json", b"{"),
            ("3.TXT", b"\xff"),
            ("README", b""),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    good, missing, bad = rows_of(tmp_path / "set.tar", TextField("txt"))
    assert good.text == "a"
    assert missing.problem == "has no column 'txt'; it has 'json': choose one with --text_column"
    assert str(bad) == f"{tmp_path / 'set.tar'}, sample '3', is not UTF-8 text (byte 0)"
    _, bad, worse = rows_of(tmp_path / "set.tar", TextField(function="builtins:repr"))
    assert bad.problem.startswith("cannot be decoded: Expecting property name")
    assert worse.problem.startswith("cannot be decoded: 'utf-8' codec")


def test_a_damaged_mosaic_shard_is_named(tmp_path):
    content = (GOLDEN / "samples.mds").read_bytes()
    for stop in range(len(content)):
        (tmp_path / "cut.mds").write_bytes(content[:stop])
        with pytest.raises(OSError, match=r"cut\.mds (is truncated|is not an MDS shard)"):
            rows_of(tmp_path / "cut.mds")
    for damage in (b"?" * 400, content.replace(b'"format": "mds"', b'"format": "xyz"')):
        (tmp_path / "bad.mds").write_bytes(damage)
        with pytest.raises(OSError, match=r"bad\.mds is (truncated|not an MDS shard)"):
            rows_of(tmp_path / "bad.mds")
    (begin,) = struct.unpack("<I", content[4:8])
    sizes = struct.pack("<I", 2**31)
    (tmp_path / "bad.mds").write_bytes(content[:begin] + sizes + content[begin + 4 :])
    bad, *good = rows_of(tmp_path / "bad.mds")
    assert str(bad).startswith(f"{tmp_path / 'bad.mds'}, sample 0, cannot be decoded: its columns")
    assert [row.text for row in good] == TEXTS[1:]


EXAMPLE = 'features { feature { key: "%s" value { %s } } feature { key: "id" value { %s } } }'


def test_records_are_objects_examples_or_texts(tmp_path, showing):
    example = EXAMPLE % ("text", 'bytes { value: "a\\303\\251" }', "integers { value: [1, -2] }")
    serialized = text_format.Parse(example, array_record._example()()).SerializeToString()
    records = [serialized, b'{"text": "b", "id": 1}', "cé".encode(), b"\nd", b"{e", b"\xff"]
    writer = ArrayRecordWriter(str(tmp_path / "all.array_record"), "group_size:2")
    for record in records:
        writer.write(record)
    writer.close()
    *good, bad = rows_of(tmp_path / "all.array_record")
    assert [row.text for row in good] == ["aé", "b", "cé", "\nd", "{e"]
    assert str(bad) == f"{tmp_path / 'all.array_record'}, record 5, is not UTF-8 text (byte 0)"
    shown, *_ = rows_of(tmp_path / "all.array_record", SHOWS)
    assert eval(shown.text) == {"text": "aé", "id": [1, -2]}
