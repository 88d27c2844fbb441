"""Matrices in NF4 and MXFP4: against bitsandbytes, ml_dtypes, and one device."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from laid_out import drawn, laid_out
from outsider_runs import compiled, experiment, trained

from lmlib.adapters.lora import lora
from lmlib.compute import Compute
from lmlib.models.families.llama import llama
from lmlib.models.matrices import mxfp4, nf4
from lmlib.models.matrices.four_bit import FourBit
from lmlib.optim.trainable import adapters
from lmlib.parallel.axes import LayoutError, map_weights
from lmlib.parallel.check import check_model
from lmlib.parallel.matrix import dense
from lmlib.parallel.mesh import make_mesh
from lmlib.parallel.selection import named_weights

MODEL = functools.partial(
    llama, vocab=64, embed=256, layers=2, heads=4, kv_heads=2, head_dim=64, mlp=640
)
SHAPES = jax.eval_shape(MODEL, key=jax.random.key(0))
IN = {"nf4": nf4.in_nf4, "mxfp4": mxfp4.in_mxfp4}
# The folder's axis order of each matrix: products sum over the last axes.
ROWS = {
    "query": (1, 2, 0), "key": (1, 2, 0), "value": (1, 2, 0), "output": (2, 0, 1),
    "gate": (1, 0), "up": (1, 0), "down": (1, 0),
}  # fmt: skip


@functools.cache
def weights():
    """Returns weights with bfloat16 values. Their sums are exact in any order."""
    return jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), drawn(SHAPES))


def matrices(model):
    """(name, array) of each matrix of layers."""
    found = {}
    map_weights(lambda weight, array: found.update({weight.path: (weight, array)}), model)
    return {path: each for path, each in found.items() if path.rpartition(".")[2] in ROWS}


def in_rows(path, layer):
    """One layer's array in the folder's order, with a row for each sum."""
    order = ROWS[path.rpartition(".")[2]]
    layer = np.asarray(layer).transpose(order)
    summed = 2 if path.endswith("output") else 1
    return layer.reshape(-1, np.prod(layer.shape[-summed:]))


def rows(*shape, seed=0):
    random = np.random.default_rng(seed)
    scale = np.exp2(random.integers(-20, 20, (shape[0], 1)))
    return (random.standard_normal(shape) * scale).astype(np.float32)


def test_mxfp4_rounds_as_ml_dtypes_with_scales_that_avoid_overflow():
    x = rows(64, 96)
    x[3], x[4, :9] = 0, [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25]
    codes, exponents = map(np.asarray, mxfp4.quantized(jnp.asarray(x), 1))
    blocks = x.reshape(64, 3, 32).astype(np.float64)
    with np.errstate(divide="ignore"):
        wanted = np.maximum(np.ceil(np.log2(np.abs(blocks).max(-1) / 6)), -126)
    np.testing.assert_array_equal(exponents, wanted + 127)
    values = (blocks / np.exp2(wanted)[..., None]).astype(ml_dtypes.float4_e2m1fn)
    found = np.stack([codes & 15, codes >> 4], -1).reshape(64, 3, 32)
    np.testing.assert_array_equal(np.asarray(mxfp4.VALUES)[found], values.astype(np.float64))


@pytest.mark.slow
@pytest.mark.parametrize("values", ["bfloat16", "float32"])
def test_nf4_equals_bitsandbytes_bit_for_bit(values):
    torch = pytest.importorskip("torch", reason="needs lmlib[parity]")
    theirs = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    np.testing.assert_array_equal(nf4.nested_map(), theirs.create_dynamic_map().numpy())
    for path, (weight, array) in matrices(drawn(SHAPES)).items():
        array = array.astype(values)
        found = nf4.in_nf4(weight, array)
        for layer in range(2):
            whole = torch.tensor(in_rows(path, array[layer].astype("float32")))
            whole = whole.to(getattr(torch, values))
            codes, state = theirs.quantize_4bit(whole, quant_type="nf4", compress_statistics=True)
            np.testing.assert_array_equal(in_rows(path, found.codes[layer]).reshape(-1, 1), codes)
            offset = state.offset.numpy()
            # PyTorch's sum depends on the processor and its threads, unless it is exact.
            limit = 0 if values == "bfloat16" else np.spacing(offset)
            assert abs(float(found.offset[layer]) - offset) <= limit
            if float(found.offset[layer]) != offset:
                continue
            absmax = in_rows(path, found.absmax[layer]).reshape(-1)
            np.testing.assert_array_equal(absmax, state.absmax)
            np.testing.assert_array_equal(found.nested[layer], state.state2.absmax)
            expected = theirs.dequantize_4bit(codes, state).to(torch.float32)
            made = found.dense(values)[layer].astype("float32")
            np.testing.assert_array_equal(in_rows(path, made), expected)


def test_nf4_takes_the_nearest_values_and_scales_within_their_steps():
    path = "stack.patterns.0.0.mlp.down"
    weight, array = matrices(weights())[path]
    found = nf4.in_nf4(weight, array)
    for layer in range(2):
        x = in_rows(path, array[layer]).astype(np.float64).reshape(-1, 64)
        largest = np.abs(x).max(1, keepdims=True)
        steps = np.asarray(nf4.VALUES)
        nearest = steps[np.abs(x[..., None] / largest[..., None] - steps).argmin(-1)]
        made = in_rows(path, found.dense()[layer]).reshape(-1, 64)
        scales = made[np.arange(len(made)), np.abs(nearest).argmax(1)]
        np.testing.assert_allclose(made, nearest * np.abs(scales)[:, None], rtol=1e-6)
        # A code of 8 bits is off by at most 1/128 of the largest distance from the mean.
        limit = np.abs(largest - largest.mean()).max() / 120
        np.testing.assert_allclose(np.abs(scales)[:, None], largest, atol=limit)


@pytest.mark.parametrize("kind", IN)
def test_zeros_stay_zeros(kind):
    weight, array = matrices(SHAPES)["stack.patterns.0.0.mlp.up"]
    found = IN[kind](weight, jnp.zeros(array.shape))
    np.testing.assert_array_equal(found.dense(), jnp.zeros(array.shape))


def test_mxfp4_keeps_the_values_it_once_had():
    for weight, array in matrices(weights()).values():
        once = mxfp4.in_mxfp4(weight, array).dense()
        assert np.abs(once - array).max() > 0
        np.testing.assert_array_equal(mxfp4.in_mxfp4(weight, once).dense(), once)


def test_tables_and_rows_that_are_not_whole_blocks_are_in_bfloat16():
    small = llama(vocab=64, embed=32, layers=1, heads=2, mlp=96, key=jax.random.key(0))
    for kind, block in (("nf4", 64), ("mxfp4", 32)):
        found = map_weights(IN[kind], small)
        assert found.embedding.dtype == jnp.bfloat16
        layer = found.stack.patterns[0][0]
        assert isinstance(layer.mlp.down, FourBit) == (96 % block == 0)
        assert isinstance(layer.mlp.up, FourBit) == (32 % block == 0)


@pytest.mark.landing
@pytest.mark.several_devices
@pytest.mark.parametrize("kind", IN)
def test_a_mesh_has_the_codes_of_one_device(kind):
    mesh = make_mesh(fsdp=4, tensor=2)
    whole, placed = matrices(weights()), matrices(laid_out(weights(), mesh))
    for path in ("query", "output", "down"):
        path = next(each for each in whole if each.endswith(path))
        one, other = (IN[kind](*each[path]) for each in (whole, placed))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)
        assert other.codes.sharding.is_equivalent_to(placed[path][1].sharding, other.codes.ndim)
        np.testing.assert_array_equal(jax.jit(dense)(one), jax.jit(dense)(other))


@pytest.mark.several_devices
@pytest.mark.parametrize(("kind", "block", "number"), [("nf4", 64, 1), ("mxfp4", 32, 2)])
def test_a_mesh_that_splits_a_block_is_refused(kind, block, number):
    """With the weight, both sizes and what to change, for shapes and for an array on the mesh."""
    mesh = make_mesh(fsdp=(size := 2 * number), tensor=2)
    message = (
        rf"attention\.query.*: axis 'embed' of size 64 cannot be split over fsdp={size} \(the "
        rf"number of its blocks of {block}, {number}, is no multiple of {size}\); use fsdp of "
        r".*, or embed a multiple of 128, or another frozen_dtype"
    )
    small = jax.eval_shape(functools.partial(MODEL, embed=64), key=jax.random.key(0))
    with pytest.raises(LayoutError, match=message):
        check_model(jax.eval_shape(functools.partial(map_weights, IN[kind]), small), mesh)
    weight, array = matrices(laid_out(drawn(small), mesh))["stack.patterns.0.0.attention.query"]
    with pytest.raises(LayoutError, match=message):
        IN[kind](weight, array)


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize("kind", IN)
def test_a_run_trains_on_a_mesh_as_on_one_device(kind):
    run_of = functools.partial(
        experiment, functools.partial(lora, MODEL, rank=4, alpha=8.0),
        trainable=adapters(), frozen_dtype=kind,
    )  # fmt: skip
    found = []
    for mesh in ({}, {"fsdp": 4, "tensor": 2}):
        run = run_of(mesh, Compute(dtype="float32"))
        begun = run.initial_state()
        assert any(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(begun.frozen))
        metrics, state = trained(run, compiled(run), begun)
        found.append(metrics)
        assert np.any(np.asarray(next(iter(named_weights(state.model).values()))))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)
        np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-4)


def operands_of_loops(jaxpr):
    """The arrays that go into a loop of `jaxpr`, or come from it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield from (each.aval for each in (*equation.invars, *equation.outvars))
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from operands_of_loops(inner)


def test_no_array_as_large_as_a_matrix_is_kept_from_layer_to_layer():
    """JAX computes constants of a loop's body before the loop, and keeps them until its end."""
    run = experiment(
        functools.partial(lora, MODEL, rank=4, alpha=8.0), {},
        trainable=adapters(), frozen_dtype="nf4",
    )  # fmt: skip
    found = [*operands_of_loops(run.trace_step().jaxpr.jaxpr)]
    of_a_matrix = [each for each in found if each.size in (256 * 640, 2 * 256 * 640)]
    assert any(each.size == 256 * 640 for each in found)  # the codes of both layers
    assert {each.dtype for each in of_a_matrix} == {np.dtype("uint8")}
