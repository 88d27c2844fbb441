"""Layer statistics against the model run layer by layer; the part that is named when one breaks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from lmlib.models.llama import Llama

from lmlib.data.batch import place
from lmlib.data.synthetic import Synthetic
from lmlib.layer_statistics import first_offender, layer_statistics, table
from lmlib.losses import batch_loss
from lmlib.parallel.layout import creator, partition
from lmlib.parallel.mesh import make_mesh

SIZES = {"vocab": 64, "embed": 16, "layers": 3, "heads": 2, "mlp": 32, "compute_dtype": "float32"}
BATCH = Synthetic(64, 4, 16).batch(0)


def make(tied: bool = False) -> Llama:
    return Llama(**SIZES, tied=tied, key=jax.random.key(0))


def norm(tree) -> float:
    leaves = jax.tree.leaves(jax.device_get(tree))
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in leaves)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_each_layer_is_measured(tied, sizes):
    mesh = make_mesh(**sizes)
    model = creator(lambda: make(tied), mesh)()
    batch = place(Synthetic(64, 4, 16), 0, NamedSharding(mesh, partition("batch seq")))
    found = layer_statistics(model, batch, mesh)

    plain = make(tied)
    tokens = int(BATCH.loss_mask.sum())
    loss, gradients = jax.value_and_grad(lambda m: batch_loss(m, BATCH).minimised / tokens)(plain)
    assert found.loss == pytest.approx(float(loss), rel=1e-5)
    for layer in range(3):
        blocks = jax.tree.map(lambda leaf, upto=layer + 1: leaf[:upto], plain.blocks)
        shorter = eqx.tree_at(lambda m: m.blocks, plain, blocks)
        output = shorter.trunk(
            *map(jnp.asarray, (BATCH.tokens, BATCH.positions, BATCH.segment_ids))
        )
        expected = np.sqrt(np.mean(np.square(output)))
        assert found.outputs_L[layer] == pytest.approx(float(expected), rel=1e-4)
        for measured, tree in ((found.weights, plain), (found.gradients, gradients)):
            of_layer = jax.tree.map(lambda leaf, at=layer: leaf[at], tree.blocks)
            assert measured["layers"][layer] == pytest.approx(norm(of_layer), rel=1e-4)
    assert found.embedded == pytest.approx(
        float(np.sqrt(np.mean(np.square(plain.embed(jnp.asarray(BATCH.tokens)))))), rel=1e-5
    )
    assert found.gradients["embedding"] == pytest.approx(norm(gradients.embedding), rel=1e-4)
    assert ("unembedding" in found.weights) != tied
    assert first_offender(found) is None
    assert table(found).count("\n") == 1 + 3 + 2 + (not tied)


def broken(where, value: float) -> str | None:
    """The offender when one element of the weight that `where` chooses is `value`."""
    mesh = make_mesh()
    model = make()
    weight = where(model)
    model = eqx.tree_at(where, model, weight.at[(1,) * weight.ndim].set(value))
    batch = jax.tree.map(jnp.asarray, BATCH)
    return first_offender(layer_statistics(model, batch, mesh))


def test_the_first_broken_part_is_named():
    nan = float("nan")
    assert broken(lambda m: m.blocks.mlp.up, nan) == "the weights of layer 1"
    assert broken(lambda m: m.embedding, nan) == "the weights of the embedding"
    # Finite in itself, but its products are not.
    assert broken(lambda m: m.blocks.mlp.down, 3e38) in (
        "the weights of layer 1",  # its norm overflows
        "the output of layer 1",
    )
