"""Each use of a model works with each recurrent layer, or is refused in a sentence.

Tests of each layer cover meshes and pipeline stages.
"""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import laid_out
import numpy as np
import pytest
from sentinels import sentinels

from lmlib import Compute, Inspector, make_mesh
from lmlib.adapters.lora import merged, with_adapters
from lmlib.compute import EVERYTHING
from lmlib.data.synthetic import Synthetic
from lmlib.evaluate.documents import Document, evaluate_documents
from lmlib.evaluate.scoring import Scorer
from lmlib.evaluate.windows import Packing
from lmlib.experiment import Experiment
from lmlib.generate import GREEDY, Generator
from lmlib.inspect.coordinates import LOOKED_AT, changes, slope
from lmlib.inspect.layer_statistics import layer_statistics
from lmlib.inspect.saved_activations import ALWAYS_KEPT, saved_activations
from lmlib.losses.next_token import NextToken, batch_loss
from lmlib.models.families.transformer import transformer
from lmlib.models.forward_context import single_document_context
from lmlib.models.matrices.int8 import in_int8
from lmlib.models.parts.attention import Attention
from lmlib.models.recurrent.gated_deltanet import GatedDeltaNet
from lmlib.models.recurrent.kimi_delta import KimiDelta
from lmlib.models.recurrent.mamba2 import Mamba2
from lmlib.models.recurrent.short_convolution import ShortConvolution
from lmlib.optim.adamw import adamw
from lmlib.optim.matrices.whole_matrices import APART, is_matrix
from lmlib.optim.schedules import warmup_constant
from lmlib.optim.transfer import CompleteP
from lmlib.parallel.axes import map_weights
from lmlib.parallel.selection import named_weights
from lmlib.plan.planner import cache_bytes

V, E, H, G, K, U, L = 64, 16, 4, 2, 3, 5, 7  # U value_dim, L latent
FLOAT32 = Compute(dtype="float32")
QUERY, VALUE = E * G * K, E * H * U  # sizes of projections
# By the layer's name: how to make it; the names of its projections, which Muon, adapters and 8 bits
# take; gates of heads, which Muon leaves out; FLOPs of a token for other products; numbers in
# a cache: of windows, and of states, in float32.
LAYERS = {
    "GatedDeltaNet": (
        lambda embed, heads, kv_heads, key_dim=K, **others: GatedDeltaNet(
            embed, heads, kv_heads, key_dim, U, **others
        ),
        ("query", "key", "value", "gate", "output"), ("rate", "time"),
        6 * (2 * QUERY + 3 * VALUE + 2 * E * H + 4 * (2 * G * K + H * U) + 3 * H * K * U),
        (3 * (2 * G * K + H * U), H * K * U),
    ),
    "KimiDelta": (
        lambda embed, heads, kv_heads, key_dim=K, **others: KimiDelta(
            embed, heads, key_dim, U, L, **others
        ),
        ("query", "key", "value", "time_down", "time_up", "gate_down", "gate_up", "output"),
        ("rate",),
        6 * (2 * E * H * K + 2 * VALUE + (2 * E + H * K + H * U) * L + E * H)
        + 6 * (4 * (2 * H * K + H * U) + 3 * H * K * U),
        (3 * (2 * H * K + H * U), H * K * U),
    ),
    "Mamba2": (
        lambda embed, heads, kv_heads, key_dim=K, **others: Mamba2(
            embed, heads, kv_heads, key_dim, U, **others
        ),
        ("query", "key", "input", "gate", "output"), ("time",),
        6 * (2 * QUERY + 3 * VALUE + E * H + 4 * (2 * G * K + H * U) + 2 * H * K * U),
        (3 * (2 * G * K + H * U), H * K * U),
    ),
    "ShortConvolution": (
        lambda embed, heads, kv_heads, **others: ShortConvolution(embed, 3 * embed, **others),
        ("input_gate", "output_gate", "input", "output"), (),
        6 * (4 * E * 3 * E + 3 * 3 * E),
        (2 * 3 * E, 0),
    ),
}  # fmt: skip
NAMES = sentinels(LAYERS, "ShortConvolution".__eq__, landing="GatedDeltaNet".__eq__)
of_each_layer = pytest.mark.parametrize("name", NAMES)


def make(name, **sizes):
    def recurrent(embed, heads, kv_heads, head_dim, *, rotary, window, **others):
        return LAYERS[name][0](embed, heads, kv_heads, **others)

    sizes = {"vocab": V, "embed": E, "layers": 2, "heads": H, "kv_heads": G, "mlp": 24} | sizes
    return functools.partial(transformer, **sizes, attention=[recurrent, Attention])


@functools.cache
def model_with(name):
    return laid_out.drawn(jax.eval_shape(lambda: make(name)(key=jax.random.key(0))))


