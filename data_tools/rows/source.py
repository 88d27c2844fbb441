"""Sources of rows named on a command line, and sources of texts from Python."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from data_tools.rows.block import BLOCK_BYTES, Block, Field, Row, RowSource, TextField, imported
from data_tools.rows.files import Files, may_be_file
from data_tools.rows.hub import HubDataset


def row_source(
    datasets: Sequence[str],
    *,
    name: str | None = None,
    split: str = "train",
    field: Field | None = None,
    pattern: str | None = None,
    document_separator: str | None = None,
) -> RowSource:
    """Returns the rows of `datasets`: files and folders, or one Hugging Face data set.

    A single name that is not a local path is a Hugging Face data set, of which `name` and `split`
    select a part. Raises FileNotFoundError for a missing path, ValueError for a data set that
    cannot be opened or a text function that cannot be imported, and the errors of `Files`.
    """
    if isinstance(field, TextField) and field.function is not None:
        imported(field.function)
    first = datasets[0] if datasets else ""
    # `name` or `owner/name`, without the suffix of a data file
    may_be_on_hub = first.count("/") <= 1 and not first.startswith(("/", ".", "~"))
    if len(datasets) == 1 and may_be_on_hub and not may_be_file(first) and not Path(first).exists():
        if document_separator is not None:
            raise ValueError(
                f"--document_separator is for text files, and there is no path {first!r} here: "
                "leave it out"
            )
        return HubDataset(first, name, split=split, field=field)
    if name is not None:
        raise ValueError(
            f"--name={name} chooses a part of a Hugging Face data set, but {first!r} is a path: "
            "leave it out"
        )
    return Files(datasets, field=field, pattern=pattern, document_separator=document_separator)


class Texts:
    """A source of texts from Python; an iterator that can be read only once suffices."""

    def __init__(self, texts: Iterable[str], description: Mapping[str, Any] | None = None) -> None:
        self.field: Field = TextField()
        self.description = dict(description or {})
        self._texts = texts

    def blocks(self, shard: int, shards: int, position: Any = None) -> Iterator[Block]:
        """See `RowSource.blocks`; raises ValueError for more than one shard."""
        if shards != 1:
            raise ValueError(f"texts from Python make one shard, not {shards}")
        number = position or 0
        block, characters = [], 0
        for text in islice(iter(self._texts), number, None):
            block.append(text)
            characters += len(text) if isinstance(text, str) else 0
            if characters >= BLOCK_BYTES:
                yield Block(number, None, characters, (number, block), _rows)
                number, block, characters = number + len(block), [], 0
        if block:
            yield Block(number, None, characters, (number, block), _rows)


def _rows(content: tuple[int, list[Any]], field: Field) -> Iterator[Row]:
    first, texts = content
    for number, text in enumerate(texts, start=first):
        is_text = isinstance(text, str)
        problem = "" if is_text else f"is no string but {text!r:.40}"
        yield Row(f"document {number}", text if is_text else None, problem)
