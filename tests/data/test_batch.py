import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numbered_source import remember_rows

from lmlib.data.batch import Batch, packed_batch, place
from lmlib.data.synthetic import Synthetic

pytestmark = pytest.mark.several_devices


def mesh_of(data, fsdp, tensor):
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
def test_place_equals_the_batch(sizes, spec):
    source, expected = (Synthetic(50, 8, 16) for _ in range(2))
    read = remember_rows(source)
    sharding = NamedSharding(mesh_of(*sizes), spec)
    placed = place(source, 3, sharding, order="plain")
    assert read == {3: list(range(8))}  # each once
    assert isinstance(placed, Batch)

    def check(array, expected):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)

    jax.tree.map(check, placed, expected.batch(3))


def test_devices_that_share_a_row_have_an_early_and_a_late_piece_of_it():
    source = Synthetic(50, 8, 16)
    placed = place(source, 3, NamedSharding(mesh_of(2, 2, 2), PartitionSpec("data", "fsdp")))
    assert placed.order == "zigzag"
    expected = source.batch(3)
    for name in ("tokens", "targets", "segment_ids", "positions", "loss_mask"):
        array, whole = getattr(placed, name), getattr(expected, name)
        for shard in array.addressable_shards:
            columns = (range(0, 4), range(12, 16)) if shard.index[1].start == 0 else (range(4, 12),)
            wanted = whole[shard.index[0]][:, [column for each in columns for column in each]]
            np.testing.assert_array_equal(shard.data, wanted)


def test_a_mesh_that_does_not_divide_the_batch():
    sharding = NamedSharding(mesh_of(2, 2, 2), PartitionSpec(("data", "fsdp")))
    with pytest.raises(ValueError, match="batch of 6 sequences of 16 tokens cannot be split"):
        place(Synthetic(50, 6, 16), 0, sharding)


@settings(max_examples=100)
@given(data=st.data(), rows=st.integers(0, 3), length=st.integers(1, 9))
def test_packed_rows_match_a_loop(data, rows, length):
    flags = st.lists(st.booleans(), min_size=length + 1, max_size=length + 1)
    starts = np.array([data.draw(flags) for _ in range(rows)], bool).reshape(rows, length + 1)
    lengths = np.array([data.draw(st.integers(0, length)) for _ in range(rows)], int)
    tokens = 1 + np.arange(rows * (length + 1)).reshape(rows, length + 1)
    batch = packed_batch(tokens, starts, lengths)

    for b in range(rows):
        segment, position = 1, 0
        for s in range(length):
            if s > 0 and starts[b, s]:
                segment, position = segment + 1, 0
            if s < lengths[b]:
                expected = tokens[b, s], tokens[b, s + 1], segment, position, not starts[b, s + 1]
            else:
                expected = 0, 0, 0, 0, False
            assert (
                batch.tokens[b, s],
                batch.targets[b, s],
                batch.segment_ids[b, s],
                batch.positions[b, s],
                batch.loss_mask[b, s],
            ) == expected
            position += 1
