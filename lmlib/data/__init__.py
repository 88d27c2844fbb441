"""Training batches: the flat-token format, sources, shuffling and prefetching."""

from lmlib.data.batch import Batch, Source, place
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.flat_tokens_writer import FlatTokensWriter
from lmlib.data.metadata import Metadata, Shard, TokenizerIdentity, read_metadata
from lmlib.data.permutation import permute
from lmlib.data.prefetch import Prefetch
from lmlib.data.synthetic import Synthetic
from lmlib.data.token_arrays import DamagedDataError

__all__ = [
    "Batch",
    "DamagedDataError",
    "FlatTokens",
    "FlatTokensWriter",
    "Metadata",
    "Prefetch",
    "Shard",
    "Source",
    "Synthetic",
    "TokenizerIdentity",
    "permute",
    "place",
    "read_metadata",
]
