import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lmlib.data.batch import Batch, place
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.synthetic import Synthetic

pytestmark = pytest.mark.several_devices


class Recording:
    """A source that remembers which rows were read."""

    def __init__(self, batch_size: int, sequence_length: int) -> None:
        self._source = Synthetic(50, batch_size, sequence_length)
        self.batch_size, self.sequence_length = batch_size, sequence_length
        self.max_token_id = self._source.max_token_id
        self.batches = self.bytes_per_target = self.tokenizer = None
        self.rows_read: list[int] = []

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        self.rows_read += range(self.batch_size)[rows]
        return self._source.batch(step, rows)


def mesh_of(data: int, fsdp: int, tensor: int) -> jax.sharding.Mesh:
    return jax.make_mesh(
        (data, fsdp, tensor),
        ("data", "fsdp", "tensor"),
        axis_types=(AxisType.Explicit,) * 3,
        devices=jax.devices()[: data * fsdp * tensor],
    )


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (8, 1, 1), (1, 1, 8)])
@pytest.mark.parametrize(
    "spec",
    [
        PartitionSpec(),
        PartitionSpec(("data", "fsdp"), None),
        PartitionSpec(("data", "fsdp"), "tensor"),
        PartitionSpec("fsdp", ("data", "tensor")),
    ],
)
def test_place_equals_the_batch(sizes: tuple[int, int, int], spec: PartitionSpec) -> None:
    source = Recording(8, 16)
    sharding = NamedSharding(mesh_of(*sizes), spec)
    placed = place(source, 3, sharding, order="plain")
    assert source.rows_read == list(range(8))  # each once
    assert isinstance(placed, Batch)

    def check(array: jax.Array, expected: np.ndarray) -> None:
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)

    jax.tree.map(check, placed, source.batch(3))


def test_devices_that_share_a_row_have_an_early_and_a_late_piece_of_it() -> None:
    source = Recording(8, 16)
    placed = place(source, 3, NamedSharding(mesh_of(2, 2, 2), PartitionSpec("data", "fsdp")))
    assert placed.order == "balanced"
    expected = source.batch(3)
    for name in ("tokens", "targets", "segment_ids", "positions", "loss_mask"):
        array, whole = getattr(placed, name), getattr(expected, name)
        for shard in array.addressable_shards:
            columns = (range(0, 4), range(12, 16)) if shard.index[1].start == 0 else (range(4, 12),)
            wanted = whole[shard.index[0]][:, [column for each in columns for column in each]]
            np.testing.assert_array_equal(shard.data, wanted)


def test_place_from_disk(example: Path) -> None:
    source = FlatTokens(str(example), "train", 8, 16)
    placed = place(source, 1, NamedSharding(mesh_of(2, 2, 2), PartitionSpec(("data", "fsdp"))))
    jax.tree.map(np.testing.assert_array_equal, placed, source.batch(1))


def test_a_mesh_that_does_not_divide_the_batch() -> None:
    sharding = NamedSharding(mesh_of(2, 2, 2), PartitionSpec(("data", "fsdp")))
    with pytest.raises(ValueError, match="batch of 6 sequences of 16 tokens cannot be split"):
        place(Synthetic(50, 6, 16), 0, sharding)


# Devices are dealt out so that the rows of a process are not contiguous.
TWO_PROCESSES = """
import sys
import jax
import numpy as np
sys.path.insert(0, {tests!r})
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
process = int(sys.argv[1])
jax.distributed.initialize("localhost:{port}", 2, process)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from lmlib.data.batch import place
from test_batch import Recording
first, second = np.split(np.array(jax.devices()), 2)
devices = np.stack([first[:2], second[:2], first[2:], second[2:]])
mesh = Mesh(devices, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
source = Recording(8, 4)
placed = place(source, 2, NamedSharding(mesh, PartitionSpec("data")))
mine = [0, 1, 4, 5] if process == 0 else [2, 3, 6, 7]
assert source.rows_read == mine, source.rows_read
expected = source.batch(2)
for array, whole in zip(jax.tree.leaves(placed), jax.tree.leaves(expected), strict=True):
    assert array.shape == (8, 4) and len(array.addressable_shards) == 4
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])
"""


@pytest.mark.slow
def test_each_of_two_processes_reads_its_own_rows() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = TWO_PROCESSES.format(tests=str(Path(__file__).parent), port=port)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(process)], stderr=subprocess.PIPE, text=True
        )
        for process in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
