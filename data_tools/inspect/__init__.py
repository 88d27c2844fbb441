"""Shows what a data set of flat tokens holds, checks that it is whole, and what a model sees."""

from data_tools.inspect.batch_rows import Piece, Row, batch_rows, is_masked, row_origins
from data_tools.inspect.description import (
    DocumentLengths,
    LengthBin,
    Sample,
    SplitDescription,
    UnfinishedShard,
    decoder,
    describe_split,
    document_lengths,
    open_split,
    samples,
    split_folders,
)
from data_tools.inspect.verification import Damage, verify_split

__all__ = [
    "Damage",
    "DocumentLengths",
    "LengthBin",
    "Piece",
    "Row",
    "Sample",
    "SplitDescription",
    "UnfinishedShard",
    "batch_rows",
    "decoder",
    "describe_split",
    "document_lengths",
    "is_masked",
    "open_split",
    "row_origins",
    "samples",
    "split_folders",
    "verify_split",
]
