"""Collectives found in compiled programs, against programs whose collectives are written by hand
with `jax.shard_map`, and against XLA's text for collectives that CPU programs never have.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import absent, needs_tpu_compiler
from jax.sharding import PartitionSpec as P
from program_texts import program_text

from lmlib.parallel.mesh import make_mesh
from lmlib.plan.collectives import collectives, spanned_axes
from lmlib.plan.program import ArrayType, read_program
from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.table import WIDTH

pytestmark = pytest.mark.several_devices

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
F32 = 4


def summary(found):
    return [
        (one.kind, one.mesh_axes, one.bytes, one.bytes_sent, one.count_per_step) for one in found
    ]


def gather(x_SE, axes):
    return jax.lax.all_gather(x_SE, axes, tiled=True).sum(0, keepdims=True) + x_SE


def scatter(x_SE, axes):
    return jax.lax.psum_scatter(x_SE, axes, tiled=True).sum() + x_SE


def exchange(x_SE, axes):
    return jax.lax.all_to_all(x_SE, axes, 0, 0, tiled=True)


def shift(x_SE, axes):
    n = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x_SE, axes, [(i, (i + 1) % n) for i in range(n)])


@pytest.mark.parametrize("axes", [("fsdp",), ("tensor",), ("data", "fsdp"), ("data", "tensor")])
@pytest.mark.parametrize(
    ("send", "kind", "whole", "ring"),
    [
        (gather, "all-gather", lambda n: n, lambda n: (n - 1) / n),
        (scatter, "reduce-scatter", lambda n: 1, lambda n: (n - 1) / n),
        (jax.lax.psum, "all-reduce", lambda n: 1, lambda n: 2 * (n - 1) / n),
        (exchange, "all-to-all", lambda n: 1, lambda n: (n - 1) / n),
        (shift, "collective-permute", lambda n: 1, lambda n: 1),
    ],
)
def test_kind_axes_bytes_and_count(axes, send, kind, whole, ring):
    n = int(np.prod([SIZES[axis] for axis in axes]))
    mesh = make_mesh(**SIZES)
    S, E, turns = 8, 32, 3

    @functools.partial(jax.shard_map, out_specs=P(), in_specs=P(), check_vma=False, mesh=mesh)
    def sent(x_SE):
        return jax.lax.scan(lambda x, _: (jnp.sin(send(x, axes)), None), x_SE, length=turns)[0]

    text = jax.jit(sent).lower(jnp.ones((S, E))).compile().as_text()
    size = S * E * F32 * whole(n)
    assert summary(collectives(read_program(text), mesh)) == [
        (kind, axes, size, round(size * ring(n)), turns)
    ]


def test_scopes_and_transformations_say_where():
    mesh = make_mesh(fsdp=8)

    def loss(w_LE, x_BE):
        def layer(x_BE, w_E):
            return jnp.sin(x_BE * jax.sharding.reshard(w_E, P(None))), None

        with jax.named_scope("layers"):
            x_BE, _ = jax.lax.scan(jax.checkpoint(layer), x_BE, w_LE)
        return jnp.mean(x_BE)

    def step(w_LE, x_BE):
        gradient_LE = jax.grad(loss)(w_LE, x_BE)
        return w_LE - gradient_LE / jnp.linalg.norm(gradient_LE)

    sharded = functools.partial(jax.NamedSharding, mesh)
    with jax.set_mesh(mesh):
        w_LE = jax.ShapeDtypeStruct((3, 64), jnp.float32, sharding=sharded(P(None, "fsdp")))
        x_BE = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=sharded(P("fsdp", None)))
        text = jax.jit(step).lower(w_LE, x_BE).compile().as_text()
    found = collectives(read_program(text), mesh)
    assert [(one.kind, one.where) for one in found] == [
        ("all-gather", "each layer, forward"),
        ("all-gather", "each layer, recomputation"),
        ("all-reduce", "each layer, backward"),
        ("all-reduce", "each step, update"),
    ]
    # The table has a line for each, titles of three lines and a total.
    lines = str(found).splitlines()
    assert len(lines) == 8 and max(map(len, lines)) <= WIDTH
    assert lines[-1].endswith(f"  {bytes_text(found.bytes_sent_per_step)}")


def test_one_device_sends_nothing():
    found = collectives(read_program(jax.jit(jnp.sin).lower(1.0).compile().as_text()), make_mesh())
    assert found == ()
    assert str(found) == "No communication between devices."


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ([[0, 1, 2, 3, 4, 5, 6, 7]], ("data", "fsdp", "tensor")),
        ([[3, 1], [0, 2], [4, 6], [5, 7]], ("fsdp",)),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], ("tensor",)),
        ([[0, 4, 1, 5], [2, 3, 6, 7]], ("data", "tensor")),
        ([[0, 3], [1, 2], [4, 7], [5, 6]], ()),
    ],
)
def test_axes_of_groups(groups, axes):
    assert spanned_axes(np.array(groups), make_mesh(**SIZES)) == axes


def test_axes_of_size_one_are_never_named():
    assert spanned_axes(np.array([[0, 1, 2, 3]]), make_mesh(fsdp=4)) == ("fsdp",)


@pytest.mark.parametrize(
    ("between", "scheduled", "overlaps"),
    [
        ("%same = bf16[64,32]{1,0} bitcast(%y)", "true", False),
        ("%work = bf16[64,32]{1,0} fusion(%y), kind=kLoop, calls=%fused", "true", True),
        ("%work = bf16[64,32]{1,0} fusion(%y), kind=kLoop, calls=%fused", "false", False),
        ('%work = bf16[64]{0} custom-call(%y), custom_call_target="__cublas$gemm"', "true", True),
        ('%none = bf16[64]{0} custom-call(%y), custom_call_target="AllocateBuffer"', "true", False),
    ],
)
def test_overlap_needs_work_between_start_and_done(between, scheduled, overlaps):
    text = program_text("asynchronous", SCHEDULED=scheduled, BETWEEN=between)
    (one,) = collectives(read_program(text), make_mesh(fsdp=8))
    assert one.overlaps is overlaps
    assert one.arrays == (ArrayType("bf16", (64, 32)), ArrayType("bf16", (64, 4)))
    assert one.bytes_sent == (64 * 32 + 64 * 4) * 2 * 7 // 8


def test_a_ragged_all_to_all_sends_its_first_operand():
    """Others are the buffer that receives rows, and numbers of rows."""
    (one,) = collectives(read_program(program_text("ragged")), make_mesh(fsdp=8))
    assert one.arrays == (ArrayType("bf16", (64, 32)),)
    assert (one.kind, one.bytes_sent) == ("ragged-all-to-all", 64 * 32 * 2 * 7 // 8)


def test_a_collective_in_several_fusions_is_one():
    """On TPUs a fusion starts it, others move it on beside their own work, and one ends it. A fused
    all-reduce and slice sends no more than a reduce-scatter."""
    text = program_text("fused")
    gathered, scattered = collectives(read_program(text), make_mesh(fsdp=8))
    assert (gathered.kind, gathered.bytes, gathered.overlaps) == ("all-gather", 64 * 32 * 2, True)
    assert (scattered.kind, scattered.bytes_sent) == ("reduce-scatter", 64 * 32 * F32 * 7 // 8)
    assert not scattered.overlaps


def test_collectives_of_sparse_cores():
    """On 7x a SparseCore sends beside everything else, from the update to the end. Channels are
    numbered anew in each computation."""
    text = program_text("on_sparse_cores")
    gathered, scattered = collectives(read_program(text), make_mesh(fsdp=8))
    assert (gathered.kind, gathered.bytes, gathered.overlaps) == ("all-gather", 64 * 32 * 2, False)
    assert (scattered.kind, scattered.bytes) == ("reduce-scatter", 64 * 32 * 2)
    assert scattered.overlaps


@needs_tpu_compiler
def test_collectives_between_slices():
    """Groups number the devices of one slice; the host's runtime sums over slices."""
    mesh = make_mesh(fsdp=2, tensor=-1, devices=absent("2xv5e:2x2")[1])
    within, between = collectives(read_program(program_text("between_slices")), mesh)
    assert (within.kind, within.mesh_axes, within.group_size) == ("all-gather", ("fsdp",), 2)
    assert (between.kind, between.mesh_axes, between.group_size) == ("all-reduce", ("data",), 2)
    assert between.bytes_sent == 8 * 32 * 2
    assert between.overlaps


def test_concatenated_arrays_are_separated_and_have_a_source():
    (one,) = collectives(read_program(program_text("concatenated")), make_mesh(fsdp=8))
    assert [array.shape for array in one.arrays] == [(100,), (28,)]
    assert one.phase == "backward"
