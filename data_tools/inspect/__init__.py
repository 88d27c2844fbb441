"""Shows what a data set of flat tokens holds, checks that it is whole, and what a model sees."""

from data_tools.inspect.array_files import Damage
from data_tools.inspect.batch_rows import Piece, Row, batch_rows
from data_tools.inspect.decoding import decoder
from data_tools.inspect.description import SplitDescription, UnfinishedShard, describe_split
from data_tools.inspect.lengths import DocumentLengths, LengthBin, document_lengths
from data_tools.inspect.origins import row_origins
from data_tools.inspect.samples import Sample, samples
from data_tools.inspect.saved_run import SavedRun
from data_tools.inspect.splits import open_split, split_folders
from data_tools.inspect.verification import verify_split

__all__ = [
    "Damage",
    "DocumentLengths",
    "LengthBin",
    "Piece",
    "Row",
    "Sample",
    "SavedRun",
    "SplitDescription",
    "UnfinishedShard",
    "batch_rows",
    "decoder",
    "describe_split",
    "document_lengths",
    "open_split",
    "row_origins",
    "samples",
    "split_folders",
    "verify_split",
]
