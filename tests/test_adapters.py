"""Adapters, also of experts: results and gradients, on one device and on meshes."""

import dataclasses
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import drawn, laid_out
from linear import Linear
from outsider_runs import compiled, experiment, trained

from lmlib.adapters.lora import lora, merged, with_adapters
from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.losses.next_token import batch_loss
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.llama import llama
from lmlib.models.forward_context import single_document_context
from lmlib.models.matmul import matmul
from lmlib.models.matrices.lora import map_adapted, without_adapters
from lmlib.optim.matrices.muon import muon
from lmlib.optim.trainable import adapters, flops_per_token, grouped
from lmlib.parallel.mesh import make_mesh
from lmlib.parallel.selection import SelectionError, named_weights
from lmlib.state import abstract_batch, abstract_model, split_by_training

V, E, S = 64, 32, 16
BASE = functools.partial(llama, vocab=V, embed=E, layers=1, heads=4, kv_heads=2, mlp=64)
FLOAT32 = Compute(dtype="float32")


@functools.cache
def adapted(**settings):
    """A model whose adapters are not zero."""
    make = functools.partial(lora, BASE, **{"rank": 4, "alpha": 8.0} | settings)
    return drawn(jax.eval_shape(make, key=jax.random.key(0)))


def parts(model):
    trained, _, frozen = split_by_training(model, grouped(model, adapters()).keys())
    return trained, frozen


def loss(trained, frozen, batch, compute=FLOAT32, key=None):
    return batch_loss(eqx.combine(trained, frozen), batch, compute, key=key)[0].loss_sum


BATCH = Synthetic(V, batch_size=8, sequence_length=S).batch(0)


@eqx.filter_jit
def logits(model):
    tokens = jnp.asarray(BATCH.tokens[:2])
    return model(tokens, single_document_context(tokens, FLOAT32))


@pytest.mark.slow
def test_new_adapters_change_nothing_and_merged_ones_compute_the_same():
    new, base = lora(BASE, axes=("vocab",), key=jax.random.key(0)), BASE(key=jax.random.key(0))
    np.testing.assert_array_equal(logits(new), logits(base))
    model = drawn(new)
    found, expected = logits(model), logits(merged(model))
    assert np.max(np.abs(found - logits(base))) > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.max(np.abs(expected)))
    bare = jax.tree.leaves(without_adapters(new))
    for one, other in zip(bare, jax.tree.leaves(base), strict=True):
        np.testing.assert_array_equal(one, other)


def test_merged_weights_are_base_plus_scaled_product():
    model = adapted(rank_stabilized=True)
    one, other = (
        model.stack.patterns[0][0].attention.output,
        merged(model).stack.patterns[0][0].attention.output,
    )
    low = np.einsum("lhdr,lre->lhde", *(np.asarray(x, np.float64) for x in (one.down, one.up)))
    np.testing.assert_allclose(
        other, np.asarray(one.base) + 8 / np.sqrt(4) * low, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "make",
    [lambda: adapted(), pytest.param(lambda: adapted_experts(), marks=pytest.mark.slow)],
    ids=["dense", "experts"],
)
def test_gradients_equal_those_of_the_merged_weights(make):
    model = make()
    gradients = jax.jit(jax.grad(loss))(*parts(model), BATCH)
    whole = eqx.filter_jit(
        eqx.filter_grad(lambda model: batch_loss(model, BATCH, FLOAT32)[0].loss_sum)
    )(merged(model))

    def node(tree, path):
        for name in path.split("."):
            tree = tree[int(name)] if name.isdecimal() else getattr(tree, name)
        return tree

    def check(path, one):
        assert one.base is None
        given, lead = node(model, path), 2 if "experts" in path else 1  # layers, and experts
        count, rank = int(np.prod(given.base.shape[:lead])), given.down.shape[-1]
        down, up = (
            np.asarray(each, np.float64).reshape(count, *shape)
            for each, shape in ((given.down, (-1, rank)), (given.up, (rank, -1)))
        )
        dw = np.asarray(node(whole, path), np.float64).reshape(count, down.shape[1], -1)
        expected = given.scale * dw @ up.swapaxes(1, 2), given.scale * down.swapaxes(1, 2) @ dw
        for found, wanted in zip((one.down, one.up), expected, strict=True):
            np.testing.assert_allclose(
                np.asarray(found).reshape(wanted.shape), wanted, atol=1e-5 * np.max(np.abs(wanted))
            )
        return one

    map_adapted(check, gradients)


