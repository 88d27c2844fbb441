"""Programs of generation for absent GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import absent

from lmlib.compute import Compute
from lmlib.generate import GREEDY, generator, weights
from lmlib.generate.sampling import numbers_of, rules_of
from lmlib.generate.steps import Chooser, State, next_tokens, prefill
from lmlib.models.families.llama import llama
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.program import read_program
from lmlib.plan.traffic import kernels

SIZES = dict(vocab=8_192, embed=512, layers=2, heads=8, mlp=2_048, tied=True)
LENGTH, COMPUTE = 128, Compute(dtype="bfloat16")


@pytest.mark.aot
def test_a_gpu_reads_each_weight_once_per_token():
    _, devices = absent("h200:1x1")
    mesh, rows = make_mesh(devices=devices), generator._LEAST_ROWS["cuda"]

    def placed(shape, dtype, axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(axes, mesh))

    key, numbers = jax.eval_shape(lambda: jax.random.key(0)), numbers_of(GREEDY)
    with jax.set_mesh(mesh):
        model = jax.eval_shape(lambda key: llama(**SIZES, key=key), key)
        ready = functools.partial(
            weights.ready, dtype="bfloat16", mesh=mesh, whole=True, int8=False
        )
        given = jax.eval_shape(ready, model)
        tokens, chunk = (
            placed((rows,), jnp.int32, "batch"),
            placed((rows, 16), jnp.int32, "batch seq"),
        )
        number = placed((), jnp.int32, ())
        first = functools.partial(prefill, length=LENGTH, compute=COMPUTE)
        cache, _ = jax.eval_shape(first, given, None, None, chunk, number, tokens)
        state = State(cache, tokens, tokens, placed((rows,), bool, "batch"), None)
        chooser = Chooser(
            placed((rows, 2), jnp.uint32, ("batch", None)),
            jax.tree.map(lambda x: placed((), np.asarray(x).dtype, ()), numbers),
            placed((8,), jnp.int32, (None,)),
        )
        arguments = given, state, number, chooser, COMPUTE, rules_of(GREEDY), 64
        program = read_program(next_tokens.lower(*arguments).compile().as_text())
    weight_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(given))
    # With a single row, XLA writes the terms of each product to memory: 2.4 times the weights.
    assert weight_bytes < kernels(program).bytes < 1.5 * weight_bytes
