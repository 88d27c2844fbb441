"""Training states compared bit for bit, and metrics without times."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

# Metrics of the system are not in every line.
SYSTEM = ("process_memory_bytes", "device_memory_bytes", "cpu_cores", "gpu_utilization")
TIMES = (
    *("tokens_per_second", "step_seconds", "data_wait_seconds", "goodput", "peak_memory_bytes"),
    *SYSTEM,
)


def assert_same_bits(one: Any, other: Any) -> None:
    """Every leaf, typed PRNG keys by their words."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    expected = jax.tree.leaves(other)
    for (path, leaf), wanted in zip(jax.tree.leaves_with_path(one), expected, strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(_bits(leaf), _bits(wanted), strict=True, err_msg=name)


def bits(tree: Any) -> list[tuple[np.dtype, bytes]]:
    """The dtype and the bytes of every leaf, in tree order."""
    return [(leaf.dtype, _bits(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def target_of(state: Any) -> Any:
    """The shape, dtype and sharding of every leaf."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def _bits(leaf: Any) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without the values that differ from run to run."""
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def cut_short(run: Path, step: int, copy: Path) -> Path:
    """A copy of a finished run, as it was after its checkpoint `step`; its newer lines stay."""
    shutil.copytree(run, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if checkpoint.name.isdecimal() and int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    (copy / "result.json").unlink()
    return copy
