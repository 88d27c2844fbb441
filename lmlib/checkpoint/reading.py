"""Reading arrays: each process reads and verifies the chunks that its devices need.

It reads none of them twice, and only verified bytes reach a device.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lmlib.checkpoint.arrays import STATE, chunk_name, stored_leaf
from lmlib.checkpoint.folders import files_of
from lmlib.checkpoint.manifest import THREADS, Manifest, read_verified


def read_arrays(
    folder: Path,
    manifest: Manifest,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    chunks: Mapping[str, tuple[int, ...]],
) -> dict[str, jax.Array]:
    """Returns the arrays `wanted` of a checkpoint, laid out according to their shardings.

    Every process of the run calls it. Between them they read and verify every chunk.

    Args:
      chunks: the chunk shape of each array, from `check_layout`.

    Raises:
      DamagedCheckpointError: for a chunk that cannot be read or has other bytes than were saved.
    """

    files = files_of(folder)

    def read(name: str) -> jax.Array:
        leaf = stored_leaf(wanted[name])
        chunk = functools.cache(
            lambda file: (
                read_verified(files, folder, f"{STATE}/{name}/{file}", manifest)
                .view(leaf.dtype)
                .reshape(chunks[name])
            )
        )
        return jax.make_array_from_callback(
            leaf.shape,
            wanted[name].sharding,
            lambda index: _region(index, leaf, chunks[name], chunk),
        )

    with ThreadPoolExecutor(THREADS) as threads:
        arrays = dict(zip(wanted, threads.map(read, wanted), strict=True))
    return {name: _typed(array, wanted[name].dtype) for name, array in arrays.items()}


def _region(
    index: Any,
    leaf: jax.ShapeDtypeStruct,
    chunk: tuple[int, ...],
    read: Callable[[str], np.ndarray],
) -> np.ndarray:
    """Assembles the elements `index` of an array from the chunks that hold them."""
    bounds = [part.indices(length)[:2] for part, length in zip(index, leaf.shape, strict=True)]
    grid = [
        range(start // length, -(-stop // length))
        for (start, stop), length in zip(bounds, chunk, strict=True)
    ]
    region = np.empty([stop - start for start, stop in bounds], leaf.dtype)
    for numbers in itertools.product(*grid):
        values = read(chunk_name(numbers))
        if values.shape == region.shape and math.prod(map(len, grid)) == 1:
            return values  # the chunk itself, without a copy
        inside, outside = [], []
        for number, length, (start, stop) in zip(numbers, chunk, bounds, strict=True):
            first, last = max(start, number * length), min(stop, (number + 1) * length)
            inside.append(slice(first - number * length, last - number * length))
            outside.append(slice(first - start, last - start))
        region[tuple(outside)] = values[tuple(inside)]
    return region


def _typed(array: jax.Array, dtype: Any) -> jax.Array:
    """Converts stored words to PRNG keys; returns any other array unchanged."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.empty((), dtype)))
