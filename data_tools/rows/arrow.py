"""Blocks of rows from Parquet and Arrow files, and from the record batches of `datasets`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_tools.rows.block import BLOCK_BYTES, Block, Field, Row, check_columns, utf8_row

if TYPE_CHECKING:
    import pyarrow

PARQUET, ARROW = (".parquet", ".pq"), (".arrow", ".feather")  # suffixes, in any case
# Rows decoded at once: a dictionary can expand a few bytes on disk to many large rows.
_READ_ROWS = 8
_MOST_ROWS = 1 << 16  # in a block: empty rows take memory, but no bytes on disk
_BUFFER_BYTES = 1024 * 1024  # of a stored column, instead of a whole row group


def _rows(content: tuple[str, int, list[dict[str, Any]]], field: Field) -> Iterator[Row]:
    place, first, found = content
    for number, row in enumerate(found, start=first):
        where = f"{place}, row {number},"
        text = None if field.needed is None else row.get(field.needed)
        if isinstance(text, bytes):
            yield utf8_row(text, where)
        else:
            yield field.row(row, where, filled_up=True)


def arrow_blocks(
    path: Path, size: int, start: int, stop: int, position: list[int] | None, field: Field
) -> Iterator[Block]:
    """Yields the rows of the file's parts that begin at bytes [start, stop) of `size`.

    The parts are Parquet's row groups, assumed to be of equal size, or a whole Arrow file;
    `position` is [part, row]. For Parquet, `Block.fraction` is the file's. Raises OSError, naming
    the file, if it cannot be read, ValueError for missing or ambiguous columns.
    """
    import pyarrow as pa

    try:
        if path.suffix.lower() in PARQUET:
            yield from _parquet_blocks(path, size, start, stop, position, field)
        elif start == 0:
            skipped = position[1] if position else 0
            yield from batch_blocks(_record_batches(path, field), str(path), field, 0, skipped)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and str(path) in str(error):
            raise
        raise OSError(f"{path} cannot be read: {error}") from error


def batch_blocks(
    batches: "Iterator[pyarrow.RecordBatch]", place: str, field: Field, part: int, skipped: int
) -> Iterator[Block]:
    """Yields the batches' rows after the first `skipped`, in blocks of a suitable size.

    `place` names their origin, and `part` is its number: positions are [part, row].
    """
    row = 0
    for batch in batches:
        rows_per_block = max(1, int(len(batch) * BLOCK_BYTES / max(1, batch.nbytes)))
        rows_per_block = min(rows_per_block, _MOST_ROWS)
        for begin in range(0, len(batch), rows_per_block):
            piece = batch.slice(begin, rows_per_block)
            if row + len(piece) > skipped:
                piece = piece.slice(max(0, skipped - row))
                row = max(row, skipped)
                found = _values(piece, field)
                texts = [each for values in found for each in values.values()]
                size = sum(len(text) for text in texts if isinstance(text, str | bytes))
                size = piece.nbytes if field.needed is None else size  # counts the whole dictionary
                yield Block([part, row], None, size, (place, row, found), _rows)
            row += len(piece)


def _values(batch: "pyarrow.RecordBatch", field: Field) -> list[dict[str, Any]]:
    """Returns the rows as dictionaries; strings in the needed column may be bytes if not UTF-8."""
    import pyarrow as pa

    if field.needed is None or field.needed not in batch.schema.names:
        return batch.to_pylist()
    column = batch.column(field.needed)
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(pa.large_binary()).to_pylist()
    return [{field.needed: value} for value in values]


def _parquet_blocks(
    path: Path, size: int, start: int, stop: int, position: list[int] | None, field: Field
) -> Iterator[Block]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES) as file:
        columns = _columns(path, file.schema_arrow.names, field)
        groups = file.num_row_groups
        row_counts = [file.metadata.row_group(group).num_rows for group in range(groups)]
        at_group, at_row = position or (0, 0)
        for group in range(at_group, groups):
            if not start <= size * group // groups < stop:
                continue
            batches = file.iter_batches(_READ_ROWS, [group], columns, use_threads=False)
            skipped = at_row if group == at_group else 0
            before, place = sum(row_counts[:group]), f"{path}, row group {group}"
            for block in batch_blocks(_gathered(batches), place, field, group, skipped):
                rows = before + block.position[1] + len(block.content[2])
                yield block._replace(fraction=rows / sum(row_counts))


def _gathered(batches: "Iterator[pyarrow.RecordBatch]") -> "Iterator[pyarrow.RecordBatch]":
    """Merges batches into fewer ones, of about two blocks."""
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows, size = rows + len(batch), size + batch.nbytes
        if rows >= _MOST_ROWS or size >= 2 * BLOCK_BYTES:
            yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()
            waiting, rows, size = [], 0, 0
    if waiting:
        yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()


def _record_batches(path: Path, field: Field) -> "Iterator[pyarrow.RecordBatch]":
    """Reads the needed columns of an Arrow file, or of an Arrow stream as stored by `datasets`."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as content:
        try:
            file = pa.ipc.open_file(content)
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
        except pa.ArrowInvalid:
            content.seek(0)
            batches = file = pa.ipc.open_stream(content)
        columns = _columns(path, file.schema.names, field)
        for batch in batches:
            batch = batch if columns is None else batch.select(columns)
            for column in batch.columns:
                _check_offsets(column)
            yield batch


def _columns(path: Path, names: list[str], field: Field) -> list[str] | None:
    """Returns the needed columns, None for all; raises ValueError if one is missing or double."""
    check_columns(path, names, field.needed)
    return None if field.needed is None else [field.needed]


def _check_offsets(column: "pyarrow.Array") -> None:
    """Raises ArrowInvalid for values outside the file, which Arrow itself would read.

    Strings are checked as bytes: a string that is not UTF-8 makes only its row bad.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        _check_offsets(column.dictionary)
        # `safe` checks that the indices are in the dictionary.
        pa.DictionaryArray.from_arrays(column.indices, column.dictionary, safe=True)
    else:
        kind = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(column.type)
        (column if kind is None else column.view(kind)).validate(full=True)
