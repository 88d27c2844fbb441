"""Where documents come from: iterators of text."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path


def documents(
    dataset: Sequence[str],
    *,
    name: str | None = None,
    split: str = "train",
    text_column: str = "text",
    pattern: str = "*",
) -> Iterator[str]:
    """The documents of `dataset`: one folder, some files, or one Hugging Face data set.

    A folder gives the files in it that match `pattern`, sorted by path. A .jsonl file gives one
    document a line, any other file is one document. What is no path on this machine is taken
    for the name of a Hugging Face data set, of which `name` and `split` choose a part.

    Raises FileNotFoundError for a path that is not there or a folder without matches, ValueError
    for content that is not text.
    """
    paths = [Path(entry) for entry in dataset]
    if len(paths) == 1 and paths[0].is_dir():
        yield from files(files_in(paths[0], pattern), text_column)
    elif len(paths) == 1 and not paths[0].exists() and _may_be_hub_name(dataset[0]):
        yield from hugging_face(dataset[0], name, split=split, text_column=text_column)
    else:
        yield from files(paths, text_column)


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """The files below `folder` whose names match the glob `pattern`, sorted by path."""
    found = sorted(file for file in folder.rglob(pattern) if file.is_file())
    if not found:
        raise FileNotFoundError(f"no file below {folder} matches the pattern {pattern!r}")
    return found


def files(paths: Sequence[Path], text_column: str = "text") -> Iterator[str]:
    """The documents of each file: the lines of a .jsonl file, the whole of any other."""
    for path in paths:
        if path.suffix == ".jsonl":
            yield from json_lines(path, text_column)
        else:
            yield text_file(path)


def text_file(path: Path) -> str:
    """The file's text, byte for byte; raises ValueError if it is not UTF-8."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}): leave it out, for instance with "
            "--pattern, or convert it"
        ) from error


def json_lines(path: Path, text_column: str = "text") -> Iterator[str]:
    """The string under `text_column` in each line; blank lines are passed over.

    Raises ValueError, naming file and line, for a line that is not such a JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            yield _text_of(record, text_column, f"{path}, line {number}")


def hugging_face(
    dataset: str, name: str | None = None, *, split: str = "train", text_column: str = "text"
) -> Iterator[str]:
    """Streams a Hugging Face data set, on the Hub or in a local folder, in its stored order.

    Raises ValueError, with what `datasets` says, if it cannot be opened.
    """
    from datasets import load_dataset  # 0.7 s to import

    try:
        records = load_dataset(dataset, name, split=split, streaming=True)
    except Exception as error:  # `datasets` raises many unrelated types here
        raise ValueError(
            f"{dataset!r} is no file or folder here, and cannot be opened as a Hugging Face data "
            f"set (name {name!r}, split {split!r}): {error}"
        ) from error
    for number, record in enumerate(records):
        yield _text_of(record, text_column, f"{dataset}, record {number}")


def _text_of(record: object, text_column: str, where: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"{where} is no JSON object but {type(record).__name__}")
    if text_column not in record:
        raise ValueError(
            f"{where} has no column {text_column!r}; it has {', '.join(map(repr, record))}: "
            "choose one with --text_column"
        )
    text = record[text_column]
    if not isinstance(text, str):
        raise ValueError(f"{where}: column {text_column!r} is no string but {text!r:.40}")
    return text


def _may_be_hub_name(entry: str) -> bool:
    """Hub names are `name` or `owner/name`, and never end like a data file."""
    return (
        entry.count("/") <= 1
        and not entry.startswith(("/", ".", "~"))
        and not entry.endswith((".jsonl", ".json", ".txt", ".py", ".md"))
    )
