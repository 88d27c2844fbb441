"""Attention with short convolutions, against float64 NumPy, in a cache and on meshes."""

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
from lmlib.generate import GREEDY, Generator
from lmlib.inspect.inspector import Inspector
from lmlib.losses.next_token import batch_loss
from lmlib.models.families.llama import llama
from lmlib.models.forward_context import ForwardContext, single_document_context
from lmlib.models.parts.attention import Attention
from lmlib.models.recurrent.convolved_attention import ConvolvedAttention
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.planner import cache_bytes

EMBED, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LENGTH = 16, 4, 2, 4, 3, 13
SEGMENTS_BS = np.array([[1] * 5 + [2] + [3] * 7, [1] * 11 + [2] * 2])
POSITIONS_BS = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
V, ROWS, TOKENS = 64, 8, 16
SOURCE = Synthetic(vocab_size=V, batch_size=ROWS, sequence_length=TOKENS)
FLOAT32 = Compute(dtype="float32")


def layer():
    sizes = EMBED, HEADS, KV_HEADS, HEAD_DIM
    return laid_out.drawn(
        jax.eval_shape(lambda: ConvolvedAttention(*sizes, width=WIDTH, key=jax.random.key(0)))
    )


def expected(part, x_SE):
    """One document: attention without positions, in NumPy."""
    names, mixed = ("query", "key", "value"), []
    w = {name: np.asarray(getattr(part, name), np.float64) for name in (*names, "output")}
    for name, convolution in zip(names, part.convolutions, strict=True):
        product_SHD = np.einsum("se,ehd->shd", x_SE, w[name])
        padded = np.concatenate([np.zeros((WIDTH - 1, *product_SHD.shape[1:])), product_SHD])
        weights_HDW = np.asarray(convolution.filter, np.float64)
        windows = [np.moveaxis(padded[t : t + WIDTH], 0, -1) for t in range(len(x_SE))]
        y_SHD = product_SHD + np.stack([(each * weights_HDW).sum(-1) for each in windows])
        mixed.append(np.repeat(y_SHD, HEADS // y_SHD.shape[1], axis=1).swapaxes(0, 1))
    q, k, v = mixed
    scores = np.einsum("hsd,htd->hst", q, k) / np.sqrt(HEAD_DIM)
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    weights = scores / scores.sum(-1, keepdims=True)
    return np.einsum("hst,htd,hde->se", weights, v, w["output"])


def test_packed_rows_equal_the_definition_of_each_document():
    part, x_BSE = layer(), np.random.default_rng(0).normal(size=(2, LENGTH, EMBED))
    context = ForwardContext(jnp.asarray(POSITIONS_BS), jnp.asarray(SEGMENTS_BS), FLOAT32)
    found_BSE, cache = part(jnp.asarray(x_BSE, jnp.float32), context)
    assert cache is None
    for row in range(2):
        for segment in np.unique(SEGMENTS_BS[row]):
            inside = SEGMENTS_BS[row] == segment
            of_document = expected(part, x_BSE[row, inside])
            np.testing.assert_allclose(found_BSE[row, inside], of_document, rtol=1e-4, atol=1e-5)


CONVOLVED = functools.partial(ConvolvedAttention, width=WIDTH)


def make(attention=CONVOLVED, layers=2):
    return functools.partial(
        llama, vocab=V, embed=32, layers=layers, heads=8, kv_heads=4, mlp=48, attention=attention
    )


@functools.cache
def weights():
    return laid_out.drawn(jax.eval_shape(lambda: make(layers=4)(key=jax.random.key(0))))


@jax.jit
def logits(model, ids):
    return model(ids, single_document_context(ids, FLOAT32))


def ids(length=20):
    return np.random.default_rng(1).integers(0, V, (2, length), np.int32)


def test_no_token_reads_a_later_one():
    before, changed = ids(), ids()
    changed[:, 12] = (changed[:, 12] + 1) % V
    one, other = logits(weights(), before), logits(weights(), changed)
    np.testing.assert_array_equal(one[:, :12], other[:, :12])
    assert (np.abs(one - other)[:, 12:].max(axis=-1) > 1e-3).all()


def test_a_new_model_equals_one_with_plain_attention():
    plain, convolved = make(Attention)(key=jax.random.key(0)), make()(key=jax.random.key(0))
    np.testing.assert_array_equal(logits(plain, ids()), logits(convolved, ids()))


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_generation_with_a_cache_equals_whole_passes(chunk):
    prompts = [ids()[0, :7].tolist(), ids()[1, :3].tolist()]
    generator = Generator(weights(), compute=FLOAT32, rows=2, length=32, chunk=chunk)
    for prompt, (found,) in zip(prompts, generator(prompts, 12, GREEDY), strict=True):
        whole = [*prompt, *found.tokens]
        logprobs = jax.nn.log_softmax(logits(weights(), np.array([whole], np.int32))[0])
        for at, (token, logprob) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
            assert token == np.argmax(logprobs[len(prompt) + at - 1])
            assert logprob == pytest.approx(float(logprobs[len(prompt) + at - 1, token]), abs=1e-4)


def test_inspect_shows_weights_and_plan_counts_filters_and_windows():
    weights_HST = Inspector(weights(), compute=FLOAT32).attention(ids()[0, :9].tolist())
    np.testing.assert_allclose(np.sum(weights_HST, axis=-1), 1, rtol=1e-5)
    part, plain = layer(), Attention(EMBED, HEADS, KV_HEADS, HEAD_DIM, key=jax.random.key(0))
    filters = 6 * WIDTH * HEAD_DIM * (HEADS + 2 * KV_HEADS)
    assert part.flops_per_token(9, True) == plain.flops_per_token(9, True) + filters
    plain = jax.eval_shape(lambda: make(Attention, 4)(key=jax.random.key(0)))
    found, alone = (cache_bytes(model, "bfloat16") for model in (weights(), plain))
    windows = 2 * 4 * (WIDTH - 1) * 4 * (8 + 2 * 4)
    assert {length: found[length] - alone[length] for length in alone} == dict.fromkeys(
        alone, windows
    )


@functools.cache
def loss_and_gradients(sizes, order="plain", sequence_parallel=False):
    compute = Compute(dtype="float32", sequence_parallel=sequence_parallel)

    def mean(model, batch):
        return batch_loss(model, batch, compute)[0].loss_sum / batch.loss_mask.sum()

    mesh = make_mesh(**dict(sizes))
    model = laid_out.laid_out(weights(), mesh)
    with jax.set_mesh(mesh):
        batch = place(SOURCE, 0, sharding("batch seq", mesh), order)
        assert len(np.unique(batch.segment_ids)) > 2  # packed
        return jax.device_get(jax.jit(jax.value_and_grad(mean))(model, batch))


def sizes(**axes):
    return tuple(axes.items())


CASES = [
    (sizes(fsdp=8), "plain", False),
    (sizes(data=2, fsdp=2, tensor=2), "plain", True),
    (sizes(context=4, fsdp=2), "plain", False),
    (sizes(context=2, tensor=2), "zigzag", True),
    (sizes(stage=2, context=2), "zigzag", False),
]


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("mesh", "order", "sequence_parallel"),
    sentinels(CASES, CASES[3].__eq__, landing=CASES[-1].__eq__),
)
def test_a_mesh_equals_one_device(mesh, order, sequence_parallel):
    loss, gradients = loss_and_gradients(mesh, order, sequence_parallel)
    of_one, expected = loss_and_gradients(())
    assert loss == pytest.approx(of_one, rel=1e-6)
    laid_out.assert_near(gradients, expected, 2e-5)


def test_a_width_of_one_is_refused():
    with pytest.raises(ValueError, match="a width of at least 2 tokens, got 1"):
        ConvolvedAttention(EMBED, HEADS, KV_HEADS, HEAD_DIM, width=1, key=jax.random.key(0))
