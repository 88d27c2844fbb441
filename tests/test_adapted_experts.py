"""Adapters of experts, a pair for each: what they compute, their gradients on every mesh and by
every dispatch, and what cannot be adapted."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import drawn, laid_out
from outsider_runs import compiled, experiment, trained

from lmlib.adapters.lora import lora, merged
from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.losses.next_token import batch_loss
from lmlib.models.context import whole_rows
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.llama import llama
from lmlib.models.product import product
from lmlib.optim.muon import muon
from lmlib.optim.trainable import adapters, flops_per_token, grouped
from lmlib.parallel.mesh import make_mesh
from lmlib.parallel.selection import SelectionError, named_weights
from lmlib.state import abstract_batch, parted

V, E, F, S, X, TOP = 64, 32, 48, 16, 8, 2
# A sigmoid's shares: with a softmax of few choices gradients of routers are small beside rounding.
MIXTURE = functools.partial(
    Mixture, experts=X, top=TOP, router=functools.partial(Router, scores="sigmoid")
)
BASE = functools.partial(
    llama, vocab=V, embed=E, layers=2, heads=4, kv_heads=2, mlp=F, feed_forward=MIXTURE
)
PATHS = ("*.experts.*", "*.query")
FLOAT32 = Compute(dtype="float32")
BATCH = Synthetic(V, batch_size=8, sequence_length=S).batch(0)
MATRICES = ("gate", "up", "down")


@functools.cache
def adapted():
    make = functools.partial(lora, BASE, rank=4, alpha=8.0, paths=PATHS)
    return drawn(jax.eval_shape(make, key=jax.random.key(0)))


@functools.cache
def whole_on_one_device():
    return jax.jit(merged)(adapted())


def parts(model):
    trained, _, frozen = parted(model, grouped(model, adapters()).keys())
    return trained, frozen


def loss(trained, frozen, batch, compute=FLOAT32):
    return batch_loss(eqx.combine(trained, frozen), batch, compute)[0].minimised


@functools.cache
def compiled_gradient():
    return jax.jit(jax.grad(loss)).lower(*parts(adapted()), BATCH).compile()


@functools.cache
def compiled_gradient_of_merged():
    def of_all(model):
        return batch_loss(model, BATCH, FLOAT32)[0].minimised

    return jax.jit(jax.grad(of_all)).lower(whole_on_one_device()).compile()


def experts(model):
    return model.stack.patterns[0][0].mlp.experts


@eqx.filter_jit
def logits(model):
    tokens = jnp.asarray(BATCH.tokens[:2])
    return model(tokens, whole_rows(tokens, FLOAT32))


@pytest.mark.slow
def test_merged_adapters_compute_the_same_and_are_what_each_expert_adds():
    model = adapted()
    found, expected = logits(model), logits(whole_on_one_device())
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.max(np.abs(expected)))
    for name in MATRICES:
        one, whole = getattr(experts(model), name), getattr(experts(whole_on_one_device()), name)
        base, down, up = (np.asarray(x, np.float64) for x in (one.base, one.down, one.up))
        for layer in range(2):
            for expert in range(X):
                wanted = base[layer, expert] + 8 / 4 * down[layer, expert] @ up[layer, expert]
                np.testing.assert_allclose(whole[layer, expert], wanted, atol=1e-6)


@pytest.mark.slow
def test_gradients_are_those_of_the_merged_weights():
    model = adapted()
    gradients = compiled_gradient()(*parts(model), BATCH)
    whole = compiled_gradient_of_merged()(whole_on_one_device())
    for name in MATRICES:
        one, found = getattr(experts(model), name), getattr(experts(gradients), name)
        assert found.base is None
        dw, down, up = (
            np.asarray(each, np.float64)
            for each in (getattr(experts(whole), name), one.down, one.up)
        )
        wanted = {
            "down": one.scale * np.einsum("lxef,lxrf->lxer", dw, up),
            "up": one.scale * np.einsum("lxer,lxef->lxrf", down, dw),
        }
        for field, expected in wanted.items():
            np.testing.assert_allclose(
                getattr(found, field), expected, atol=1e-5 * np.max(np.abs(expected))
            )


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("mesh", "dispatch", "room", "sequence_parallel"),
    [
        ({"fsdp": 2, "expert": 2, "tensor": 2}, "exchange", 1.0, True),
        ({"expert": 8}, "exchange", 1.0, False),
        ({"fsdp": 2, "expert": 2, "tensor": 2}, "gather", 2.0, False),
        ({"expert": 4, "tensor": 2}, "gather", 1.0, True),
        ({"data": 2, "fsdp": 2, "tensor": 2}, "auto", 1.0, True),
    ],
)
def test_every_mesh_and_dispatch_gives_the_gradients_of_one_device(
    mesh, dispatch, room, sequence_parallel
):
    """With little room, rows come in several rounds."""
    expected = compiled_gradient()(*parts(adapted()), BATCH)
    mesh = make_mesh(**mesh)
    compute = Compute(
        dtype="float32", dispatch=dispatch, expert_room=room, sequence_parallel=sequence_parallel
    )
    with jax.set_mesh(mesh):
        placed = laid_out(adapted(), mesh)
        rows = jax.tree.map(lambda leaf: leaf.sharding, abstract_batch(8, S, mesh))

        @jax.jit
        def both(model, batch):
            gradient = jax.grad(functools.partial(loss, compute=compute))
            return gradient(*parts(model), batch), merged(model)

        found, whole = both(placed, jax.device_put(BATCH, rows))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.max(np.abs(other)))
    for one, other in zip(*map(jax.tree.leaves, (whole, whole_on_one_device())), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.several_devices
def test_pairs_lie_with_their_experts():
    mesh = make_mesh(expert=4, fsdp=2)
    for name in MATRICES:
        one = getattr(experts(laid_out(adapted(), mesh)), name)
        for array in (one.down, one.up):
            assert array.sharding.spec[1] == "expert"
            assert 8 * array.addressable_shards[0].data.size == array.size, name


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize("frozen_dtype", ["float32", "int8"])
def test_a_run_trains_the_pairs_alone_and_on_a_mesh_as_on_one_device(frozen_dtype):
    run_of = functools.partial(
        experiment, functools.partial(lora, BASE, rank=4, alpha=8.0, paths=PATHS),
        trainable=adapters(), frozen_dtype=frozen_dtype,
    )  # fmt: skip
    found = {}
    for mesh in ({}, {"fsdp": 2, "expert": 2, "tensor": 2}):
        run = run_of(mesh)
        begun = run.initial_state()
        before = jax.device_get(begun.frozen)
        found[len(mesh)], state = trained(run, compiled(run), begun)
        for one, other in zip(*map(jax.tree.leaves, (state.frozen, before)), strict=True):
            np.testing.assert_array_equal(one, other)
        assert np.any(np.asarray(experts(state.model).down.up))
    for ours, theirs in zip(*found.values(), strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-4)
        np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-3)


@pytest.mark.slow
def test_the_product_of_a_base_s_gradient_is_absent():
    def shapes_of_products(program):
        shapes = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", program.as_text())
        return {tuple(map(int, shape.split(","))) for shape in shapes}

    matrix = {(E, F), (F, E)}
    assert matrix.isdisjoint(shapes_of_products(compiled_gradient()))
    assert matrix <= shapes_of_products(compiled_gradient_of_merged())


def test_a_product_of_all_experts_at_once_has_their_pairs():
    """As a layer of one's own may compute them."""
    one = jax.tree.map(lambda x: x[0], experts(adapted()).gate)
    x = jax.random.normal(jax.random.key(5), (X, 7, E))
    found = product("xce,xef->xcf", x, one)
    np.testing.assert_allclose(found, jnp.einsum("xce,xef->xcf", x, one.dense()), atol=1e-4)