@pytest.mark.several_devices
def test_both_matrices_rest_split_over_fsdp_and_are_merged_there():
    model = adapted(axes=("vocab",))
    mesh = make_mesh(fsdp=4, tensor=2)
    placed = laid_out(model, mesh)

    def check(path, one):
        for array in (one.down, one.up):
            assert 4 * array.addressable_shards[0].data.size <= array.size, path
        return one

    map_adapted(check, placed)
    with jax.set_mesh(mesh):
        found = jax.jit(merged)(placed)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(merged(model)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.several_devices
def test_a_matrix_that_fsdp_does_not_divide_rests_whole():
    layer = Linear("embed", "mlp", embed=8, mlp=15, key=jax.random.key(0))
    layer = with_adapters(layer, rank=3, paths=("matrix",), key=jax.random.key(1))
    placed = abstract_model(lambda: layer, make_mesh(fsdp=4)).matrix
    assert placed.up.sharding.shard_shape(placed.up.shape) == placed.up.shape


def products(function, *arguments):
    """Returns the number of products, the same in the traced and the compiled program."""
    traced = jax.jit(function).trace(*arguments)
    compiled = traced.lower().compile().as_text()
    found = str(traced.jaxpr).count("= dot_general["), len(re.findall(r" dot\(", compiled))
    assert found[0] == found[1]
    return found[0]


def test_a_frozen_matrix_gets_no_gradient_and_its_product_is_absent():
    layer = Linear("embed", "mlp", embed=8, mlp=16, key=jax.random.key(0))
    layer = with_adapters(layer, rank=2, paths=("matrix",), key=jax.random.key(1))
    x = jnp.ones((3, 8))

    def through(low_rank, base, x):
        weight = dataclasses.replace(layer.matrix, base=base, down=low_rank[0], up=low_rank[1])
        return jnp.sum(matmul("be,ef->bf", x, weight) ** 2)

    low_rank, base = (layer.matrix.down, layer.matrix.up), layer.matrix.base
    # Forward the base and two small ones; backward one of x for each of them, and two gradients.
    assert products(jax.grad(through, argnums=(0, 2)), low_rank, base, x) == 3 + 5
    assert products(jax.grad(through, argnums=(0, 1, 2)), low_rank, base, x) == 3 + 5
    assert not np.any(jax.grad(through, argnums=1)(low_rank, base, x))


@pytest.mark.slow
def test_dropout_is_drawn_anew_for_each_adapter_and_layer():
    trained, frozen = parts(adapted(dropout=0.5))
    compiled = jax.jit(lambda key: loss(trained, frozen, BATCH, key=key))
    some = [float(compiled(jax.random.key(n))) for n in (0, 0, 1)]
    assert some[0] == some[1] != some[2]
    whole = float(jax.jit(loss)(trained, frozen, BATCH))
    assert whole not in some
    assert whole == float(jax.jit(loss)(*parts(adapted()), BATCH))


def test_weights_that_cannot_be_adapted_are_refused():
    def made(*of, **settings):
        of = of or (BASE,)
        return jax.eval_shape(functools.partial(lora, *of, **settings), key=jax.random.key(0))

    with pytest.raises(ValueError, match="rank and alpha must be positive, got 0 and"):
        made(rank=0)
    with pytest.raises(
        SelectionError, match=r"near it are .*stack\.patterns\.0\.0\.attention\.query"
    ):
        made(paths=("stack.*.attention.qeury",))
    with pytest.raises(SelectionError, match="select no matrix, but"):
        made(paths=("*norm.scale",))
    with pytest.raises(SelectionError, match="there are vocab, embed"):
        made(axes=("vocabulary",))
    with pytest.raises(ValueError, match="has adapters already"):
        made(functools.partial(lora, BASE))


X, F, TOP = 8, 48, 2
# A sigmoid's shares: with a softmax of few choices gradients of routers are small beside rounding.
MIXTURE = functools.partial(
    Mixture, experts=X, top=TOP, router=functools.partial(Router, scores="sigmoid")
)
WITH_EXPERTS = functools.partial(BASE, layers=2, mlp=F, feed_forward=MIXTURE)
PATHS = ("*.experts.*", "*.query")
MATRICES = ("gate", "up", "down")


@functools.cache
def adapted_experts():
    make = functools.partial(lora, WITH_EXPERTS, rank=4, alpha=8.0, paths=PATHS)
    return drawn(jax.eval_shape(make, key=jax.random.key(0)))


@functools.cache
def whole_on_one_device():
    return jax.jit(merged)(adapted_experts())


@functools.cache
def gradient_on_one_device(make):
    gradient = jax.jit(jax.grad(loss), static_argnums=3)
    return gradient(*parts(make()), BATCH, FLOAT32, jax.random.key(3)), jax.jit(merged)(make())


def experts(model):
    return model.stack.patterns[0][0].mlp.experts


def test_merged_adapters_compute_the_same_and_are_what_each_expert_adds():
    model = adapted_experts()
    found, expected = logits(model), logits(whole_on_one_device())
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.max(np.abs(expected)))
    for name in MATRICES:
        one, whole = getattr(experts(model), name), getattr(experts(whole_on_one_device()), name)
        base, down, up = (np.asarray(x, np.float64) for x in (one.base, one.down, one.up))
        for layer in range(2):
            for expert in range(X):
                wanted = base[layer, expert] + 8 / 4 * down[layer, expert] @ up[layer, expert]
                np.testing.assert_allclose(whole[layer, expert], wanted, atol=1e-6)


