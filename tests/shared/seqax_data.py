"""Data sets that are written the way seqax writes them, by zarr itself."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zarr
from numcodecs import Blosc, Delta


def write_seqax(
    path: Path, documents: Sequence[Sequence[int]], split: str = "train", filtered: bool = True
) -> None:
    """Writes a split in chunks of 4; TensorStore can read it without `filtered`."""
    group = zarr.open_group(path, mode="a", zarr_format=2).require_group(split)
    group.attrs["max_token_id"] = max(itertools.chain(*documents), default=0)
    encoded = [2 * t + (place == 0) for document in documents for place, t in enumerate(document)]
    starts = np.cumsum([0, *map(len, documents)])
    filters = [Delta(dtype="i8")] if filtered else None
    for name, values, settings in (
        ("encoded_tokens", np.array(encoded, np.uint32), {}),
        ("seq_starts", starts.astype(np.uint64), {"filters": filters}),
    ):
        group.create_array(
            name,
            data=values,
            chunks=(4,),
            compressors=Blosc(cname="lz4", clevel=5, shuffle=Blosc.BITSHUFFLE),
            config={"write_empty_chunks": True},  # as zarr 2 did
            **settings,
        )
