"""Speed of saving and restoring, compared with Orbax, bare TensorStore and `np.save`.

    python benchmarks/checkpoint.py [--megabytes=1000] [--rounds=3] [--directory=/tmp]

The state is random fp32, as hard to compress as trained weights. The methods take turns, so that a
busy machine slows all of them alike; Orbax has its default settings. Each is measured after the
previous method's data has reached the disk. Printed values are medians over the rounds. The page
cache is warm when restoring. "blocked" is the part of a save in which no step can run; CPU seconds
cover all threads.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from absl import app, flags, logging

from lmlib.checkpoint import Checkpoints
from lmlib.terminal.table import columns
from runner.jax_settings.devices import choose_devices

_MEGABYTES = flags.DEFINE_integer("megabytes", 1000, "Size of the state.", lower_bound=8)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Saves and restores of each way.", lower_bound=1)
_DIRECTORY = flags.DEFINE_string("directory", None, "Where to save; default: the system's for tmp.")

ARRAYS = 8

State = dict[str, jax.Array]
Wait = Callable[[], None]  # returns when the save is on disk, or in the page cache


def target_of(state: State) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        for name, array in state.items()
    }


def save_lmlib(folder: Path, state: State) -> Wait:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state, {"tokens": 1})
    return checkpoints.close


def restore_lmlib(folder: Path, state: State) -> State:
    with Checkpoints(folder, read_only=True) as checkpoints:
        return checkpoints.restore(1, target_of(state))[0]


def save_orbax(folder: Path, state: State) -> Wait:
    manager = ocp.CheckpointManager(folder)
    manager.save(1, args=ocp.args.StandardSave(state))
    return manager.close


def restore_orbax(folder: Path, state: State) -> State:
    with ocp.CheckpointManager(folder) as manager:
        return manager.restore(1, args=ocp.args.StandardRestore(target_of(state)))


def tensorstore_spec(folder: Path, name: str, array: jax.Array) -> dict[str, Any]:
    """Returns the spec of a Zarr 3 array in one chunk with crc32c, which also detects damage."""
    return {
        "driver": "zarr3",
        "fill_missing_data_reads": False,
        "kvstore": {"driver": "file", "path": f"{folder / name}/"},
        "metadata": {
            "shape": array.shape,
            "data_type": str(array.dtype),
            "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
        },
    }


def save_tensorstore(folder: Path, state: State) -> Wait:
    writes = [
        ts.open(tensorstore_spec(folder, name, array), create=True).result().write(array)
        for name, array in state.items()
    ]
    for write in writes:
        write.copy.result()
    return lambda: [write.result() for write in writes] and None


def restore_tensorstore(folder: Path, state: State) -> State:
    reads = {
        name: ts.open(tensorstore_spec(folder, name, array)).result().read()
        for name, array in state.items()
    }
    return {name: jax.device_put(read.result()) for name, read in reads.items()}


def save_numpy(folder: Path, state: State) -> Wait:
    folder.mkdir()
    for name, array in state.items():
        np.save(folder / f"{name}.npy", np.asarray(array))
    return lambda: None


def restore_numpy(folder: Path, state: State) -> State:
    return {name: jax.device_put(np.load(folder / f"{name}.npy")) for name in state}


WAYS = {
    "lmlib, verified": (save_lmlib, restore_lmlib),
    "Orbax's defaults": (save_orbax, restore_orbax),
    "TensorStore, crc32c": (save_tensorstore, restore_tensorstore),
    "np.save": (save_numpy, restore_numpy),
}
MEASURED = ("blocked s", "save s", "CPU s", "restore s", "CPU s")


def measure(way: str, state: State) -> list[float]:
    """Returns the numbers named in `MEASURED`, for one save and one restore."""
    save, restore = WAYS[way]
    with tempfile.TemporaryDirectory(dir=_DIRECTORY.value) as parent:
        folder = Path(parent) / "state"
        os.sync()
        began, cpu = time.perf_counter(), time.process_time()
        wait = save(folder, state)
        blocked = time.perf_counter() - began
        wait()
        saving = [blocked, time.perf_counter() - began, time.process_time() - cpu]
        os.sync()
        began, cpu = time.perf_counter(), time.process_time()
        restored = jax.block_until_ready(restore(folder, state))
        restoring = [time.perf_counter() - began, time.process_time() - cpu]
        for name, array in state.items():
            np.testing.assert_array_equal(restored[name], array)
    return saving + restoring


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)
    choose_devices()
    rows = _MEGABYTES.value * 10**6 // (ARRAYS * 4 * 1024)
    keys = jax.random.split(jax.random.key(0), ARRAYS)
    state = {f"w{i}": jax.random.normal(key, (rows, 1024)) for i, key in enumerate(keys)}
    for way in WAYS:
        measure(way, {"warm": state["w0"][:8]})
    rounds = [{way: measure(way, state) for way in WAYS} for _ in range(_ROUNDS.value)]
    medians = {
        way: [statistics.median(column) for column in zip(*(r[way] for r in rounds), strict=True)]
        for way in WAYS
    }
    size = sum(array.nbytes for array in state.values())
    load = os.getloadavg()[0]
    print(f"{size / 1e9:.2f} GB, {os.cpu_count()} cores, load {load:.1f}, {_ROUNDS.value} rounds")
    table = [["", *MEASURED]]
    table += [[way, *(f"{value:.2f}" for value in medians[way])] for way in WAYS]
    print(columns(table))
    ours, orbax = medians["lmlib, verified"], medians["Orbax's defaults"]
    _, faster, leaner, sooner, _ = (theirs / mine for theirs, mine in zip(orbax, ours, strict=True))
    print(
        f"against Orbax's defaults: saves {faster:.1f}× faster with 1/{leaner:.1f} of the CPU, "
        f"restores {sooner:.1f}× faster"
    )


if __name__ == "__main__":
    app.run(main)
