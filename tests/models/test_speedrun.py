"""The family of speedruns and its parts: the equations in float64, caches, meshes, folders.

Shapes: B batch, S sequence, E embed, H heads, K kv_heads, D head_dim, V vocab.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from laid_out import assert_near, laid_out, loss_and_gradients
from whole_decoders import FLOAT32, check_generation

from lmlib import Compute, hf, llama, make_mesh, single_document_context
from lmlib.adapters.lora import merged, with_adapters
from lmlib.data.synthetic import Synthetic
from lmlib.models.families.speedrun import speedrun
from lmlib.models.families.windows import short_and_long
from lmlib.models.forward_context import FIRST_RESIDUAL
from lmlib.models.matrices.lora import map_adapted
from lmlib.models.part import NO_AUX, Part
from lmlib.models.residual_scales import ResidualScales
from lmlib.parallel.axes import map_weights
from lmlib.parallel.gathering import moves_of
from lmlib.parallel.layout import storage_spec
from lmlib.parallel.selection import named_weights

V, E, L, H, K, D, F, B, S = 48, 32, 4, 4, 2, 8, 40, 2, 14
WINDOW, CAP, EPSILON = 5, 3.0, 1e-6
MESHES = (
    {"fsdp": 8},
    {"fsdp": 2, "tensor": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
)
source = Synthetic(vocab_size=V, batch_size=8, sequence_length=S)


def make(key=None, **settings):
    every = dict(
        vocab=V, embed=E, layers=L, heads=H, kv_heads=K, mlp=F, window=WINDOW, long_every=2,
        logit_cap=CAP, attention_scale=0.4, zero_outputs=False,
    )  # fmt: skip
    return speedrun(**every | settings, key=jax.random.key(0) if key is None else key)


@functools.cache
def model():
    """No weight has its initial value, so that none can be left out unnoticed."""
    random = np.random.default_rng(1)
    return jax.tree.map(
        lambda w: w + 0.2 * random.normal(size=w.shape).astype(w.dtype), jax.jit(make)()
    )


def layers_of(stack):
    for pattern in stack.patterns:
        for i in range(jax.tree.leaves(pattern)[0].shape[0]):
            for layer in pattern:
                yield jax.tree.map(lambda w_R, i=i: np.asarray(w_R[i], np.float64), layer)


def unit(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)


def turned(x_SD):
    out_SD = np.empty_like(x_SD)
    for position in range(len(x_SD)):
        for i in range(D // 2):
            z = complex(x_SD[position, i], x_SD[position, i + D // 2])
            z *= np.exp(1j * position * 10_000.0 ** (-2 * i / D))
            out_SD[position, i], out_SD[position, i + D // 2] = z.real, z.imag
    return out_SD


def reference_logits(model, tokens_BS):
    """Row by row and head by head, as the docstrings say it."""
    found = []
    for tokens_S in np.asarray(tokens_BS):
        x_SE = first_SE = np.asarray(model.embedding, np.float64)[tokens_S]
        for number, layer in enumerate(layers_of(model.stack)):
            block = layer.layer
            x_SE = layer.residual * x_SE + layer.first * first_SE
            window = S if (number + 1) % 2 == 0 or number == L - 1 else WINDOW
            h_SE = unit(x_SE) * block.attention_norm.scale
            mixer, values = block.attention, block.attention.value_embedding
            assert (values is None) == ((L - 1 - number) % 2 == 1)
            for head in range(H):
                group = head // (H // K)
                q_SD = turned(unit(h_SE @ mixer.query[:, head]))
                k_SD = turned(unit(h_SE @ mixer.key[:, group]))
                v_SD = h_SE @ mixer.value[:, group]
                if values is not None:
                    rows_SD = values.table[tokens_S].reshape(S, K, D)[:, group]
                    v_SD = v_SD + values.share * rows_SD
                for s in range(S):
                    seen = range(max(0, s - window + 1), s + 1)
                    mix = np.exp([0.4 * q_SD[s] @ k_SD[t] for t in seen])
                    mixed_D = mix @ v_SD[seen.start : seen.stop] / mix.sum()
                    x_SE = x_SE.copy()
                    x_SE[s] += mixed_D @ mixer.output[head]
            h_SE = unit(x_SE) * block.mlp_norm.scale
            x_SE = x_SE + np.maximum(h_SE @ block.mlp.up, 0) ** 2 @ block.mlp.down
        h_SE = unit(x_SE) * np.asarray(model.norm.scale, np.float64)
        logits_SV = h_SE @ np.asarray(model.unembedding, np.float64)
        found.append(CAP * np.tanh(logits_SV / CAP))
    return np.stack(found)


@functools.cache
def tokens():
    with jax.ensure_compile_time_eval():
        return jnp.asarray(np.random.default_rng(2).integers(0, V, (B, S)), jnp.int32)


@pytest.mark.slow
def test_logits_match_the_equations():
    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda model: model(tokens(), single_document_context(tokens(), FLOAT32)))(
            model()
        )
    expected = reference_logits(model(), tokens())
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


@functools.cache
def gradients(mesh, **compute):
    compute = Compute(dtype="float32", **compute)
    return loss_and_gradients(model(), dict(mesh), compute, source)[1]


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("mesh", "sequence_parallel"),
    [(MESHES[0], False), (MESHES[1], False), (MESHES[2], True), (MESHES[3], False)],
)
def test_every_mesh_gives_the_gradients_of_one_device(mesh, sequence_parallel):
    found = gradients(tuple(mesh.items()), sequence_parallel=sequence_parallel)
    assert all(np.any(each) for each in jax.tree.leaves(gradients(())))
    assert_near(found, gradients(()))


@pytest.mark.several_devices
def test_a_table_of_values_rests_where_it_is_used():
    """`gather` has nothing to send, in training or in generation."""
    mesh = make_mesh(fsdp=4, tensor=2)
    found = {}

    def look(weight, array):
        if weight.path.endswith("value_embedding.table"):
            rests = storage_spec(weight, array.shape, mesh)
            assert moves_of(weight, array.shape, mesh).whole == rests
            found[weight.path] = NamedSharding(mesh, rests).shard_shape(array.shape)

    map_weights(look, jax.eval_shape(make))
    assert {*found.values()} == {(2, V, K * D // 8)}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, MESHES[1], MESHES[2]], ids=str)
def test_generation_equals_the_full_pass(mesh):
    check_generation(model(), make_mesh(**mesh), tokens())


@pytest.mark.slow
@pytest.mark.several_devices
def test_adapters_beside_every_matrix_and_table():
    """The adapted model on a mesh computes the same as the merged one."""
    mesh = make_mesh(fsdp=2, tensor=4)
    adapted = with_adapters(model(), rank=4, key=jax.random.key(3))
    assert any(path.endswith("value_embedding.table.up") for path in named_weights(adapted))
    adapted = map_adapted(lambda _, one: dataclasses.replace(one, up=one.up + 0.1), adapted)
    expected = merged(adapted)(tokens(), single_document_context(tokens(), FLOAT32))
    with jax.set_mesh(mesh):
        rows = jnp.tile(tokens(), (4, 1))
        found = jax.jit(lambda model: model(rows, single_document_context(rows, FLOAT32)))(
            laid_out(adapted, mesh)
        )
    np.testing.assert_allclose(np.asarray(found)[:B], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_without_its_parts_it_is_a_llama():
    plain = dict(
        value_embeddings=False, residual_scales=False, query_key_norm=False, squared_relu=False,
        logit_cap=None, window=None, attention_scale=None,
    )  # fmt: skip
    found = jax.jit(lambda: make(**plain))()
    expected = llama(V, E, L, H, F, kv_heads=K, norm_epsilon=EPSILON, key=jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_with_zero_outputs_layers_begin_as_the_identity():
    made = make(zero_outputs=True)
    context = single_document_context(tokens(), FLOAT32)
    np.testing.assert_array_equal(made.trunk(tokens(), context).x_BSE, made.embedding[tokens()])
    decays = {}
    map_weights(lambda weight, _: decays.update({weight.path: weight.declaration}), made)
    outputs = [how for path, how in decays.items() if path.endswith((".output", ".down"))]
    assert len(outputs) == 4 and all(how.decays and how.multiplied for how in outputs)


@pytest.mark.slow
def test_flops_count_what_is_multiplied():
    per_layer = E * H * D + 2 * E * K * D + H * D * E + 2 * E * F
    long, short = 12 * H * D * S, 12 * H * D * WINDOW
    expected = 6 * (L * per_layer + E * V) + 2 * long + 2 * short
    assert model().flops_per_token(S, causal=False) == expected


@pytest.mark.slow
def test_the_reading_of_attention_is_that_of_the_layer():
    """The weights of the first layer follow from its input."""
    context = dataclasses.replace(
        single_document_context(tokens(), FLOAT32),
        observe=lambda call: call.layer.attention_weights(call.before, call.context),
    )
    weights_LBHST = model().trunk(tokens(), context).observed
    assert weights_LBHST.shape == (L, B, H, S, S)
    np.testing.assert_allclose(weights_LBHST.sum(-1), 1, rtol=1e-5)
    assert float(weights_LBHST[0, ..., -1, : S - WINDOW].max()) == 0
    assert float(weights_LBHST[-1, ..., -1, : S - WINDOW].min()) > 0


@pytest.mark.slow
def test_no_folder_of_hugging_faces_describes_it(tmp_path):
    with pytest.raises(ValueError, match=r"none of .* is this model"):
        hf.save(make(), tmp_path / "whole")
    with pytest.raises(ValueError, match="a ResidualScales where the family has a BlockBase"):
        hf.save(make(), tmp_path / "llama", model_type="llama")
    gated = dict(residual_scales=False, squared_relu=False, window=None, attention_scale=None)
    for left, reason in (
        (
            {"logit_cap": 30.0, "value_embeddings": 0, "query_key_norm": False},
            "its logit_cap is 30.0",
        ),
        ({"logit_cap": None, "value_embeddings": 1, "query_key_norm": False}, "value_embedding"),
        ({"logit_cap": None, "value_embeddings": 0, "query_key_norm": True}, "query_norm"),
    ):
        with pytest.raises(ValueError, match=reason):
            hf.save(make(**gated, **left), tmp_path / "llama", model_type="llama")
    assert not [*tmp_path.iterdir()]


class Input(Part):
    """A layer that does nothing and shows its input in place of attention weights."""

    def __call__(self, x_BSE, context, cache=None):
        return x_BSE, NO_AUX, cache

    def attention_weights(self, x_BSE, context):
        return x_BSE


def test_the_reading_of_attention_begins_with_the_scaled_residual_stream():
    layer = ResidualScales(Input(), initial_first=0.5, key=jax.random.key(0))
    layer = eqx.tree_at(lambda layer: layer.residual, layer, jnp.float32(-2.0))
    x_BSE, first_BSE = jax.random.normal(jax.random.key(1), (2, 1, 3, 4))
    context = single_document_context(jnp.zeros((1, 3), jnp.int32), FLOAT32)
    found = layer.attention_weights(x_BSE, context.sharing({FIRST_RESIDUAL: first_BSE}))
    np.testing.assert_allclose(found, -2 * x_BSE + 0.5 * first_BSE, rtol=1e-6)


def test_windows_of_layers():
    assert short_and_long(7, 32, 3) == [32, 32, None, 32, 32, None, None]
    assert short_and_long(3, 32, 4, long=64) == [32, 32, 64]
    assert short_and_long(2, None, 1) == [None, None]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        short_and_long(2, 32, 0)
    with pytest.raises(ValueError, match="value_embeddings must not be negative, got -1"):
        make(value_embeddings=-1)