DROPPED, ALL_AXES = functools.partial(adapted, dropout=0.2), {"fsdp": 2, "expert": 2, "tensor": 2}


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("make", "mesh", "sequence_parallel", "settings"),
    [
        (DROPPED, {"data": 2, "fsdp": 2, "tensor": 2}, True, {}),
        (DROPPED, {"fsdp": 2, "tensor": 4}, False, {}),
        (DROPPED, {"fsdp": 4, "expert": 2}, False, {}),
        (DROPPED, ALL_AXES, True, {}),
        (adapted_experts, ALL_AXES, True, {"dispatch": "exchange", "expert_room": 1.0}),
        (adapted_experts, {"expert": 8}, False, {"dispatch": "exchange", "expert_room": 1.0}),
        (adapted_experts, ALL_AXES, False, {"grouped": "triton"}),
        (adapted_experts, ALL_AXES, False, {"dispatch": "gather", "expert_room": 2.0}),
        (adapted_experts, {"expert": 4, "tensor": 2}, True, {"dispatch": "gather"}),
        (adapted_experts, {"data": 2, "fsdp": 2, "tensor": 2}, True, {"expert_room": 1.0}),
    ],
)
def test_every_mesh_and_dispatch_gives_the_gradients_of_one_device(
    make, mesh, sequence_parallel, settings
):
    """Little room makes rows come in several rounds."""
    expected, mesh = gradient_on_one_device(make), make_mesh(**mesh)
    compute = Compute(dtype="float32", sequence_parallel=sequence_parallel, **settings)
    with jax.set_mesh(mesh):
        rows = jax.tree.map(lambda leaf: leaf.sharding, abstract_batch(8, S, mesh))

        @jax.jit
        def both(model, batch):
            gradient = jax.grad(functools.partial(loss, compute=compute, key=jax.random.key(3)))
            return gradient(*parts(model), batch), merged(model)

        found = both(laid_out(make(), mesh), jax.device_put(BATCH, rows))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.max(np.abs(other)))


