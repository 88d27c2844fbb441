"""Speed of tokens and checkpoints in a bucket, compared with a plain copy by fsspec.

    pip install s3fs && python benchmarks/buckets.py [--latency=0.05] [--megabytes=1000]

moto's server replaces S3, behind a proxy that delays each request by `latency` seconds. Both share
the cores with the code under test, so compare the seconds with each other and ignore the MB/s. It
measures two epochs of shuffled rows with the waiting time of their steps, the saving and reading of
a checkpoint, and fsspec's copies of the same bytes. The token cache is empty at first.
"""

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/shared"))

from buckets.proxy import FaultyProxy
from buckets.servers import BUCKET, emulator, environment

from lmlib.checkpoint import Checkpoints
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.prefetch import ReadAhead
from lmlib.data.stored.shard_writer import ShardWriter
from lmlib.terminal.table import columns
from runner.jax_settings.devices import choose_devices

_LATENCY = flags.DEFINE_float("latency", 0.05, "Seconds of each request.", lower_bound=0.0)
_MEGABYTES = flags.DEFINE_integer("megabytes", 1000, "Size of the checkpoint.", lower_bound=8)
_MEGATOKENS = flags.DEFINE_integer("megatokens", 16, "Size of the data set.", lower_bound=1)
_STEP_SECONDS = flags.DEFINE_float("step_seconds", 0.5, "Seconds of a step.", lower_bound=0.0)

ROWS, LENGTH = 32, 2_048  # rows and tokens per row of a batch
AHEAD = 2  # batches read ahead, as in runs
ARRAYS = 16


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def write_tokens(folder: Path) -> int:
    """Writes a data set; returns the steps of an epoch."""
    random, writer = np.random.default_rng(0), ShardWriter(folder, "train", vocab_size=50_000)
    for _ in range(_MEGATOKENS.value * 1_000):
        writer.append(random.integers(0, 50_000, 1_000), text_bytes=4_000)
    writer.finish()
    return FlatTokens(str(folder), "train", ROWS, LENGTH, epochs=1).batches


def epoch(url: str, steps: int) -> tuple[float, float]:
    """Returns the seconds of an epoch, and the steps' waiting time after the first batch."""
    source = FlatTokens(url, "train", ROWS, LENGTH)
    batches = ReadAhead(map(source.batch, itertools.count()), AHEAD, "tokens")
    began, waited = time.perf_counter(), 0.0
    for step in range(steps):
        wait = timed(batches.next)
        waited += wait if step else 0.0
        time.sleep(_STEP_SECONDS.value)  # stands for the device's work
    batches.close()
    return time.perf_counter() - began, waited


def tokens(files: Any, root: str, scratch: Path) -> list[list[str]]:
    steps = write_tokens(scratch / "tokens")
    files.put(str(scratch / "tokens"), f"{root}/tokens", recursive=True)
    rows = []
    for name in ("first", "second"):
        seconds, waited = epoch(f"s3://{root}/tokens", steps)
        rows.append([f"{name} epoch, {steps} steps of {_STEP_SECONDS.value:g} s", f"{seconds:.1f}"])
        rows.append(["  of which steps waited", f"{waited:.1f}"])
    copied = timed(lambda: files.get(f"{root}/tokens", str(scratch / "copy"), recursive=True))
    return [*rows, ["fsspec's copy of the tokens", f"{copied:.1f}"]]


def checkpoint(files: Any, root: str, scratch: Path) -> list[list[str]]:
    rows = _MEGABYTES.value * 10**6 // (ARRAYS * 4 * 1024)
    keys = jax.random.split(jax.random.key(0), ARRAYS)
    state = {f"w{i}": jax.random.normal(key, (rows, 1024)) for i, key in enumerate(keys)}
    jax.block_until_ready(state)
    with Checkpoints(f"s3://{root}/checkpoints") as checkpoints:
        began = time.perf_counter()
        checkpoints.save(1, state, {"tokens": 1})
        blocked = time.perf_counter() - began
    saved = time.perf_counter() - began
    with Checkpoints(f"s3://{root}/checkpoints", read_only=True) as checkpoints:
        target = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding),
            state,
        )
        began = time.perf_counter()
        restored = jax.block_until_ready(checkpoints.restore(1, target)[0])
        read = time.perf_counter() - began
    for name, array in state.items():
        np.testing.assert_array_equal(restored[name], array)
    (scratch / "arrays").mkdir()
    for name, array in state.items():
        np.save(scratch / "arrays" / f"{name}.npy", array)
    source, target = str(scratch / "arrays"), str(scratch / "back")
    put = timed(lambda: files.put(source, f"{root}/arrays", recursive=True))
    got = timed(lambda: files.get(f"{root}/arrays", target, recursive=True))
    return [
        ["a save in which no step could run", f"{blocked:.1f}"],
        ["the whole save", f"{saved:.1f}"],
        ["reading it, all digests compared", f"{read:.1f}"],
        ["fsspec's copy to the bucket", f"{put:.1f}"],
        ["fsspec's copy from the bucket", f"{got:.1f}"],
    ]


def main(_: list[str]) -> None:
    import s3fs

    choose_devices()
    logging.set_verbosity(logging.ERROR)
    with (
        tempfile.TemporaryDirectory() as scratch,
        emulator("s3") as server,
        FaultyProxy(server, latency=_LATENCY.value) as proxy,
    ):
        found = environment("s3", proxy.port)
        os.environ.update(found | {"XDG_CACHE_HOME": f"{scratch}/cache"})
        files = s3fs.S3FileSystem(endpoint_url=found["AWS_ENDPOINT_URL"])
        root = f"{BUCKET}/benchmark"
        measured = tokens(files, root, Path(scratch)) + checkpoint(files, root, Path(scratch))
    print(
        f"{_LATENCY.value * 1e3:g} ms a request, {_MEGATOKENS.value} M tokens in batches of {ROWS} "
        f"× {LENGTH}, a checkpoint of {_MEGABYTES.value:,} MB, load {os.getloadavg()[0]:.1f}"
    )
    print(columns([["", "s"], *measured]))


if __name__ == "__main__":
    app.run(main)
