"""Blocks of rows from Parquet and Arrow files, and from the record batches of `datasets`.

For `Files` and `HubDataset`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_tools.rows.block import BLOCK_BYTES, Block, Field, Row, utf8_row

if TYPE_CHECKING:
    import pyarrow

PARQUET, ARROW = (".parquet", ".pq"), (".arrow", ".feather")  # suffixes, in any case
_READ_BYTES = 2 * BLOCK_BYTES  # of gathered rows
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
    except pa.ArrowException as error:
        raise OSError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        if str(path) in str(error):
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
    """Returns the rows as dictionaries, with only the needed column if it exists.

    Strings in that column that are not UTF-8 stay bytes.
    """
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
        groups = file.num_row_groups
        columns = None
        _check_names(path, file.schema_arrow.names, field)
        if field.needed is not None:
            if field.needed not in file.schema_arrow.names:
                raise ValueError(
                    f"{path} has no column {field.needed!r}; it has "
                    f"{', '.join(map(repr, file.schema_arrow.names))}: choose one with "
                    "--text_column"
                )
            columns = [field.needed]
        at_group, at_row = position or (0, 0)
        row_counts = [file.metadata.row_group(group).num_rows for group in range(groups)]
        for group in range(at_group, groups):
            if not start <= size * group // groups < stop:
                continue
            batches = file.iter_batches(
                batch_size=_READ_ROWS, row_groups=[group], columns=columns, use_threads=False
            )
            batches = _gathered(batches)
            skipped = at_row if group == at_group else 0
            before, place = sum(row_counts[:group]), f"{path}, row group {group}"
            for block in batch_blocks(batches, place, field, group, skipped):
                rows = before + block.position[1] + len(block.content[2])
                yield block._replace(fraction=rows / sum(row_counts))


def _gathered(batches: "Iterator[pyarrow.RecordBatch]") -> "Iterator[pyarrow.RecordBatch]":
    """Merges batches into fewer ones, of about `_READ_BYTES`."""
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows, size = rows + len(batch), size + batch.nbytes
        if rows >= _MOST_ROWS or size >= _READ_BYTES:
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
        _check_names(path, file.schema.names, field)
        needs_all = field.needed is None or field.needed not in file.schema.names
        for batch in batches:
            batch = batch if needs_all else batch.select([field.needed])
            _check_offsets(batch)
            yield batch


def _check_names(path: Path, names: list[str], field: Field) -> None:
    """Raises ValueError if a needed column occurs twice."""
    for name in names if field.needed is None else [field.needed]:
        if names.count(name) > 1:
            raise ValueError(
                f"{path} has {names.count(name)} columns {name!r}: give them different names"
            )


def _check_offsets(batch: "pyarrow.RecordBatch") -> None:
    """Raises ArrowInvalid for values outside the file, which Arrow itself would read.

    Strings are checked as bytes: a string that is not UTF-8 makes only its row bad.
    """
    import pyarrow as pa

    bytes_of = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}

    def check(column: pa.Array) -> None:
        if pa.types.is_dictionary(column.type):
            check(column.dictionary)
            # `safe` checks that the indices are in the dictionary.
            pa.DictionaryArray.from_arrays(column.indices, column.dictionary, safe=True)
        else:
            kind = bytes_of.get(column.type)
            (column if kind is None else column.view(kind)).validate(full=True)

    for column in batch.columns:
        check(column)
