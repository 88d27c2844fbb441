"""Text files, each of them one document."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data_tools.rows.block import BLOCK_BYTES, Block, Row, TextField, utf8_row
from data_tools.rows.compressed import open_bytes


@dataclass(frozen=True)
class TextFilesBlock(Block):
    """Whole files."""

    paths: tuple[str, ...]
    contents: tuple[bytes, ...]

    def rows(self, field: TextField) -> Iterator[Row]:
        """See `Block.rows`; the field has no meaning here."""
        return map(utf8_row, self.contents, self.paths)


def text_file_blocks(paths: Iterable[Path]) -> Iterator[TextFilesBlock]:
    """The files, several to a block if they are small; `position` counts those before it."""
    number, names, contents = 0, [], []
    for path in paths:
        with open_bytes(path) as stream:
            names.append(str(path))
            contents.append(b"".join(iter(lambda: stream.read(BLOCK_BYTES), b"")))
        if sum(map(len, contents)) >= BLOCK_BYTES:
            yield TextFilesBlock(number, None, tuple(names), tuple(contents))
            number, names, contents = number + len(names), [], []
    if names:
        yield TextFilesBlock(number, None, tuple(names), tuple(contents))
