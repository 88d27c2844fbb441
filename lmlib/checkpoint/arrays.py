"""The arrays of a checkpoint: names, files, checks against a target, and reading.

Each is an uncompressed zarr v2 array: the sizes of its files follow from its shape, and are known
before anything is allocated. Each process reads the chunks that its devices need, each once, and
only verified bytes reach a device.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from lmlib.checkpoint.failures import DamagedCheckpointError
from lmlib.checkpoint.folders import files_of
from lmlib.checkpoint.manifest import THREADS, Manifest, SavedArray, read_verified
from lmlib.storage.bucket.failures import BucketError
from lmlib.storage.store import Store
from lmlib.storage.stored_json import parse_json

STATE = "state"
ZARRAY = ".zarray"  # the description of an array, next to its chunks
LAYOUTS = "array_metadatas"
# Orbax's own files next to the folders of the arrays. lmlib does not read them.
STATE_FILES = (
    *("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "commit_success.txt"),
    f"{LAYOUTS}/",
)

_LARGEST_TEXT = 64 << 20  # bytes, for the files of a checkpoint that hold no array
_LARGEST_ZARRAY = 1 << 16  # bytes


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Returns leaves by path, in tree order: `{"model.norm.scale": …, "optimizer.0.count": …}`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def check_savable(arrays: dict[str, Any]) -> None:
    """Raises ValueError for a leaf that is not a non-empty array, or has an illegal name."""
    for name, array in arrays.items():
        if not isinstance(array, jax.Array) or array.size == 0:
            raise ValueError(
                f"cannot save {name}: it is {_describe(array)}, not an array with elements; "
                "keep it out of the state or make it a static field"
            )
        if "/" in name or name.startswith((".", "_")) or name == LAYOUTS:
            raise ValueError(
                f"cannot save {name!r}: an array's folder has the name of its leaf, which "
                "may contain no / and not begin with . or _; rename it"
            )


def saved_arrays(arrays: dict[str, Any]) -> dict[str, SavedArray]:
    """Returns the manifest's entries for the arrays."""
    return {
        name: SavedArray(tuple(array.shape), str(array.dtype)) for name, array in arrays.items()
    }


def part_of(manifest: Manifest, part: str) -> Manifest:
    """Returns a manifest with only the arrays whose names begin with `part`, and their files."""
    return dataclasses.replace(
        manifest,
        arrays={name: array for name, array in manifest.arrays.items() if name.startswith(part)},
        files={
            name: file
            for name, file in manifest.files.items()
            if name.startswith(f"{STATE}/{part}") or not part
        },
    )


def check_target(manifest: Manifest, wanted: dict[str, Any]) -> None:
    """Raises ValueError if a checkpoint's arrays differ from `wanted`."""
    step, saved = manifest.step, manifest.arrays
    absent, unknown = wanted.keys() - saved.keys(), saved.keys() - wanted.keys()
    if absent or unknown:
        found = {"lacks": absent, "also has": unknown}
        parts = [f"{verb} {_few(names)}" for verb, names in found.items() if names]
        raise ValueError(
            f"checkpoint {step} holds another model or optimizer: it {' and '.join(parts)}; "
            "restore it with the config that it was saved with"
        )
    for name, leaf in wanted.items():
        if saved[name] != SavedArray(tuple(leaf.shape), str(leaf.dtype)):
            is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            same = "JAX_DEFAULT_PRNG_IMPL" if is_key else "config"
            raise ValueError(
                f"checkpoint {step} has {name} as {_describe(saved[name])}, but "
                f"{_describe(leaf)} is wanted; restore it with the {same} that it was saved with"
            )
        mesh = getattr(leaf.sharding, "mesh", None)
        if leaf.sharding is None or isinstance(mesh, jax.sharding.AbstractMesh):
            raise ValueError(
                f"the target's {name} is on no devices (sharding {leaf.sharding}): "
                "give it a NamedSharding of a mesh from jax.make_mesh"
            )


def is_chunk(file: str, wanted: Collection[str]) -> bool:
    """True if a file of a step holds elements of one of the arrays `wanted`."""
    folder, _, rest = file.partition("/")
    name, _, chunk = rest.partition("/")
    return folder == STATE and name in wanted and chunk != ZARRAY


