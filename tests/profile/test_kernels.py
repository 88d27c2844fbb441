"""The work of instructions of accelerators' programs, against the step that was traced."""

import jax
import jax.numpy as jnp
import pytest
from aot import absent
from jax.sharding import NamedSharding, PartitionSpec

from lmlib.hardware.specifications import ACCELERATORS, CPU
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.flops import count_flops
from lmlib.plan.program import read_program
from lmlib.plan.traffic import multiplies, scheduled
from lmlib.profile.kernels import Work, works

H100 = ACCELERATORS["h100"]
LAYERS, SIZE, BATCH = 3, 256, 512


def compiled_for(target: str, options: dict[str, bool]) -> tuple[float, str]:
    """FLOPs of a traced gradient, and its program."""
    _, devices = absent(target)
    mesh = make_mesh(devices=devices[:1])

    def loss(w_LEE, x_BE):
        def layer(x_BE, w_EE):
            return jnp.tanh(x_BE @ w_EE), None

        return (jax.lax.scan(layer, x_BE, w_LEE)[0].astype(jnp.float32) ** 2).sum()

    with jax.set_mesh(mesh):
        shapes = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
            for shape in ((LAYERS, SIZE, SIZE), (BATCH, SIZE))
        ]
        traced = jax.jit(jax.value_and_grad(loss)).trace(*shapes)
        text = traced.lower().compile(compiler_options=options).as_text()
    return count_flops(traced.jaxpr, ()).total, text


@pytest.mark.parametrize(
    "library",
    [pytest.param(False, marks=pytest.mark.landing), True],
    ids=["triton", "cublas"],
)
def test_a_program_multiplies_as_much_as_the_step_that_was_traced(library):
    expected, text = compiled_for("h100:1x1", {"xla_gpu_enable_triton_gemm": not library})
    assert ("__cublas$" in text) is library
    program = read_program(text)
    found = works(program, ())
    flops = sum((found[one.name].flops or 0) * place.times for one, place in scheduled(program))
    assert flops == expected == 3 * LAYERS * 2 * BATCH * SIZE**2
    products = [one for one in found.values() if one.flops]
    assert {one.dtype for one in products} == {"bf16"}
    # Two operands are read, and the result is written.
    least = 2 * (BATCH * SIZE + SIZE**2 + min(BATCH, SIZE) * SIZE)
    assert all(one.bytes >= least for one in products)


@pytest.mark.slow
def test_convolutions_on_tpus_have_unknown_flops():
    program = read_program(compiled_for("v5e:2x2", {})[1])
    products = [works(program, ())[one.name] for one, _ in scheduled(program) if multiplies(one)]
    assert products and {one.flops for one in products} == {None}


@pytest.mark.parametrize(
    ("op_name", "operation"),
    [
        ("jit(step)/jvp(mlp)/dot_general", "dot_general"),
        ("jit(step)/transpose(jvp(mlp/dot_general))", "dot_general"),
        ("jit(step)/jvp(mlp)/jit(silu)", "jit(silu)"),
        ("", "cosine"),
    ],
)
def test_an_instruction_goes_by_the_primitive_that_it_comes_from(op_name, operation):
    program = read_program(f"""HloModule jit_step, is_scheduled=true

ENTRY %main (x.1: f32[8]) -> f32[8] {{
  %x.1 = f32[8]{{0}} parameter(0)
  ROOT %cosine.1 = f32[8]{{0}} cosine(%x.1), metadata={{op_name="{op_name}"}}
}}
""")
    assert works(program, ())["cosine.1"].operation == operation


def work(flops=0.0, bytes_moved=1, dtype="", sends=False) -> Work:
    return Work("one.1", "", "mlp", "forward", True, sends, frozenset(), flops, bytes_moved, dtype)


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [("bf16", 989e12), ("f32", 989e12 / 2), ("f8e4m3fn", 1_979e12), ("f8e5m2", 1_979e12)],
)
def test_a_large_product_takes_its_flops_at_the_rate_of_its_dtype(dtype, rate):
    assert work(flops=1e15, dtype=dtype).seconds_at_best(H100) == pytest.approx(1e15 / rate)


def test_small_matmuls_take_their_bytes():
    assert work(flops=1.0, bytes_moved=3_350).seconds_at_best(H100) == pytest.approx(1e-9)


def test_opaque_kernels_have_unknown_flops():
    assert work(flops=None).seconds_at_best(H100) is None
    assert work(sends=True).seconds_at_best(H100) is None
    assert work(flops=1.0).seconds_at_best(CPU) is None
