"""Training batches: the flat-token format, sources, shuffling and prefetching.

Each name is imported when it is first asked for: what reads or writes one file does without the
rest, and without JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmlib.data.batch import Batch, Source, place
    from lmlib.data.flat_tokens import FlatTokens
    from lmlib.data.mixture import Mixture, Stage
    from lmlib.data.permutation import permute
    from lmlib.data.prefetch import Prefetch
    from lmlib.data.resumable import Resumable
    from lmlib.data.stages import Stages
    from lmlib.data.stored.damage import DamagedDataError
    from lmlib.data.stored.metadata import (
        ShardMetadata,
        SplitMetadata,
        TokenizerIdentity,
        read_shard,
        read_split,
    )
    from lmlib.data.stored.shard_writer import ShardWriter, finished_shard, shard_progress
    from lmlib.data.synthetic import Synthetic
    from lmlib.data.text import HasText, TextCodec

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
    "Stages",
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

_HOMES = {
    "Batch": "lmlib.data.batch",
    "DamagedDataError": "lmlib.data.stored.damage",
    "FlatTokens": "lmlib.data.flat_tokens",
    "HasText": "lmlib.data.text",
    "Mixture": "lmlib.data.mixture",
    "Prefetch": "lmlib.data.prefetch",
    "Resumable": "lmlib.data.resumable",
    "ShardMetadata": "lmlib.data.stored.metadata",
    "ShardWriter": "lmlib.data.stored.shard_writer",
    "Source": "lmlib.data.batch",
    "SplitMetadata": "lmlib.data.stored.metadata",
    "Stage": "lmlib.data.mixture",
    "Stages": "lmlib.data.stages",
    "Synthetic": "lmlib.data.synthetic",
    "TextCodec": "lmlib.data.text",
    "TokenizerIdentity": "lmlib.data.stored.metadata",
    "finished_shard": "lmlib.data.stored.shard_writer",
    "permute": "lmlib.data.permutation",
    "place": "lmlib.data.batch",
    "read_shard": "lmlib.data.stored.metadata",
    "read_split": "lmlib.data.stored.metadata",
    "shard_progress": "lmlib.data.stored.shard_writer",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