def test_experts_are_adapted_where_they_are_asked_for_by_name():
    def selected(**settings):
        make = functools.partial(lora, BASE, rank=2, **settings)
        model = jax.eval_shape(make, key=jax.random.key(0))
        return {path for path in named_weights(model) if path.endswith(".base")}

    of_experts = {f"stack.patterns.0.0.mlp.experts.{name}.base" for name in MATRICES}
    usual = selected()
    assert usual and not any("mlp" in path for path in usual)
    assert selected(paths=("stack.*", "*.experts.*")) == usual | of_experts
    assert selected(paths=(), axes=("expert",)) == of_experts
    assert selected(paths=("*.experts.down",)) == {"stack.patterns.0.0.mlp.experts.down.base"}
    with pytest.raises(SelectionError, match="where a pattern means them alone"):
        selected(paths=("stack.*.mlp.*",))
    for router in ({"paths": ("stack.*", "*.router.*")}, {"axes": ("choice",)}):
        with pytest.raises(SelectionError, match=r"router\.logits is a router's, and routers have"):
            selected(**router)
    with pytest.raises(ValueError, match=r"adapters of experts have no dropout, got 0\.1"):
        selected(paths=("*.experts.*",), dropout=0.1)


def test_flops_count_what_a_token_uses():
    model, groups = adapted(), adapters()
    rank, tokens_of_attention = 4, 6 * 2 * E * S  # of scores and of what they weigh
    of_experts = 3 * E * F * TOP * 4 + 3 * (E + F) * rank * TOP * 6
    query = E * E * 4 + 2 * E * rank * 6
    others = 2 * E * (E // 2) * 4 + E * E * 4 + E * X * 4
    expected = 2 * (of_experts + query + others + tokens_of_attention) + V * E * 4
    assert flops_per_token(model, groups, S, causal=False) == expected


@pytest.mark.slow
def test_muon_takes_each_expert_s_matrices_by_themselves():
    trained, _ = parts(adapted())
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
