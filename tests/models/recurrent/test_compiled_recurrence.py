"""Long rows need little memory on accelerators, by their compilers' own count."""

import jax
import jax.numpy as jnp
import pytest
from aot import absent
from sentinels import sentinels

from lmlib.compute import Compute
from lmlib.models.forward_context import ForwardContext
from lmlib.models.recurrent.linear_recurrence import linear_recurrence
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.program import read_program
from lmlib.plan.traffic import kernels

S, K, V = 16_384, 128, 128  # of a layer of Qwen3-Next, which has 16 and 32 heads
HEADS, QUERIES = "batch seq heads head_dim", "batch seq kv_heads head_dim"


def compiled(mesh, B, S, G, H):
    """The recurrence and its gradients for these devices, in bfloat16."""

    def given(shape, dtype, axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(axes, mesh))

    queries = given((B, S, G, K), jnp.bfloat16, QUERIES)
    values = given((B, S, H, V), jnp.bfloat16, HEADS)
    rates = given((B, S, H), jnp.float32, "batch seq heads")
    whole = given((B, S), jnp.int32, "batch seq")

    def total(arrays, positions, segments):
        context = ForwardContext(positions, segments, Compute())
        return linear_recurrence(*arrays, context)[0].astype(jnp.float32).sum()

    arrays = queries, queries, values, rates, rates
    return jax.jit(jax.grad(total)).lower(arrays, whole, whole).compile()


@pytest.mark.aot
@pytest.mark.parametrize("target", sentinels(["h200:1x1", "v5p:2x2x1"], landing="h200:1x1".__eq__))
def test_memory_is_linear_in_the_length_of_a_row(target):
    """The states of all tokens are 34 GB for 32 heads; queries, keys and values have 0.27 GB."""
    _, devices = absent(target)
    mesh, B = make_mesh(fsdp=-1, devices=devices), len(devices)

    def temporaries(S):
        return compiled(mesh, B, S, 16, 32).memory_analysis().temp_size_in_bytes

    with jax.set_mesh(mesh):
        long = temporaries(S)
        assert long < 4e9
        if target.startswith("h200"):  # libtpu takes half a minute for each length
            assert temporaries(2 * S) < 2.1 * long


@pytest.mark.aot
@pytest.mark.landing
@pytest.mark.parametrize("target", ["h200:1x1", "a100:1x1"])
def test_gpus_run_few_kernels_which_move_few_bytes(target):
    """XLA's own kernels are 1,142 on an H200, and move 13.3 GB."""
    _, devices = absent(target)
    B, S, H = 8, 1_024, 16
    with jax.set_mesh(mesh := make_mesh(fsdp=-1, devices=devices)):
        moved = kernels(read_program(compiled(mesh, B, S, H, H).as_text()))
    assert moved.number < 30
    assert moved.bytes < 50 * 2 * B * S * H * K  # queries, or as many keys or values, have 1 / 50
