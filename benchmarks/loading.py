"""Random sequences from flat tokens, compared with a memory map and with seqax's layout.

    python benchmarks/loading.py [--millions=128] [--batches=300]

Writes the same random tokens three times into a temporary folder: in lmlib's format (uint16, crc32c
over every 16 Ki tokens), as a bare file for `np.memmap`, and as zarr v2 in Blosc chunks of 4 Mi
uint32 tokens, as seqax stores them. Then it reads batches of 8 × 4,097 tokens at the same random
places. The readers take turns, so that a busy machine slows all of them alike. The page cache is
warm.

"in flight" reads the next two batches while one is used. The last rows are the calls of a training
loop, including shuffling, segments, positions and masks.
"""

import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorstore as ts
from absl import app, flags

from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.shard_writer import ShardWriter
from lmlib.data.stored.split import Span, StoredSplit
from lmlib.terminal.table import columns

_MILLIONS = flags.DEFINE_integer("millions", 128, "Millions of tokens to write.", lower_bound=16)
_BATCHES = flags.DEFINE_integer("batches", 300, "Batches of each measurement.", lower_bound=3)

ROWS, LENGTH = 8, 4097
VOCAB_SIZE = 50_000
ROUNDS = 3
SEQAX_CHUNK = 4 * 2**20
IN_FLIGHT = 3
PIECE = 2**20  # tokens written at once

Read = Callable[[int], object]  # returns the batch with that number


def write(folder: Path, tokens: int) -> None:
    """Writes the three data sets with the same tokens."""
    rng = np.random.default_rng(0)
    writer = ShardWriter(folder / "lmlib", "train", vocab_size=VOCAB_SIZE)
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder / 'seqax'}/"},
        "metadata": {
            "dtype": "<u4",
            "shape": [tokens],
            "chunks": [SEQAX_CHUNK],
            "compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
        },
    }
    seqax = ts.open(spec, create=True).result()
    waiting: list[np.ndarray] = []
    with open(folder / "memmap", "wb") as bare:
        for start in range(0, tokens, PIECE):
            ids = rng.integers(0, VOCAB_SIZE, PIECE).astype(np.uint16)
            lengths = rng.integers(100, 900, PIECE // 100)
            lengths = lengths[: np.searchsorted(lengths.cumsum(), PIECE)]
            writer.mark(start)
            writer.extend(ids, np.append(lengths, PIECE - lengths.sum()), 2 * PIECE)
            bare.write(ids.tobytes())
            waiting.append(2 * ids.astype(np.uint32))
            if len(waiting) * PIECE == SEQAX_CHUNK:
                seqax[start + PIECE - SEQAX_CHUNK : start + PIECE] = np.concatenate(waiting)
                waiting = []
    writer.finish()


def readers(folder: Path, places: np.ndarray) -> dict[str, Read]:
    """Returns the methods that read the batch at `places[number]`."""
    bare = np.memmap(folder / "memmap", np.uint16, mode="r")
    stored = StoredSplit(folder / "lmlib" / "train")
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder / 'seqax'}/"}}
    seqax = ts.open(spec, read=True).result()
    shuffled = FlatTokens(str(folder / "lmlib"), "train", ROWS, LENGTH - 1)
    reading: deque[list[Span]] = deque()

    def begin(number: int) -> list[Span]:
        return [stored.read(place, place + LENGTH) for place in places[number].tolist()]

    def finish(spans: list[Span]) -> np.ndarray:
        return np.stack([span.result()[0] for span in spans])

    def in_flight(number: int) -> np.ndarray:
        while len(reading) < IN_FLIGHT:
            reading.append(begin((number + len(reading)) % len(places)))
        return finish(reading.popleft())

    def from_memory_map(number: int) -> np.ndarray:
        return np.stack([bare[place : place + LENGTH] for place in places[number]])

    def from_seqax(number: int) -> np.ndarray:
        spans = [seqax[place : place + LENGTH].read() for place in places[number].tolist()]
        return np.stack([span.result() >> 1 for span in spans])

    def packed_from_memory_map(number: int) -> object:
        tokens = from_memory_map(number)
        return packed_batch(tokens, np.zeros(tokens.shape, bool), np.full(ROWS, LENGTH - 1))

    return {
        "np.memmap, tokens alone": from_memory_map,
        "lmlib, tokens and document starts": lambda number: finish(begin(number)),
        "the same, three batches in flight": in_flight,
        "zarr v2, 4 Mi-token chunks": from_seqax,
        "np.memmap, packed into a Batch": packed_from_memory_map,
        "lmlib, FlatTokens.batch": shuffled.batch,
    }


def check(folder: Path, places: np.ndarray) -> None:
    """Checks that all methods read the same tokens."""
    ways = readers(folder, places)
    expected = ways.pop("np.memmap, tokens alone")(0)
    for name in list(ways)[:3]:
        np.testing.assert_array_equal(ways[name](0), expected, err_msg=name)


def measure(read: Read, numbers: range) -> tuple[float, float]:
    """Returns the milliseconds of wall time and of CPU time per batch."""
    began, cpu_began = time.perf_counter(), time.process_time()
    for number in numbers:
        read(number)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return 1e3 * wall / len(numbers), 1e3 * cpu / len(numbers)


def main(arguments: list[str]) -> None:
    del arguments
    tokens = _MILLIONS.value * 2**20 // SEQAX_CHUNK * SEQAX_CHUNK
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, tokens)
        rng = np.random.default_rng(1)
        places = rng.integers(0, tokens - LENGTH, (_BATCHES.value, ROWS))
        check(folder, places)
        ways = readers(folder, places)
        best = dict.fromkeys(ways, (np.inf, np.inf))
        for turn in range(ROUNDS):
            numbers = range(turn * _BATCHES.value // ROUNDS, (turn + 1) * _BATCHES.value // ROUNDS)
            for name, read in ways.items():
                # seqax's layout is slow to read, so a few batches suffice.
                some = numbers[:5] if "zarr v2" in name else numbers
                best[name] = min(best[name], measure(read, some))
    baseline = best["np.memmap, tokens alone"][0]
    print(f"{tokens:,} tokens; a batch is {ROWS} × {LENGTH:,}; the best of {ROUNDS} turns\n")
    head = ("", "ms a batch", "CPU ms", "M tokens/s", "× np.memmap")
    rows = [
        (
            name,
            f"{wall:.3f}",
            f"{cpu:.3f}",
            f"{ROWS * LENGTH / wall / 1e3:,.1f}",
            f"{wall / baseline:.1f}",
        )
        for name, (wall, cpu) in best.items()
    ]
    print(columns([head, *rows]))


if __name__ == "__main__":
    app.run(main)
