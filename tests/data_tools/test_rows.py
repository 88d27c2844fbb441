"""Rows of files and data sets: which are read, in which order, in shards, from any block on."""

import csv
import gzip
import io
import itertools
import json
import os
import struct
import tarfile

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusals

from data_tools.rows import files, records
from data_tools.rows.block import Block, TextField
from data_tools.rows.compressed import kind as kind_of
from data_tools.rows.files import READERS, Files
from data_tools.rows.hub import HubDataset
from data_tools.rows.source import Texts, row_source

TEXTS = ["first", "", "zwei\nLinien", "ünï 🤖", "x" * 3000]


def json_lines(texts, column="text"):
    return "".join(json.dumps({"id": 1, column: text}) + "\n" for text in texts).encode()


def rows_of(source, shard=0, shards=1):
    return [
        block.locate(row) if row.text is None else row
        for block in source.blocks(shard, shards)
        for row in block.rows(source.field)
    ]


def texts_of(source, shard=0, shards=1):
    return [row.text for row in rows_of(source, shard, shards)]


def texts_in(blocks, source):
    return [row.text for block in blocks for row in block.rows(source.field)]


def write_table(file, table, rows=None):
    """A Parquet file in groups of `rows`, or an Arrow file or stream in such batches."""
    if file.suffix in (".parquet", ".pq", ".PARQUET"):
        pq.write_table(table, file, row_group_size=rows)
        return
    new = pa.ipc.new_stream if file.name.endswith(".stream.arrow") else pa.ipc.new_file
    with pa.OSFile(str(file), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def delimited(texts, delimiter):
    sink = io.StringIO(newline="")
    csv.writer(sink, delimiter=delimiter).writerows([("id", "text"), *enumerate(texts)])
    return sink.getvalue().encode()


def archive(texts):
    """Two files for each text, and a folder."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("set"))
        for number, text in enumerate(texts):
            for column, content in (("json", b'{"id": 1}'), ("text", text.encode())):
                member = tarfile.TarInfo(f"set/{number:04}.{column}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return sink.getvalue()


def mosaic_shard(texts):
    """The bytes that MosaicML's `MDSWriter` writes for columns id and text."""
    described = {"column_encodings": ["int", "str"], "column_names": ["id", "text"]}
    described |= {"column_sizes": [8, None], "format": "mds"}
    description = json.dumps(described, sort_keys=True).encode()
    bodies = [text.encode() for text in texts]
    samples = [struct.pack("<Iq", len(body), 1) + body for body in bodies]
    head = 4 * (len(samples) + 2) + len(description)
    begins = [head, *(head + size for size in itertools.accumulate(map(len, samples)))]
    return (
        struct.pack(f"<{len(begins) + 1}I", len(samples), *begins) + description + b"".join(samples)
    )


def write_kind(folder, kind, texts=TEXTS):
    """A file that holds the texts."""
    file = folder / f"data{kind}"
    if kind == ".feather":
        feather.write_feather(pa.table({"text": texts}), file)
    elif kind in (".parquet", ".PARQUET", ".pq", ".arrow", ".stream.arrow"):
        write_table(file, pa.table({"text": texts, "other": [1] * len(texts)}), rows=2)
    elif kind == ".array_record":
        writer = ArrayRecordWriter(str(file), "group_size:1")
        for line in json_lines(texts).splitlines():
            writer.write(line)
        writer.close()
    else:
        content = {
            ".csv": lambda: delimited(texts, ","),
            ".tsv": lambda: delimited(texts, "\t"),
            ".tar": lambda: archive(texts),
            ".mds": lambda: mosaic_shard(texts),
        }.get(kind_of(file), lambda: json_lines(texts))()
        half = len(content) // 2
        members = [content[:half], content[half:]]
        compress = {
            ".gz": gzip.compress,
            ".zst": zstandard.compress,
            ".zstd": zstandard.compress,
        }.get(file.suffix.lower(), bytes)
        file.write_bytes(b"".join(map(compress, members)))
    return file


KINDS = [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".stream.arrow"]
KINDS += [".csv", ".csv.gz", ".tsv", ".tar", ".tar.gz", ".mds", ".mds.zst", ".array_record"]


# Names of other suffixes; allenai/c4 has .json. To take such files for texts would go unnoticed.
OTHER_NAMES = [".PARQUET", ".pq", ".feather", ".json", ".json.gz", ".json.zst", ".ndjson", ".JSONL"]


@pytest.mark.parametrize("kind", [*KINDS, *OTHER_NAMES, ".jsonlines", ".jl", ".jsonl.GZ"])
def test_shards_of_each_kind_of_file_are_all_rows_once_and_in_order(tmp_path, kind):
    assert texts_of(Files([str(write_kind(tmp_path, kind))])) == TEXTS
    (tmp_path / "a.txt").write_text("before")
    (tmp_path / "z.txt").write_text("")
    source = Files([str(tmp_path)], pattern="*")
    for shards in (1, 2, 3, 50):
        found = [text for shard in range(shards) for text in texts_of(source, shard, shards)]
        assert found == ["before", *TEXTS, ""], shards


@pytest.mark.parametrize("kind", KINDS)
def test_reading_goes_on_from_any_block(tmp_path, kind, monkeypatch):
    for module in (
        "records",
        "arrow",
        "files",
        "delimited",
        "webdataset",
        "mosaic",
        "array_record",
    ):
        monkeypatch.setattr(f"data_tools.rows.{module}.BLOCK_BYTES", 16)
    (tmp_path / "a.txt").write_text("before")
    write_kind(tmp_path, kind)
    source = Files([str(tmp_path)], pattern="*")
    entered = 0
    for shards in (1, 2):
        for shard in range(shards):
            blocks = list(source.blocks(shard, shards))
            entered += len(blocks)
            for number, block in enumerate(blocks):
                position = json.loads(json.dumps(block.position))
                rest = texts_in(source.blocks(shard, shards, position), source)
                assert rest == texts_in(blocks[number:], source)
            fractions = [block.fraction for block in blocks]
            assert fractions == sorted(fractions)
    assert entered > 4


@pytest.mark.parametrize(("line", "message"), refusals(__file__, "lines"))
@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz"])
def test_bad_lines_are_named(tmp_path, line, message, kind):
    content = json_lines(["good"]) + b"\n" + line + b"\n" + json_lines(["good"])
    file = tmp_path / f"lines{kind}"
    file.write_bytes(gzip.compress(content) if kind == ".jsonl.gz" else content)
    good, bad, also_good = rows_of(Files([str(file)]))
    assert (good.text, also_good.text) == ("good", "good")
    assert str(bad).startswith(f"{file}, line 3, {message}")


def test_bad_strings_are_named(tmp_path):
    file = tmp_path / "rows.parquet"
    strings = pa.array([b"a", b"\xff", b"c", None], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": strings}), file, row_group_size=3)
    rows = rows_of(Files([str(file)]))
    assert [row.text for row in rows] == ["a", None, "c", None]
    assert str(rows[1]) == f"{file}, row group 0, row 1, is not UTF-8 text (byte 0)"
    assert str(rows[3]) == f"{file}, row group 1, row 0, has no string in column 'text' but None"
    (tmp_path / "a.bin").write_bytes(b"ok\xff")
    (row,) = rows_of(Files([str(tmp_path / "a.bin")]))
    assert str(row) == f"{tmp_path / 'a.bin'} is not UTF-8 text (byte 2)"
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([1, 0]), strings[:2])})
    write_table(tmp_path / "rows.arrow", table)
    bad, good = rows_of(Files([str(tmp_path / "rows.arrow")]))
    assert (good.text, bad.problem) == ("a", "is not UTF-8 text (byte 0)")
    bad, *_ = rows_of(Texts([5, "a"]))
    assert str(bad) == "document 0 is no string but 5"