def check_layout(
    folder: Path, manifest: Manifest, wanted: dict[str, Any], files: Store | None = None
) -> dict[str, tuple[int, ...]]:
    """Compares the files of the arrays with the wanted shapes and dtypes; opens no array.

    The sizes of the files must have been compared with the manifest before.

    Args:
      files: the files of a step that is not visible in `folder` yet.

    Returns:
      The chunk shape of each array.

    Raises:
      DamagedCheckpointError: if an array has another shape, another dtype, is compressed or lacks a
        chunk, or if there are files that belong to no array.
    """
    rest = {name: file.size for name, file in manifest.files.items()}
    chunks, files = {}, files or files_of(folder)
    for name, leaf in wanted.items():
        prefix, stored = f"{STATE}/{name}/", stored_leaf(leaf)
        chunks[name] = _chunk_shape(folder, files, prefix + ZARRAY, rest, stored)
        for file, size in _chunk_files(chunks[name], stored).items():
            if rest.pop(prefix + file, None) != size:
                reason = f"is no chunk of {size:,} bytes, as {_describe(leaf)} needs"
                raise DamagedCheckpointError(folder, prefix + file, reason)
    for file, size in rest.items():
        if not file.startswith(("notes/", *(f"{STATE}/{text}" for text in STATE_FILES))):
            raise DamagedCheckpointError(folder, file, "belongs to no array")
        if size > _LARGEST_TEXT:
            raise DamagedCheckpointError(folder, file, f"has {size:,} bytes, too many for a text")
    return chunks


def _chunk_shape(
    folder: Path, files: Store, description: str, sizes: dict[str, int], leaf: jax.ShapeDtypeStruct
) -> tuple[int, ...]:
    """Reads the chunk shape of an array from its `.zarray`, and removes that file from `sizes`."""
    if (size := sizes.pop(description, None)) is None:
        raise DamagedCheckpointError(folder, description, "is missing")
    if size > _LARGEST_ZARRAY:
        raise DamagedCheckpointError(folder, description, f"has {size:,} bytes, too many")
    try:
        zarray = parse_json(files.read(description))
        chunks = [int(length) for length in zarray["chunks"]]
        stored = (tuple(zarray["shape"]), np.dtype(str(zarray["dtype"])))
        plain = (zarray["compressor"], zarray["filters"], zarray["order"]) == (None, None, "C")
        separator = zarray.get("dimension_separator", ".")
    except BucketError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(folder, description, f"cannot be read: {error!r}") from error
    shape = leaf.shape
    if stored != (shape, leaf.dtype):
        reason = f"says {stored[1]}{list(stored[0])}, but {_describe(leaf)} was saved"
        raise DamagedCheckpointError(folder, description, reason)
    fits = len(chunks) == len(shape) and all(
        0 < chunk <= length for chunk, length in zip(chunks, shape, strict=False)
    )
    if not fits or not plain or separator != ".":
        raise DamagedCheckpointError(folder, description, "describes no uncompressed chunks")
    counts = [-(-length // chunk) for length, chunk in zip(shape, chunks, strict=True)]
    if math.prod(counts) > len(sizes):  # more than there are files: don't enumerate them
        raise DamagedCheckpointError(folder, description, f"asks for {math.prod(counts):,} chunks")
    return tuple(chunks)


def _chunk_files(chunk: tuple[int, ...], leaf: jax.ShapeDtypeStruct) -> dict[str, int]:
    """Returns the sizes of the files that hold an array's chunks, by name."""
    counts = [-(-length // part) for length, part in zip(leaf.shape, chunk, strict=True)]
    names = map(chunk_name, itertools.product(*map(range, counts)))
    return dict.fromkeys(names, math.prod(chunk) * leaf.dtype.itemsize)


def chunk_name(place: Sequence[int]) -> str:
    """Returns the file of the chunk at `place` in the grid of chunks; "0" for a scalar array."""
    return ".".join(map(str, place)) or "0"


def stored_leaf(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a leaf on disk; typed PRNG keys are stored as their words."""
    bare = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.eval_shape(jax.random.key_data, bare) if is_key else bare


def _describe(leaf: Any) -> str:
    """Formats an array as `float32[4, 8]`."""
    if not hasattr(leaf, "shape"):
        return f"{leaf!r} ({type(leaf).__name__})"
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _few(names: set[str]) -> str:
    """Lists at most three names, in order, then the number of the others."""
    shown = sorted(names)[:3]
    rest = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join([*shown, *rest])


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