def layer_of(name):
    """Without the axis of stacked layers."""
    return jax.tree.map(lambda leaf: leaf[0], model_with(name).stack.patterns[0][0].attention)


@jax.jit
def logits(model, ids):
    return model(ids, single_document_context(ids, FLOAT32))


def ids(length=20):
    return np.random.default_rng(1).integers(0, V, (2, length), np.int32)


def assert_close(found, expected, bound):
    distance = np.linalg.norm(np.asarray(found, np.float64) - expected)
    assert distance <= bound * np.linalg.norm(expected)


@of_each_layer
def test_documents_are_evaluated_alone(name):
    random, scorer = np.random.default_rng(0), Scorer(make_mesh(devices=jax.devices()[:1]), FLOAT32)
    documents = [Document(random.integers(0, V, length)) for length in (5, 2, 9, 3, 4, 17)]
    packed, alone = (
        evaluate_documents(model_with(name), documents, scorer, Packing(2, 16, packed), 0)
        for packed in (True, False)
    )
    assert packed.loss.value == pytest.approx(alone.loss.value, rel=1e-6)
    assert [each.loss.value for each in packed.by_position] == pytest.approx(
        [each.loss.value for each in alone.by_position], rel=1e-5
    )


@of_each_layer
def test_inspect_shows_all_but_attention_weights(name):
    inspector = Inspector(model_with(name), compute=FLOAT32)
    with pytest.raises(ValueError, match=rf"lmlib\.models\.recurrent\.\S+\.{name} shows no atten"):
        inspector.attention([1, 2, 3])
    assert np.isfinite(inspector.logit_lens([1, 2, 3])).all()
    mesh = make_mesh(devices=jax.devices()[:1])
    model = laid_out.laid_out(model_with(name), mesh)
    found = layer_statistics(model, Synthetic(V, 2, 16).batch(0), mesh, FLOAT32)
    assert all(part.gradients > 0 and part.weights > 0 for part in found.parts)


@pytest.mark.parametrize("name", LAYERS)
def test_plan_counts_flops_saved_activations_and_a_cache_of_constant_size(name):
    _, _, _, flops, (windows, state) = LAYERS[name]
    part = layer_of(name)
    for length in (128, 4_096):
        assert part.flops_per_token(length, causal=True) == flops
    attention = 2 * 2 * E // H * G  # bytes of a token's keys and values in bfloat16
    constant = 2 * windows + 4 * state
    expected = {length: constant + attention * length for length in (4_096, 32_768)}
    assert cache_bytes(model_with(name), "bfloat16") == expected
    shown = saved_activations(experiment(name, compute=Compute(saved=part.names.saved)))
    assert {each.name for each in shown} == {*ALWAYS_KEPT, *part.names.saved}


def experiment(name, steps=1, scaling=None, compute=FLOAT32, **sizes):
    return Experiment(
        make(name, **sizes), Synthetic(V, batch_size=4, sequence_length=32),
        functools.partial(adamw, peak_lr=4e-3, schedule=warmup_constant),
        make_mesh(devices=jax.devices()[:1]), steps, compute=compute, scaling=scaling,
    )  # fmt: skip


@of_each_layer
def test_adapters_are_on_projections_and_merge(name):
    _, matrices, gates, *_ = LAYERS[name]
    adapted = with_adapters(model_with(name), rank=2, key=jax.random.key(1))
    own = adapted.stack.patterns[0][0].attention
    found = {field for field, value in vars(own).items() if hasattr(value, "down")}
    assert found == {*matrices, *gates}
    random = np.random.default_rng(2)
    moved = map_weights(
        lambda weight, array: (
            random.normal(0, 0.1, array.shape).astype(np.float32)
            if weight.path.endswith(".up")
            else array
        ),
        adapted,
    )
    expected = np.asarray(logits(merged(moved), ids()))
    assert_close(logits(moved, ids()), expected, 1e-5)
    with pytest.raises(AssertionError):
        assert_close(logits(adapted, ids()), expected, 1e-2)


@of_each_layer
def test_a_model_in_8_bits_generates_what_its_rounded_weights_do(name):
    rounded = map_weights(in_int8, model_with(name))
    is_rounded = lambda leaf: hasattr(leaf, "scale") and hasattr(leaf, "values")  # noqa: E731
    own = rounded.stack.patterns[0][0].attention
    assert {n for n, value in vars(own).items() if is_rounded(value)} >= {*LAYERS[name][1]}
    plain = jax.tree.map(
        lambda leaf: leaf.dense() if is_rounded(leaf) else leaf, rounded, is_leaf=is_rounded
    )
    prompts = [ids()[0, :7].tolist(), ids()[1, :3].tolist()]
    found, expected = (
        Generator(model, compute=FLOAT32, rows=2, length=32, chunk=4, int8=int8)(
            prompts, 12, GREEDY
        )
        for model, int8 in ((model_with(name), True), (plain, False))
    )
    for (one,), (other,) in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_muon_takes_projections_and_no_filters_gates_or_rates(name):
    found = set()
    map_weights(lambda w, _: is_matrix(w, APART) and found.add(w.path), layer_of(name))
    assert found == {*LAYERS[name][1]}


