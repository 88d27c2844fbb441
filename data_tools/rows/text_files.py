"""Text files, each of them one document."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data_tools.rows.block import (
    BLOCK_BYTES,
    MAX_ROW_BYTES,
    TOO_LONG,
    Block,
    Field,
    Row,
    utf8_row,
)
from data_tools.rows.compressed import decompressed


@dataclass(frozen=True)
class TextFilesBlock(Block):
    """Whole files."""

    paths: tuple[str, ...]
    contents: tuple[bytes | None, ...]  # None for a file that is too long

    @property
    def size(self) -> int:
        """See `Block.size`."""
        return sum(len(content) for content in self.contents if content is not None)

    def rows(self, field: Field) -> Iterator[Row]:
        """See `Block.rows`. The columns of a file are its `text` and its `path`."""
        text = field.load()
        for path, content in zip(self.paths, self.contents, strict=True):
            row = Row(path, None, TOO_LONG) if content is None else utf8_row(content, path)
            if row.text is not None and field.needed is None:
                row = field.row({"text": row.text, "path": path}, text, path)
            yield row


def text_file_blocks(paths: Iterable[Path]) -> Iterator[TextFilesBlock]:
    """The files, several to a block if they are small; `position` counts those before it."""
    number = 0
    names: list[str] = []
    contents: list[bytes | None] = []
    read_bytes = 0
    for path in paths:
        content = _content(path)
        names.append(str(path))
        contents.append(content)
        read_bytes += len(content or b"")
        if read_bytes >= BLOCK_BYTES:
            yield TextFilesBlock(number, 1.0, tuple(names), tuple(contents))
            number, names, contents, read_bytes = number + len(names), [], [], 0
    if names:
        yield TextFilesBlock(number, 1.0, tuple(names), tuple(contents))


def _content(path: Path) -> bytes | None:
    """All bytes, decompressed; None if there are too many."""
    with open(path, "rb", buffering=0) as stored:
        stream = decompressed(stored, path)
        pieces: list[bytes] = []
        read_bytes = 0
        while piece := stream.read(BLOCK_BYTES):
            read_bytes += len(piece)
            if read_bytes > MAX_ROW_BYTES:
                return None
            pieces.append(piece)
    return b"".join(pieces)
