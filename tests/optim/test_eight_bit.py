"""Codes of 8 bits against a search by hand; the same updates on every mesh."""

import functools

import jax
import numpy as np
import optax
import pytest
from laid_out import drawn, laid_out

from lmlib.models.experts.mixture import Mixture
from lmlib.models.families.llama import llama
from lmlib.models.parts.mlp import GatedMLP
from lmlib.optim.adamw import adamw
from lmlib.optim.ademamix import ademamix
from lmlib.optim.eight_bit import Codes, dynamic_map, eight_bit
from lmlib.optim.matrices.muon import muon
from lmlib.optim.matrices.soap import soap
from lmlib.optim.optimizer import Optimizer, as_declared
from lmlib.optim.schedules import warmup_constant
from lmlib.parallel.mesh import make_mesh

MODEL = functools.partial(
    llama, vocab=128, embed=64, layers=2, heads=4, kv_heads=2, mlp=96,
    feed_forward=functools.partial(Mixture, experts=2, top=1, shared_mlp=96),
)  # fmt: skip
KEY = jax.random.key(0)
SHAPES = jax.eval_shape(MODEL, key=KEY)


def trace(steps):
    """Keeps the last gradient."""

    def update(gradients, state, model=None):
        return gradients, optax.TraceState(gradients)

    initial = optax.trace(0.0).init
    transformation = optax.GradientTransformation(initial, update)
    return Optimizer(transformation, optax.constant_schedule(0.1), as_declared)


def test_each_number_gets_the_nearest_value_of_its_block():
    transformation = eight_bit(1, trace).transformation
    gradients = drawn(SHAPES)
    _, state = transformation.update(gradients, transformation.init(gradients), gradients)
    codes = state.trace.embedding  # 128 · 64, in blocks of 16 · 16
    values = dynamic_map(signed=True)
    given = np.asarray(gradients.embedding, np.float64)
    assert (codes.codes.shape, codes.codes.dtype, codes.scales.shape) == (
        (128, 64),
        "uint8",
        (8, 4),
    )
    for row, column in ((0, 0), (3, 2), (7, 3)):
        block = np.s_[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
        scale = np.max(np.abs(given[block]))
        np.testing.assert_allclose(codes.scales[row, column], scale, rtol=1e-6)
        off = np.abs(given[block] - scale * values[codes.codes[block]])
        best = np.min(np.abs(given[block][..., None] - scale * values), axis=-1)
        np.testing.assert_allclose(off, best, atol=1e-6)


def test_moments_of_matrices_are_in_eight_bits_and_those_of_vectors_and_slow_means_are_not():
    made = eight_bit(1, functools.partial(ademamix, peak_lr=1e-3)).transformation
    state = jax.eval_shape(made.init, SHAPES)
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, Codes))
    coded = {jax.tree_util.keystr(k) for k, leaf in leaves if isinstance(leaf, Codes)}
    names = ("embedding", "unembedding", "query", "key", "value", "output", "gate", "up", "down")
    assert all(any(path.endswith(name) for name in names) for path in coded)
    assert all(any(f".{m}." in path for path in coded) for m in ("m1", "nu"))
    assert not any(".m2." in path or "norm" in path for path in coded)
    signed = {leaf.signed for k, leaf in leaves if isinstance(leaf, Codes) and "nu" in str(k)}
    assert signed == {False}
    for _, leaf in leaves:
        if isinstance(leaf, Codes):
            assert leaf.codes.size / leaf.scales.size == 256


def test_bases_of_square_matrices_stay_float32():
    shapes = jax.eval_shape(functools.partial(MODEL, mlp=64, feed_forward=GatedMLP), key=KEY)
    state = jax.eval_shape(
        eight_bit(1, functools.partial(soap, peak_lr=1e-3)).transformation.init, shapes
    )
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, Codes))
    by_path = {jax.tree_util.keystr(keys): x for keys, x in leaves}
    coded = {path: x.signed for path, x in by_path.items() if isinstance(x, Codes)}
    bases = [x for path, x in by_path.items() if "basis_of_rows" in path and "mlp.up" in path]
    assert [x.shape for x in bases] == [(2, 64, 64)]  # like the matrix itself
    assert not any("of_rows" in path or "of_columns" in path for path in coded)
    assert {signed for path, signed in coded.items() if "'second'" in path} == {False}
    assert {signed for path, signed in coded.items() if "'first'" in path} == {True}


def updated_twice(make, sizes):
    model, first = drawn(SHAPES), drawn(SHAPES, seed=1)
    optimizer = eight_bit(10, make).transformation
    mesh = make_mesh(**sizes)
    weights, first, second = (laid_out(each, mesh) for each in (model, first, model))
    with jax.set_mesh(mesh):

        @jax.jit
        def twice(weights, first, second):
            _, state = optimizer.update(first, optimizer.init(weights), weights)
            return optimizer.update(second, state, weights)

        updates, state = twice(weights, first, second)
    for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Codes)):
        if isinstance(leaf, Codes):
            assert leaf.codes.sharding.spec == leaf.scales.sharding.spec
            assert mesh.size == 1 or not leaf.codes.sharding.is_fully_replicated
    return jax.device_get((updates, state))


MESHES = {"fsdp": 4, "tensor": 2}, {"fsdp": 2, "expert": 2, "tensor": 2}, {"stage": 2}
PLAIN = {"peak_lr": 1e-2, "schedule": warmup_constant, "clip_norm": None, "weight_decay": 0.0}


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize("make", [adamw, muon])
@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 4, "tensor": 2}, {"fsdp": 2, "expert": 2, "tensor": 2}, {"stage": 2}],
    ids=str,
)
def test_a_mesh_makes_the_same_update_as_one_device(make, sizes):
    make = functools.partial(make, **PLAIN)
    alone, found = (updated_twice(make, each) for each in ({"devices": jax.devices()[:1]}, sizes))
    for ours, theirs in zip(*map(jax.tree.leaves, (found, alone)), strict=True):
        if ours.dtype == np.uint8:  # a number halfway between two values may get either
            off = np.abs(ours.astype(int) - theirs.astype(int))
            assert np.max(off) <= 1 and np.mean(off) < 1e-3
        else:
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.several_devices
def test_a_mesh_that_splits_a_block_is_refused():
    mesh = make_mesh(fsdp=8)  # which leaves 8 of 64 to each device
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"8 indices of embed.*tile=8"):
        init = eight_bit(1, functools.partial(adamw, peak_lr=1.0)).transformation.init
        jax.eval_shape(init, laid_out(drawn(SHAPES), mesh))
    with pytest.raises(ValueError, match="power of two, got 12"):
        eight_bit(1, trace, tile=12)
