"""Files of text from a stranger, as `pretokenize` and `HFStream` read them."""

import gzip
import importlib.util
import io
import json
import pickle
import struct
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from strangers import assert_refused, leave_canary, outcomes

READ = """
from data_tools.rows.files import Files
from data_tools.rows.source import row_source
from data_tools.hf_stream.records import open_records
"""
FILES = """
    rows = 0
    source = Files([arguments])
    for block in source.blocks(0, 1):
        for row in block.rows(source.field):
            rows += 1
            if rows == 1_000:
                raise ValueError("rows without an end")
"""
STREAM = """
    for number, record in enumerate(open_records(arguments, None, "train", 0, 1)):
        if number == 10: break
"""
MEGABYTE = bytes(1 << 20)
MAGIC = 0xFD2FB528  # of zstd


def compressed_bomb(path):
    """A gigabyte of zeros and not a single newline."""
    if path.suffix == ".gz":
        part = gzip.compress(MEGABYTE * 64, 9)
        path.write_bytes(part * 16)
    else:
        part = zstandard.ZstdCompressor(level=19).compress(MEGABYTE * 64)
        path.write_bytes(part * 16)


def run_length_bomb(path):
    """A single frame of zstd: blocks of three bytes and one, each 128 KiB of zeros."""
    header = struct.pack("<IBB", MAGIC, 0, (17 - 10) << 3)  # window of 128 KiB
    block = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    path.write_bytes(header + block * 8_192)


def large_window(path):
    """A frame that asks for a window of 2 GB before anything comes."""
    header = struct.pack("<IBB", MAGIC, 0, (31 - 10) << 3)
    path.write_bytes(header + (5 << 3 | 1).to_bytes(3, "little") + b"text\n")


def deep_lines(path):
    path.write_text("[" * 1_000_000 + "\n" + '{"text": ' * 100_000 + "\n")


def one_string_a_million_times(path):
    """2 TB of rows: a dictionary with one string of a megabyte."""
    column = pa.DictionaryArray.from_arrays(
        pa.repeat(pa.scalar(0, pa.int32()), 2 << 20), ["x" * 10**6]
    )
    pq.write_table(pa.table({"text": column}), path, row_group_size=2 << 20)


def rows_of_nothing(path):
    """2**40 rows in no bytes."""
    rows = 7_777_777
    arrow(path, pa.nulls(rows), struct.pack("<q", rows), struct.pack("<q", 1 << 40))


def arrow(path, column, old, new):
    table = pa.table({"text": column})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def indices_outside(path):
    old, new = struct.pack("<3i", 0, 1, 0), struct.pack("<3i", 0, 1 << 28, 0)
    arrow(path, pa.array(["one", "two", "one"]).dictionary_encode(), old, new)


BOMBS = {
    "bomb.jsonl.gz": compressed_bomb,
    "bomb.jsonl.zst": compressed_bomb,
    "run_length.jsonl.zst": run_length_bomb,
    "large_window.jsonl.zst": large_window,
    "deep.jsonl": deep_lines,
    "strings.parquet": one_string_a_million_times,
    "nothing.arrow": rows_of_nothing,
    "indices.arrow": indices_outside,
}
ENDLESS = {"strings.parquet", "nothing.arrow"}
REFUSED = {
    "run_length.jsonl.zst",
    "large_window.jsonl.zst",
    "indices.arrow",
}


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, write in BOMBS.items():
        write(folder / name)
    cases = {name: str(folder / name) for name in BOMBS}
    return outcomes(READ, FILES, cases, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_memory_is_bounded_whatever_a_file_expands_to(read, name):
    if name in ENDLESS:
        assert read[name] == ("ValueError", "rows without an end")
    elif name in REFUSED:
        assert_refused(read[name], "OSError")
    else:
        assert read[name] == ("opened", "")


# Code in data


class Touch:
    """Unpickled, it leaves the canary."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return exec, (leave_canary(self.folder),)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_no_extension_type_is_unpickled(tmp_path, kind):
    """pyarrow once unpickled the types of such columns as soon as it saw the schema."""
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Touch(tmp_path)),
    }
    field = pa.field("text", pa.string(), metadata=metadata)
    pandas = json.dumps(
        {"columns": [], "creator": {"library": pickle.dumps(Touch(tmp_path)).hex()}}
    )
    schema = pa.schema(
        [field], metadata={b"pandas": pandas.encode(), b"huggingface": b'{"info": {}}'}
    )
    table = pa.Table.from_arrays([pa.array(["text"])], schema=schema)
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / f"train.{kind}"
    if kind == "parquet":
        pq.write_table(table, file)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_table(table)
    assert outcomes(READ, FILES, {"file": str(file)}, tmp_path)["file"] == ("opened", "")
    if kind == "parquet":
        # datasets imports PyTorch if it is there, which must not count as the file's memory.
        imports = READ + ("import torch" if importlib.util.find_spec("torch") else "")
        found = outcomes(imports, STREAM, {"folder": str(file.parent)}, tmp_path)["folder"]
        assert found == ("opened", "")


def data_set(folder, **files):
    folder.mkdir()
    for name, content in files.items():
        file = folder / name.replace("__", ".")
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(folder)


def readme(files):
    return f"---\nconfigs:\n- config_name: default\n  data_files: {json.dumps(files)}\n---\n"


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """Returns the result of streaming folders as Hugging Face data sets."""
    folder = tmp_path_factory.mktemp("folders")
    script = leave_canary(folder) + "\nraise SystemExit"
    pickled = pickle.dumps(Touch(folder))
    (folder / "secret.txt").write_text("secret")
    text = '{"text": "a"}\n'
    cases = {
        "sound": data_set(folder / "sound", train__jsonl=text),
        "a script": data_set(folder / "script", script__py=script, train__jsonl=text),
        "another script": data_set(folder / "other", setup__py=script, train__jsonl=text),
        "a pickle": data_set(folder / "pickle", train__pkl=pickled),
        "above": data_set(folder / "above", README__md=readme("../secret.txt")),
        "the network": data_set(folder / "network", README__md=readme("https://localhost:1/a.txt")),
        "an archive": data_set(folder / "tar", train__tar=tar_of(pickled)),
        "pandas": "pandas",
    }
    return outcomes(READ, STREAM, cases, folder, megabytes=2000)


def tar_of(content):
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for suffix in ("pickle", "pyd", "pth", "npy"):
            entry = tarfile.TarInfo(f"0.{suffix}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a script", "scripts are no longer supported"),
        ("a pickle", "cannot open"),
        ("above", "lies elsewhere"),
        ("the network", ""),
        ("an archive", "its format is webdataset, not one of json"),
        ("pandas", "its format is pandas, not one of json"),
    ],
)
def test_a_data_set_is_read_without_running_it(streamed, name, expected):
    assert streamed["sound"] == ("opened", "")
    assert streamed["another script"] == ("opened", "")  # it is not a data file
    assert_refused(streamed[name], "ValueError")
    assert expected in streamed[name][1]
