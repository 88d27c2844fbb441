"""Layer statistics against the model run layer by layer; the part that is named when one breaks."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import laid_out
from sentinels import sentinels

from lmlib.compute import Compute
from lmlib.data.batch import place
from lmlib.data.synthetic import Synthetic
from lmlib.inspect.layer_statistics import first_offender, layer_statistics, table
from lmlib.losses.dpo import DPO
from lmlib.losses.next_token import batch_loss
from lmlib.models.families.llama import llama
from lmlib.models.forward_context import ForwardContext
from lmlib.models.matrices.int8 import Int8, in_int8
from lmlib.models.parts.embedding import embedded
from lmlib.parallel.axes import map_weights
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh

LAYERS = 2
SIZES = {"vocab": 64, "embed": 16, "layers": LAYERS, "heads": 2, "mlp": 32}
FLOAT32 = Compute(dtype="float32")
BATCH = Synthetic(64, 4, 16).batch(0)


@functools.cache
def weights(tied):
    return llama(**SIZES, tied=tied, key=jax.random.key(0))


def norm(tree):
    leaves = jax.tree.leaves(jax.device_get(tree))
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in leaves)))


@pytest.mark.parametrize(
    ("tied", "sizes"),
    sentinels([(True, {}), (False, {"data": 2, "fsdp": 2, "tensor": 2})], lambda case: case[0]),
)
def test_each_layer_is_measured(tied, sizes):
    mesh = make_mesh(**sizes)
    model = laid_out(weights(tied), mesh)
    batch = place(Synthetic(64, 4, 16), 0, sharding("batch seq", mesh))
    found = layer_statistics(model, batch, mesh, FLOAT32)

    plain = weights(tied)
    tokens = int(BATCH.loss_mask.sum())
    loss, gradients = jax.jit(
        jax.value_and_grad(lambda m: batch_loss(m, BATCH, FLOAT32)[0].loss_sum / tokens)
    )(plain)
    assert found.loss == pytest.approx(float(loss), rel=1e-5)
    parts = {part.name: part for part in found.parts}
    tokens_BS = jnp.asarray(BATCH.tokens)
    context = ForwardContext(jnp.asarray(BATCH.positions), jnp.asarray(BATCH.segment_ids), FLOAT32)
    trunk = jax.jit(lambda m: m.trunk(tokens_BS, context).x_BSE)
    for layer in range(LAYERS):
        measured = parts[f"layer {layer}"]
        stack = jax.tree.map(lambda leaf, upto=layer + 1: leaf[:upto], plain.stack)
        output = trunk(eqx.tree_at(lambda m: m.stack, plain, stack))
        expected = np.sqrt(np.mean(np.square(output)))
        assert measured.output == pytest.approx(float(expected), rel=1e-4)
        for size, tree in ((measured.weights, plain), (measured.gradients, gradients)):
            of_layer = jax.tree.map(lambda leaf, at=layer: leaf[at], tree.stack)
            assert size == pytest.approx(norm(of_layer), rel=1e-4)
    rows_BSE = embedded(plain.embedding, tokens_BS, "float32", FLOAT32.residual)
    expected = float(np.sqrt(np.mean(np.square(rows_BSE))))
    assert parts["embedding"].output == pytest.approx(expected, rel=1e-5)
    assert parts["embedding"].gradients == pytest.approx(norm(gradients.embedding), rel=1e-4)
    assert parts["norm"].output is None
    layers = [f"layer {layer}" for layer in range(LAYERS)]
    head = ["norm"] if tied else ["norm", "unembedding"]
    assert [part.name for part in found.parts] == ["embedding", *layers, *head]
    assert first_offender(found) is None
    assert table(found).count("\n") == 1 + LAYERS + 2 + (not tied)


@pytest.mark.slow
def test_gradients_belong_to_the_objective():
    objective, mesh, model = DPO(reference_from="another"), make_mesh(), weights(False)
    reference = llama(**SIZES, tied=False, key=jax.random.key(1))
    batch = place(Synthetic(64, 4, 16), 0, sharding("batch seq", mesh))
    placed = laid_out(model, mesh), batch, mesh, FLOAT32, objective
    found = layer_statistics(*placed, laid_out(reference, mesh))

    def per_pair(model):
        sums = objective.sums(model, reference, BATCH, FLOAT32)
        return sums.loss_sum / objective.count(BATCH)

    loss, gradients = jax.jit(jax.value_and_grad(per_pair))(model)
    assert found.loss == pytest.approx(float(loss), rel=1e-5)
    parts = {part.name: part.gradients for part in found.parts}
    for name in ("embedding", "norm", "unembedding"):
        assert parts[name] == pytest.approx(norm(getattr(gradients, name)), rel=1e-4), name
    assert table(found).splitlines()[-1].startswith("DPO loss")

    reference = eqx.tree_at(lambda m: m.norm.scale, reference, reference.norm.scale * jnp.nan)
    found = layer_statistics(*placed, laid_out(reference, mesh))
    assert first_offender(found) == "the DPO loss"


def broken(where, value):
    """The offender when one element of the weight that `where` chooses is `value`."""
    model = weights(False)
    weight = where(model)
    model = eqx.tree_at(where, model, weight.at[(1,) * weight.ndim].set(value))
    batch = jax.tree.map(jnp.asarray, BATCH)
    return first_offender(layer_statistics(model, batch, make_mesh(), FLOAT32))


@pytest.mark.slow
def test_the_first_broken_part_is_named():
    nan = float("nan")
    assert broken(lambda m: m.stack.patterns[0][0].mlp.up, nan) == "the weights of layer 1"
    assert broken(lambda m: m.embedding, nan) == "the weights of embedding"
    # Finite in itself, but its products are not.
    assert broken(lambda m: m.stack.patterns[0][0].mlp.down, 3e38) in (
        "the weights of layer 1",  # its norm overflows
        "the output of layer 1",
    )


@pytest.mark.slow
def test_int8_matrices_are_measured():
    mesh = make_mesh()
    resting = map_weights(in_int8, weights(False))

    def dense(leaf):
        return leaf.dense() if isinstance(leaf, Int8) else leaf

    in_use = jax.tree.map(dense, resting, is_leaf=lambda leaf: isinstance(leaf, Int8))
    found = layer_statistics(resting, BATCH, mesh, FLOAT32)
    expected = layer_statistics(in_use, BATCH, mesh, FLOAT32)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    for one, other in zip(found.parts, expected.parts, strict=True):
        assert one.weights == pytest.approx(other.weights, rel=1e-5)
        assert one.output == (other.output and pytest.approx(other.output, rel=1e-5))
        share = one.gradients / other.gradients
        assert 0 < share < 1 if one.name.startswith("layer") else share == pytest.approx(1, 1e-4)
