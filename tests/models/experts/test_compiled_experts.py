"""Experts need few kernels and little traffic on GPUs, by the compiled program."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from aot import absent
from sentinels import sentinels

from lmlib.models.experts.mlps import GatedExperts
from lmlib.models.experts.rounds import Settings, mix_experts
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.program import read_program
from lmlib.plan.traffic import kernels

E, F, X, K, TOKENS = 1_024, 2_048, 8, 2, 65_536  # a layer of 8x2048 of benchmarks/train_step.py
ROWS = K * TOKENS


@pytest.mark.aot
@pytest.mark.parametrize(
    "target",
    sentinels(["h200:1x1", "a100:1x1", "h100:1x1", "b200:1x1"], landing=["h200:1x1"].__contains__),
)
def test_a_layer_is_few_kernels_and_moves_few_bytes(target):
    """Rows and hidden values, without weights, have 0.27 GB and 0.54 GB."""
    _, devices = absent(target)
    mesh = make_mesh(devices=devices)
    make = functools.partial(GatedExperts, E, F, X, key=jax.random.key(0))
    experts = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=sharding("", mesh)),
        eqx.filter_eval_shape(make),
    )

    def given(size, dtype):
        shape, axes = (64, TOKENS // 64, size), ("batch", "seq", None)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(axes, mesh))

    def passes(experts, x_BSE, choices_BSK, shares_BSK, dy_BSE):
        settings = Settings(X, "gather", 1.0, "batch seq embed")
        y_BSE, back, computed_BS = jax.vjp(
            lambda *parts: mix_experts(settings, *parts[:2], choices_BSK, parts[2]),
            experts, x_BSE, shares_BSK, has_aux=True,
        )  # fmt: skip
        return y_BSE, back(dy_BSE), computed_BS

    x, shares = given(E, jnp.bfloat16), given(K, jnp.float32)
    with jax.set_mesh(mesh):
        compiled = jax.jit(passes).lower(experts, x, given(K, jnp.int32), shares, x).compile()
    found = kernels(read_program(compiled.as_text()))
    assert found.number <= 30
    # The products read and write 8 GB, and the passes between them 5 GB.
    assert found.bytes <= 14e9
