"""The gated short convolution against its definition in float64, and LFM2 on every mesh."""

import functools

import jax
import jax.numpy as jnp
import laid_out
import numpy as np
import pytest
from sentinels import sentinels

from lmlib import Compute
from lmlib.data.batch import place
from lmlib.data.synthetic import Synthetic
from lmlib.losses.next_token import batch_loss
from lmlib.models.families.hybrid.lfm2 import lfm2
from lmlib.models.forward_context import ForwardContext
from lmlib.models.recurrent.short_convolution import ShortConvolution
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh

EMBED, CHANNELS, WIDTH, LENGTH = 6, 8, 4, 13
SEGMENTS_BS = np.array([[1] * 5 + [2] + [3] * 7, [1] * 11 + [2] * 2])


def layer(bias=True):
    shapes = jax.eval_shape(
        lambda: ShortConvolution(EMBED, CHANNELS, WIDTH, bias, key=jax.random.key(0))
    )
    return laid_out.drawn(shapes)


def context(positions_BS, segments_BS=None):
    return ForwardContext(jnp.asarray(positions_BS), segments_BS, Compute(dtype="float32"))


def inputs():
    x_BSE = np.random.default_rng(0).normal(size=(2, LENGTH, EMBED))
    return jnp.asarray(x_BSE, jnp.float32), np.tile(np.arange(LENGTH), (2, 1))


def expected(part, x_SE):
    """One document, token by token."""
    w = {name: np.asarray(array, np.float64) for name, array in vars(part).items()}

    def projected(name, x):
        return x @ w[name] + w[f"{name}_bias"]

    x_SE = np.asarray(x_SE, np.float64)
    gated = projected("input_gate", x_SE) * projected("input", x_SE)
    gated = np.concatenate([np.zeros((WIDTH - 1, CHANNELS)), gated])
    mixed = [np.sum(gated[t : t + WIDTH].T * w["filter"], axis=1) for t in range(len(x_SE))]
    return projected(
        "output", projected("output_gate", x_SE) * (np.stack(mixed) + w["filter_bias"])
    )


def test_packed_rows_equal_the_definition_of_each_document():
    part, (x_BSE, positions_BS) = layer(), inputs()
    found_BSE, _ = part(x_BSE, context(positions_BS, jnp.asarray(SEGMENTS_BS)))
    for row in range(2):
        for segment in np.unique(SEGMENTS_BS[row]):
            inside = SEGMENTS_BS[row] == segment
            of_document = expected(part, x_BSE[row, inside])
            np.testing.assert_allclose(found_BSE[row, inside], of_document, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 2, 6, 1, 3), (13,), (1,) * 13], ids=str)
def test_a_cache_in_uneven_pieces_with_padding_equals_the_whole(sizes):
    part, (x_BSE, positions_BS) = layer(), inputs()
    whole_BSE, _ = part(x_BSE, context(positions_BS))
    cache, start, pieces = part.empty_cache(2, LENGTH, "float32"), 0, []
    assert cache.windows[0].shape == (2, WIDTH - 1, CHANNELS)
    for size in sizes:
        positions = np.tile(start + np.arange(size + 2), (2, 1))
        positions[:, size:] = -1
        padded = jnp.pad(x_BSE[:, start : start + size], ((0, 0), (0, 2), (0, 0)))
        y_BSE, cache = part(padded + (positions < 0)[..., None], context(positions), cache)
        pieces.append(y_BSE[:, :size])
        start += size
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole_BSE, rtol=1e-5, atol=1e-5)


def test_flops_are_those_of_weights_and_filters():
    assert layer().flops_per_token(100, causal=True) == 6 * (4 * EMBED * CHANNELS + CHANNELS * 4)


V, ROWS, TOKENS = 64, 8, 16
source = Synthetic(vocab_size=V, batch_size=ROWS, sequence_length=TOKENS)


@functools.cache
def weights():
    sizes = {"vocab": V, "embed": 32, "layers": 4, "heads": 8, "kv_heads": 4, "mlp": 48}
    make = functools.partial(lfm2, **sizes, attention_layers=(1, 3), convolution_bias=True)
    return laid_out.drawn(jax.eval_shape(lambda: make(key=jax.random.key(0))))


@functools.cache
def loss_and_gradients(sizes, order="plain", sequence_parallel=False):
    compute = Compute(dtype="float32", sequence_parallel=sequence_parallel)

    def mean(model, batch):
        return batch_loss(model, batch, compute)[0].loss_sum / batch.loss_mask.sum()

    mesh = make_mesh(**dict(sizes))
    model = laid_out.laid_out(weights(), mesh)
    with jax.set_mesh(mesh):
        batch = place(source, 0, sharding("batch seq", mesh), order)
        assert len(np.unique(batch.segment_ids)) > 2  # packed
        return jax.device_get(jax.jit(jax.value_and_grad(mean))(model, batch))


def sizes(**axes):
    return tuple(axes.items())


CASES = [
    (sizes(fsdp=8), "plain", False),
    (sizes(tensor=8), "plain", True),
    (sizes(data=2, fsdp=2, tensor=2), "plain", False),
    (sizes(context=4, fsdp=2), "plain", False),
    (sizes(context=4), "zigzag", False),
    (sizes(context=2, tensor=2), "zigzag", True),
    (sizes(stage=2), "plain", False),
    (sizes(stage=2, fsdp=2, tensor=2), "plain", True),
    (sizes(stage=2, context=2), "zigzag", False),
]


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("mesh", "order", "sequence_parallel"),
    sentinels(CASES, CASES[5].__eq__, landing=CASES[-1].__eq__),
)
def test_lfm2_on_a_mesh_equals_one_device(mesh, order, sequence_parallel):
    loss, gradients = loss_and_gradients(mesh, order, sequence_parallel)
    of_one, expected = loss_and_gradients(())
    assert loss == pytest.approx(of_one, rel=1e-6)
    laid_out.assert_near(gradients, expected, 2e-5)