@pytest.mark.several_devices
def test_adapters_of_experts_are_stored_with_their_experts():
    mesh = make_mesh(expert=4, fsdp=2)
    for name in MATRICES:
        one = getattr(experts(laid_out(adapted_experts(), mesh)), name)
        for array in (one.down, one.up):
            assert array.sharding.spec[1] == "expert"
            assert 8 * array.addressable_shards[0].data.size == array.size, name


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize("frozen_dtype", ["float32", "int8"])
def test_a_run_trains_the_pairs_alone_and_on_a_mesh_as_on_one_device(frozen_dtype):
    run_of = functools.partial(
        experiment, functools.partial(lora, WITH_EXPERTS, rank=4, alpha=8.0, paths=PATHS),
        trainable=adapters(), frozen_dtype=frozen_dtype,
    )  # fmt: skip
    found = {}
    for mesh, method in (({}, "auto"), ({"fsdp": 2, "expert": 2, "tensor": 2}, "triton")):
        run = run_of(mesh, dataclasses.replace(FLOAT32, grouped=method))
        begun = run.initial_state()
        before = jax.device_get(begun.frozen)
        found[len(mesh)], state = trained(run, compiled(run), begun)
        for one, other in zip(*map(jax.tree.leaves, (state.frozen, before)), strict=True):
            np.testing.assert_array_equal(one, other)
        assert np.any(np.asarray(experts(state.model).down.up))
    for ours, theirs in zip(*found.values(), strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-4)
        np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-3)


def test_a_product_of_all_experts_at_once_has_their_pairs():
    """A layer of one's own may multiply by all experts at once."""
    one = jax.tree.map(lambda x: x[0], experts(adapted_experts()).gate)
    x = jax.random.normal(jax.random.key(5), (X, 7, E))
    found = matmul("xce,xef->xcf", x, one)
    np.testing.assert_allclose(found, jnp.einsum("xce,xef->xcf", x, one.dense()), atol=1e-4)


def test_experts_are_adapted_where_they_are_asked_for_by_name():
    def selected(**settings):
        make = functools.partial(lora, WITH_EXPERTS, rank=2, **settings)
        model = jax.eval_shape(make, key=jax.random.key(0))
        return {path for path in named_weights(model) if path.endswith(".base")}

    of_experts = {f"stack.patterns.0.0.mlp.experts.{name}.base" for name in MATRICES}
    usual = selected()
    assert usual and not any("mlp" in path for path in usual)
    assert selected(paths=("stack.*", "*.experts.*")) == usual | of_experts
    assert selected(paths=(), axes=("experts",)) == of_experts
    assert selected(paths=("*.experts.down",)) == {"stack.patterns.0.0.mlp.experts.down.base"}
    with pytest.raises(SelectionError, match="where a pattern means them alone"):
        selected(paths=("stack.*.mlp.*",))
    for router in ({"paths": ("stack.*", "*.router.*")}, {"axes": ("choice",)}):
        with pytest.raises(SelectionError, match=r"router\.logits is a router's, and routers have"):
            selected(**router)
    with pytest.raises(ValueError, match=r"adapters of experts have no dropout, got 0\.1"):
        selected(paths=("*.experts.*",), dropout=0.1)


def test_flops_count_what_a_token_uses():
    model, groups = adapted_experts(), adapters()
    rank, tokens_of_attention = 4, 6 * 2 * E * S  # for scores and for weighted values
    of_experts = 3 * E * F * TOP * 4 + 3 * (E + F) * rank * TOP * 6
    query = E * E * 4 + 2 * E * rank * 6
    others = 2 * E * (E // 2) * 4 + E * E * 4 + E * X * 4
    expected = 2 * (of_experts + query + others + tokens_of_attention) + V * E * 4
    assert flops_per_token(model, groups, S, causal=False) == expected


@pytest.mark.slow
def test_muon_takes_each_expert_s_matrices_by_themselves():
    trained, _ = parts(adapted_experts())
    random = np.random.default_rng(0)
    gradients = jax.tree.map(lambda w: random.standard_normal(w.shape, np.float32), trained)
    optimizer = muon(10, peak_lr=1.0, weight_decay=0.0, clip_norm=None, dtype="float32")
    transformation = optimizer.transformation
    begun = transformation.init(trained)
    updates, _ = jax.jit(transformation.update)(gradients, begun, trained)
    for pair in (experts(updates).gate.down, experts(updates).down.up):
        found = np.asarray(pair, np.float64)
        singular = np.linalg.svd(found, compute_uv=False)  # of each layer and expert
        assert singular.shape == (2, X, 4)
        assert np.all(singular.max(-1) < 1.4 * singular.min(-1))