@pytest.mark.parametrize("kind", [".parquet", ".arrow"])
def test_missing_columns_are_an_error(tmp_path, kind):
    file = write_kind(tmp_path, kind)
    with pytest.raises(ValueError, match=r"no column 'body'; it has 'text', 'other'.*--text_col"):
        rows_of(Files([str(file)], field=TextField("body")))


DAMAGED = [".csv.gz", ".tar.gz", ".mds", ".mds.zst", ".array_record"]


@pytest.mark.parametrize(
    "kind", [".jsonl.gz", ".jsonl.zst", ".txt.gz", ".parquet", ".arrow", *DAMAGED]
)
@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_damaged_files_are_named(tmp_path, kind, damage):
    file = write_kind(tmp_path, kind)
    content = file.read_bytes()
    file.write_bytes({"truncated": content[:-9], "garbage": b"?" * 100, "empty": b""}[damage])
    with pytest.raises(OSError, match=f"data{kind}"):
        rows_of(Files([str(file)]))


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_a_function_makes_the_text(tmp_path, kind, monkeypatch):
    (tmp_path / "rendering.py").write_text(
        "def render(row):\n    return f\"{row['title']}: {row['body']}\"\n"
        "def fails(row):\n    return {'A': None}[row['title']]\n"
        "def name(row):\n    return row['path'].rpartition('/')[2] + ': ' + row['text']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    records = [{"title": "A", "body": "b"}, {"title": "C", "body": "d"}]
    file = tmp_path / f"records{kind}"
    if kind == ".jsonl":
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        pq.write_table(pa.Table.from_pylist(records), file)
    field = TextField(function="rendering:render")
    assert texts_of(Files([str(file)], field=field)) == ["A: b", "C: d"]
    (tmp_path / "a.txt").write_text("body")
    named = Files([str(tmp_path / "a.txt")], field=TextField(function="rendering:name"))
    assert texts_of(named) == ["a.txt: body"]
    bad, worse = rows_of(Files([str(file)], field=TextField(function="rendering:fails")))
    assert bad.problem == "has no string in rendering:fails but None"
    assert worse.problem == "makes rendering:fails raise KeyError('C')"
    for name in ("rendering:nothing", "nowhere:render", "render", "json:__doc__"):
        with pytest.raises(ValueError, match="text function"):
            row_source([str(file)], field=TextField(function=name))


def test_missing_paths(tmp_path):
    for name in (str(tmp_path / "nothing.jsonl"), "nothing.JSONL", "nothing.csv", "nothing.pdf"):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            row_source([name])
    with pytest.raises(FileNotFoundError, match="matches the pattern"):
        row_source([str(tmp_path)], pattern="*.py")
    with pytest.raises(ValueError, match=r"--name=en.*leave it out"):
        row_source([str(tmp_path)], name="en")


def test_a_hugging_face_data_set(tmp_path, monkeypatch):
    """It is a folder, since a network may be missing; `datasets` reads both alike."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(3):
        texts = [f"{number}.{row}" for row in range(5)]
        pq.write_table(pa.table({"body": texts}), folder / f"train-{number}.parquet")
    source = HubDataset(str(folder), field=TextField("body"))
    expected = [f"{number}.{row}" for number in range(3) for row in range(5)]
    assert texts_of(source) == expected
    for shards in (2, 3):
        found = [text for shard in range(shards) for text in texts_of(source, shard, shards)]
        assert found == expected
    with pytest.raises(ValueError, match="stored in 3 files, which cannot make 4 shards"):
        rows_of(source, 0, 4)
    for block in source.blocks(0, 1):
        rest = texts_in(source.blocks(0, 1, block.position), source)
        assert rest == expected[expected.index(texts_in([block], source)[0]) :]
    with pytest.raises(ValueError, match="no column 'text'; it has 'body'"):
        HubDataset(str(folder))
    with pytest.raises(ValueError, match="cannot be opened as a Hugging Face data set"):
        HubDataset(str(tmp_path / "nowhere"))


def test_byte_order_marks_carriage_returns_and_blank_lines(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b\\r\\n"}\r\n{"text": "c"}')
    assert texts_of(Files([str(file)])) == ["a", "b\r\n", "c"]
    (tmp_path / "text.txt").write_bytes(b"a\r\nb")
    assert texts_of(Files([str(tmp_path / "text.txt")])) == ["a\r\nb"]


def test_other_paths_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to("nowhere")
    for name in (tmp_path, tmp_path / "b.txt"):
        with pytest.raises(FileNotFoundError, match=r"b\.txt: it is a link to nothing"):
            Files([str(name)])
    (tmp_path / "b.txt").unlink()
    os.mkfifo(tmp_path / "c.txt")
    with pytest.raises(OSError, match=r"c\.txt is not a regular file"):
        Files([str(tmp_path)])
    for names in ([], [str(tmp_path / "a.txt"), ""]):
        with pytest.raises(ValueError, match="empty name"):
            Files(names)


@settings(max_examples=150)
@given(
    lines=st.lists(st.text("ab", max_size=40), max_size=12),
    ends=st.booleans(),
    block_bytes=st.integers(1, 30),
    shards=st.integers(1, 6),
)
def test_lines_are_cut_at_any_byte_and_bad_rows_where_they_are_too_long(
    tmp_path_factory, lines, ends, block_bytes, shards
):
    file = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    content = b"".join(json.dumps({"text": line}).encode() + b"\n" for line in lines)
    file.write_bytes(content if ends else content.removesuffix(b"\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "BLOCK_BYTES", block_bytes)
        patch.setattr(records, "MAX_ROW_BYTES", len(json.dumps({"text": "x" * 20})))
        source = Files([str(file)])
        found = [row for shard in range(shards) for row in rows_of(source, shard, shards)]
    assert len(found) == len(lines)
    for number, (line, row) in enumerate(zip(lines, found, strict=True), start=1):
        long = f"{file}, line {number}, is longer than 128 MiB: cut it into several rows"
        assert row.text == (line if len(line) <= 20 else None)
        assert row.text is not None or str(row) == long


@pytest.mark.parametrize("name", ["b.txt", "b.txt.gz"])
def test_a_text_file_that_is_too_long_is_a_bad_row(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 100)
    (tmp_path / "a.txt").write_text("a" * 100)
    content = b"b" * 101
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (tmp_path / "c.txt").write_text("c")
    rows = rows_of(Files([str(tmp_path)]))
    assert [row.text for row in rows] == ["a" * 100, None, "c"]
    assert str(rows[1]).startswith(f"{tmp_path / name} is longer than")


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_the_fraction_that_was_read_grows_to_one(tmp_path, kind):
    file = write_kind(tmp_path, kind, [os.urandom(50_000).hex() for _ in range(80)])
    fractions = [block.fraction for block in Files([str(file)]).blocks(0, 1)]
    assert fractions == sorted(fractions) and len(set(fractions)) > 3
    assert 0 < fractions[0] < 0.5
    assert fractions[-1] == pytest.approx(1, abs=1e-5)


def rows_of_table(content, field):
    """Lines of cells between tabs; the first has their names."""
    names, *rows = (line.split("\t") for line in content)
    for row in rows:
        yield field.row(dict(zip(names, row, strict=True)), "a row")


def test_a_format_of_ones_own_is_a_reader(tmp_path, monkeypatch):
    def read(path, size, start, stop, position, field):
        if start == 0:
            yield Block(0, 1.0, size, path.read_text().splitlines(), rows_of_table)

    monkeypatch.setitem(READERS, ".tab", read)
    (tmp_path / "1.tab").write_text("id\ttext\n1\tone\n2\ttwo\n")
    (tmp_path / "2.tab").write_text("text\nthree\n")
    (tmp_path / "3.txt").write_text("four")
    source = Files([str(tmp_path)], pattern="*")
    for shards in (1, 2, 5):
        found = [text for shard in range(shards) for text in texts_of(source, shard, shards)]
        assert found == ["one", "two", "three", "four"]
    with pytest.raises(FileNotFoundError, match=r"no file books\.tab"):
        row_source(["books.tab"])


TYPES_OF_TEXT = [pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]


@pytest.mark.parametrize(
    ("kind", "type_of_text"),
    [
        *itertools.product([".parquet", ".arrow", ".stream.arrow"], TYPES_OF_TEXT),
        *itertools.product([".arrow", ".stream.arrow"], [pa.string_view()]),  # Parquet has none
    ],
)
def test_columns_of_any_type_that_holds_text(tmp_path, kind, type_of_text):
    file = tmp_path / f"data{kind}"
    column = pa.array([*TEXTS, None]).cast(type_of_text)
    table = pa.table({"nested": [{"a": [1]}] * 6, "text": column})
    write_table(file, table)
    assert [row.text for row in rows_of(Files([str(file)]))] == [*TEXTS, None]
    rows = rows_of(Files([str(file)], field=TextField("nested")))
    assert {row.text for row in rows} == {None}
    assert "has no string in column 'nested' but {'a': [1]}" in str(rows[0])


@pytest.mark.parametrize("kind", [".parquet", ".arrow"])
def test_one_large_group_is_read_in_small_blocks(tmp_path, kind):
    """Also of a dictionary that is larger than a block, and without the other columns."""
    texts = [str(number) * 5_000 for number in range(1000)]
    column = pa.array(texts).dictionary_encode()
    table = pa.table({"text": column, "other": [text[::-1] for text in texts]})
    file = tmp_path / f"data{kind}"
    write_table(file, table)
    source = Files([str(file)])
    blocks = list(source.blocks(0, 1))
    assert max(block.size for block in blocks) < 4 * 2**20
    assert texts_in(blocks, source) == texts


@pytest.mark.parametrize(("name", "advice"), refusals(__file__, "files"))
def test_other_formats_are_refused(tmp_path, name, advice):
    (tmp_path / name).write_text("id,text\n1,one\n")
    for path, pattern in ((tmp_path / name, None), (tmp_path, None), (tmp_path, "*")):
        with pytest.raises(ValueError, match=f"{name}.*{advice}"):
            Files([str(path)], pattern=pattern)


def test_a_folder_is_read_whole_if_it_is_rows_alone_or_texts_alone(tmp_path):
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


@pytest.mark.parametrize("kind", [".parquet", ".arrow"])
def test_columns_of_one_name_are_refused_with_the_file(tmp_path, kind):
    file = tmp_path / f"twice{kind}"
    columns = [pa.array([text]) for text in ("a", "b", "c", "d")]
    table = pa.Table.from_arrays(columns, names=["text", "text", "body", "x"])
    write_table(file, table)
    for field in (TextField(), TextField(function="builtins:repr")):
        with pytest.raises(ValueError, match=rf"twice{kind} has 2 columns 'text': give them"):
            rows_of(Files([str(file)], field=field))
    assert texts_of(Files([str(file)], field=TextField("body"))) == ["c"]
