"""Text files that hold many documents, with a separator between them."""

from collections.abc import Iterator
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
from data_tools.rows.compressed import compression, decompressed, skip


@dataclass(frozen=True)
class SeparatedTextBlock(Block):
    """Whole documents of a file, with what separates them."""

    path: str
    offset: int  # of the first, in the decompressed file
    content: bytes | None  # None for one document that is too long
    separator: bytes

    @property
    def size(self) -> int:
        """See `Block.size`."""
        return 0 if self.content is None else len(self.content)

    def rows(self, field: Field) -> Iterator[Row]:
        """See `Block.rows`. Newlines around a document are dropped, and blank ones are no rows."""
        if self.content is None:
            yield Row(f"{self.path}, byte {self.offset}", None, TOO_LONG)
            return
        text = field.load()
        begin = self.offset
        for document in self.content.split(self.separator):
            where = f"{self.path}, byte {begin}"
            begin += len(document) + len(self.separator)
            if not document.strip():
                continue
            if len(document) > MAX_ROW_BYTES:
                yield Row(where, None, TOO_LONG)
                continue
            row = utf8_row(document.strip(b"\r\n"), where)
            if row.text is not None and field.needed is None:
                row = field.row({"text": row.text, "path": self.path}, text, where)
            yield row


def separated_text_blocks(
    path: Path, size: int, separator: bytes, position: int | None
) -> Iterator[SeparatedTextBlock]:
    """The documents of the file, of `size` bytes, from byte `position` on.

    `position` counts decompressed bytes. `Block.fraction` is that of the file.
    """
    with open(path, "rb", buffering=0) as stored:
        stream = decompressed(stored, path)
        begin = position or 0
        if compression(path):
            skip(stream, begin)
        else:
            stored.seek(begin)

        def block(content: bytes | None) -> SeparatedTextBlock:
            done = stored.tell() / max(size, 1)
            return SeparatedTextBlock(begin, done, str(path), begin, content, separator)

        kept, dropped = bytearray(), 0  # what begins at `begin`, but for what is too long to keep
        while content := stream.read(BLOCK_BYTES):
            searched = max(0, len(kept) - len(separator) + 1)
            kept += content
            if kept.find(separator, searched) < 0:
                if dropped or len(kept) > MAX_ROW_BYTES + len(separator):
                    rest = len(kept) - len(separator) + 1  # a separator may begin in what is left
                    dropped += rest
                    del kept[:rest]
                continue
            if dropped:
                yield block(None)
                end = kept.find(separator) + len(separator)
            else:
                end = len(kept) - len(kept.split(separator)[-1])
                yield block(bytes(kept[:end]))
            begin += dropped + end
            dropped = 0
            del kept[:end]
        if kept or dropped:
            yield block(None if dropped else bytes(kept))