WIDTHS = {m: {"embed": m * E, "heads": m * H, "kv_heads": m * G, "mlp": m * 24} for m in (1, 2, 4)}


@pytest.mark.parametrize("name", LAYERS)
def test_orthogonal_updates_change_outputs_alike_at_every_width(name):
    """The norm of an update, √(larger side) times the factor, is √(outputs / inputs) in units of
    the base's (arXiv:2310.17813, condition 1)."""

    def of_width(multiple):
        shapes = jax.eval_shape(lambda: make(name, **WIDTHS[multiple])(key=jax.random.key(0)))
        return shapes.stack.patterns[0][0].attention

    def sides(part, projection):
        shape = getattr(part, projection).shape[1:]  # without the axis of stacked layers
        split = len(shape) - 1 if projection == "output" else 1
        return math.prod(shape[:split]), math.prod(shape[split:])

    wide, base = of_width(4), of_width(1)
    scaled = CompleteP(WIDTHS[1]).scaled(make(name, **WIDTHS[4]))
    weights = named_weights(jax.eval_shape(lambda: make(name)(key=jax.random.key(0))))
    for projection in LAYERS[name][1]:
        (inputs, outputs), of_base = sides(wide, projection), sides(base, projection)
        factor = scaled.of_orthogonal(weights[f"stack.patterns.0.0.attention.{projection}"], APART)
        found = factor * math.sqrt(max(inputs, outputs) / max(of_base))
        grown = math.sqrt(outputs / inputs / (of_base[1] / of_base[0]))
        assert found == pytest.approx(grown), projection


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_changes_stay_as_large_in_wider_models(name):
    found = [
        changes(experiment(name, 3, CompleteP(WIDTHS[1]), **sizes)) for sizes in WIDTHS.values()
    ]
    of_width = {each: slope([*WIDTHS], [one[each][-1] for one in found]) for each in LOOKED_AT}
    for where in ("embedding", "middle layer", "last layer"):
        assert abs(of_width[where]) < 0.25, of_width  # a rate off by √width adds 0.5


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "ShortConvolution"])
def test_keys_that_grow_are_refused(name):
    def model(key_dim=6, *, key):
        def recurrent(*sizes, rotary, window, **others):
            return LAYERS[name][0](*sizes[:3], key_dim=key_dim, **others)

        return transformer(V, E, 1, H, 24, G, attention=recurrent, key=key)

    with pytest.raises(ValueError, match="key_dim is 3 in the base of scaling and 6 in the model"):
        CompleteP({"key_dim": 3}).scaled(model)


def loss_and_gradients(name, compute=FLOAT32, dropout=0.0):
    key, batch = jax.random.key(0) if dropout else None, Synthetic(V, 2, 16).batch(0)

    def mean(model):
        sums, _ = batch_loss(model, batch, compute, NextToken(dropout=dropout), key)
        return sums.loss_sum / batch.loss_mask.sum()

    return jax.jit(jax.value_and_grad(mean))(model_with(name))


@of_each_layer
def test_saved_activations_change_no_gradient_with_dropout(name):
    loss, expected = loss_and_gradients(name, FLOAT32, 0.3)
    kept, found = loss_and_gradients(name, Compute(dtype="float32", saved=EVERYTHING), 0.3)
    assert kept == pytest.approx(float(loss), rel=1e-6)
    laid_out.assert_near(found, expected, 2e-5)
    assert abs(loss - loss_and_gradients(name)[0]) > 1e-3


@of_each_layer
@pytest.mark.parametrize(
    ("compute", "bound"),
    [
        (Compute(dtype="float32", quantized={"projections": "int8"}), 0.05),
        (Compute(dtype="bfloat16"), 0.05),
    ],
    ids=["int8", "bfloat16"],
)
def test_lower_precisions_are_close_with_finite_gradients(name, compute, bound):
    exact, expected = loss_and_gradients(name)
    loss, gradients = loss_and_gradients(name, compute)
    assert loss == pytest.approx(float(exact), rel=bound) and loss != exact
    for one, other in zip(*map(jax.tree.leaves, (gradients, expected)), strict=True):
        assert_close(one, np.asarray(other), 6 * bound)


@pytest.mark.parametrize("name", LAYERS)
def test_states_are_in_float32_with_a_cache_in_bfloat16(name):
    cache = jax.eval_shape(lambda: layer_of(name).empty_cache(2, 8, "bfloat16"))
    assert {window.dtype for window in cache.windows} == {jnp.dtype("bfloat16")}
    assert eqx.filter(cache.state, lambda x: x.dtype != jnp.float32) is None
