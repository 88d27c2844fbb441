"""Training batches: the flat-token format, sources, shuffling and prefetching."""

from lmlib.data.batch import Batch, Source, place
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.metadata import (
    ShardMetadata,
    SplitMetadata,
    TokenizerIdentity,
    read_shard,
    read_split,
)
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.permutation import permute
from lmlib.data.prefetch import Prefetch
from lmlib.data.resumable import Resumable
from lmlib.data.shard_writer import ShardWriter, finished_shard, shard_progress
from lmlib.data.synthetic import Synthetic
from lmlib.data.text import HasText, TextCodec
from lmlib.data.token_arrays import DamagedDataError

__all__ = [
    "Batch",
    "DamagedDataError",
    "FlatTokens",
    "HasText",
    "Mixture",
    "Prefetch",
    "Resumable",
    "ShardMetadata",
    "ShardWriter",
    "Source",
    "SplitMetadata",
    "Stage",
    "Synthetic",
    "TextCodec",
    "TokenizerIdentity",
    "finished_shard",
    "permute",
    "place",
    "read_shard",
    "read_split",
    "shard_progress",
]
