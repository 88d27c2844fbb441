"""Whether a product by group is multiplied whole, in programs of absent hardware."""

import jax
import jax.numpy as jnp
import pytest
from aot import needs_gpu_compiler, needs_tpu_compiler
from jax.sharding import NamedSharding, PartitionSpec

from lmlib.models.experts.grouped import grouped_product
from lmlib.parallel.collectives import shard_map
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.planner import dense_expansions
from lmlib.plan.program import read_program
from lmlib.plan.targets import parse, prepare


def expansions(product, topology):
    """Warnings of the program of a product by group and its gradients."""
    target = parse(topology)
    prepare(target)
    mesh = make_mesh(devices=target.devices()[:1])
    whole = NamedSharding(mesh, PartitionSpec())
    x, w, sizes = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
        for shape, dtype in (
            ((1_024, 128), jnp.bfloat16),
            ((4, 128, 256), jnp.bfloat16),
            ((4,), jnp.int32),
        )
    )

    def loss(*given):
        return jnp.sum(product(*given).astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        gradient = shard_map(
            jax.grad(loss, argnums=(0, 1)),
            inputs=3 * (PartitionSpec(),),
            outputs=2 * (PartitionSpec(),),
            tracked=False,
        )
        text = jax.jit(gradient).lower(x, w, sizes).compile().as_text()
    return dense_expansions(read_program(text))


@needs_gpu_compiler
@pytest.mark.slow
def test_on_gpus_ragged_dot_is_expanded_and_blocks_are_not():
    (warning,) = expansions(jax.lax.ragged_dot, "h100:1x1")
    assert "transpose(jvp())/ragged_dot_general" in warning
    assert not expansions(grouped_product, "h100:1x1")


@needs_tpu_compiler
@pytest.mark.slow
def test_on_tpus_the_product_by_group_is_not_expanded():
    assert not expansions(grouped_product, "v5e:2x2")
