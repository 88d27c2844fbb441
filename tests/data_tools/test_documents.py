import json
from pathlib import Path

import pytest

from data_tools.documents import documents, hugging_face


def write_json_lines(path: Path, texts: list[str], column: str = "text") -> None:
    path.write_text("".join(json.dumps({"id": 1, column: text}) + "\n" for text in texts))


def test_a_folder_gives_its_matching_files_by_path(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.py").write_text("one")
    (tmp_path / "a.py").write_bytes(b"\xc3\xa4\r\n")
    (tmp_path / "b.txt").write_text("no source")
    assert list(documents([str(tmp_path)], pattern="*.py")) == ["ä\r\n", "one"]
    assert list(documents([str(tmp_path)])) == ["ä\r\n", "one", "no source"]


def test_files_are_read_in_the_given_order(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "lines.jsonl", ["first", "", "th\nird"], column="body")
    (tmp_path / "whole.txt").write_text("a\nb\n")
    paths = [str(tmp_path / "whole.txt"), str(tmp_path / "lines.jsonl")]
    assert list(documents(paths, text_column="body")) == ["a\nb\n", "first", "", "th\nird"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"lines\.jsonl, line 3 is not JSON"),
        ('{"body": "x"}', r"lines\.jsonl, line 3 has no column 'text'; it has 'body'"),
        ('{"text": 5}', r"lines\.jsonl, line 3: column 'text' is no string but 5"),
        ('["text"]', r"lines\.jsonl, line 3 is no JSON object but list"),
        ('{"text": "\xff"}', r"lines\.jsonl, line 3 is not JSON.*utf-8"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line.encode("latin-1") + b"\n")
    found = documents([str(file)])
    assert next(found) == "good"
    with pytest.raises(ValueError, match=message):
        next(found)


def test_files_that_are_not_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"picture\.png is not UTF-8 text \(byte 2\)"):
        list(documents([str(tmp_path)]))


@pytest.mark.parametrize("name", ["missing.txt", "some/missing.jsonl", "/missing", "./missing"])
def test_missing_files(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        list(documents([name]))


def test_a_pattern_without_matches(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"'\*\.rs'"):
        list(documents([str(tmp_path)], pattern="*.rs"))


def test_a_local_hugging_face_data_set(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "train.jsonl", ["one", "two", "three"])
    assert list(hugging_face(str(tmp_path))) == ["one", "two", "three"]
    with pytest.raises(ValueError, match="has no column 'body'"):
        list(hugging_face(str(tmp_path), text_column="body"))
    with pytest.raises(ValueError, match="cannot be opened as a Hugging Face data set"):
        list(hugging_face(str(tmp_path), split="validation"))
