"""Groups of weights that train, and weights that do not."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import outsider_runs
import pytest
from jaxtyping import Array, Float

from lmlib.adapters.lora import lora
from lmlib.inspect.description import describe
from lmlib.models.families.llama import llama
from lmlib.models.weights import fill, ones, weight
from lmlib.optim.adamw import adamw
from lmlib.optim.optimizer import Optimizer, as_declared
from lmlib.optim.schedules import warmup_constant
from lmlib.optim.trainable import Group, adapters, decays_by, with_rates
from lmlib.parallel.axes import map_weights
from lmlib.parallel.fingerprint import fingerprint
from lmlib.parallel.mesh import make_mesh
from lmlib.parallel.selection import SelectionError, named_weights
from lmlib.state import split_by_training

BASE = functools.partial(llama, vocab=64, embed=16, layers=1, heads=2, mlp=32)
ADAM = functools.partial(adamw, peak_lr=1e-2, schedule=warmup_constant, clip_norm=None)


def experiment(model=BASE, optimizer=ADAM, **settings):
    made = outsider_runs.experiment(model, {}, optimizer=optimizer, **settings)
    made.check()
    return made


def stepped(made):
    """The state before and after a step, and the gradient's and update's norms."""
    before = made.initial_state()
    kept = jax.tree.map(np.asarray, before.whole_model)
    batch = jax.tree.map(jnp.asarray, made.data.batch(0))
    after, metrics = (
        made.trace_step().lower().compile()(before, batch, made.training.hyperparameters)
    )
    return kept, after, metrics


def moved(before, after):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): float(np.max(np.abs(new - old)))
        for (path, old), new in zip(
            jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
        )
    }


def test_groups_move_at_their_rates_and_the_rest_stays_without_moments():
    groups = {
        "slow": Group(("*.attention.*",), learning_rate=0.25, decays=False),
        "table": Group(axes=("vocab",)),
    }
    before, after, _ = stepped(experiment(trainable=groups))
    by_path = moved(before, after.whole_model)
    frozen = {path for path in by_path if "attention." not in path and "embedding" not in path}
    assert len(frozen) == 6  # three matrices, two norms of layers, the last norm
    for path, distance in by_path.items():
        if path in frozen:
            assert distance == 0
        elif "attention." in path:  # Adam's first update is the learning rate: nothing decays
            assert distance == pytest.approx(0.25e-2, rel=1e-3)
        else:
            assert 1e-2 * 0.99 < distance < 1e-2 * 1.5  # and these decay
    adam = after.optimizer[0][1] if isinstance(after.optimizer[0], tuple) else after.optimizer[1]
    assert len(jax.tree.leaves(adam.mu)) == len(by_path) - len(frozen)


class Scales(eqx.Module):
    """Two weights, one with a learning rate of its own."""

    fast: Float[Array, "embed"] = weight(ones, learning_rate=8.0)
    plain: Float[Array, "embed"] = weight(ones, decays=True)

    def __init__(self, key):
        fill(self, key, embed=3)


def test_the_rate_of_a_group_multiplies_that_of_the_weight_and_decay_stays_as_declared():
    model = Scales(jax.random.key(0))
    groups = {"both": Group(("*",), learning_rate=0.25)}
    sgd = Optimizer(optax.sgd(1.0), lambda step: jnp.float32(1.0), as_declared)
    transformation = with_rates(sgd, model, groups).transformation
    updates, _ = transformation.update(model, transformation.init(model), model)
    np.testing.assert_array_equal(updates.fast, -2.0)
    np.testing.assert_array_equal(updates.plain, -0.25)
    decays = decays_by(groups, model, as_declared)
    assert {path: decays(one) for path, one in named_weights(model).items()} == {
        "fast": False, "plain": True,
    }  # fmt: skip


@pytest.mark.slow
def test_training_a_group_is_training_all_with_the_others_gradients_left_out():
    """SGD's update is the gradient."""

    def sgd(steps):
        return Optimizer(optax.sgd(0.1), lambda step: 0.1, as_declared)

    part = {"mlp": Group(("*.mlp.*",))}
    _, after, metrics = stepped(experiment(optimizer=sgd, trainable=part))
    _, whole, _ = stepped(experiment(optimizer=sgd))
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(after.model),
        [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(whole.model)
         if ".mlp." in jax.tree_util.keystr(path)],
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(one, other, atol=1e-7, err_msg=jax.tree_util.keystr(path))
    assert float(metrics["grad_norm"]) > 0


def test_frozen_weights_rest_in_their_dtype_and_the_table_tells_groups():
    made = experiment(
        functools.partial(lora, BASE, rank=2),
        trainable=adapters(learning_rate_of_up=16.0),
        frozen_dtype="int8",
    )
    state = made.abstract_state()
    kept = {leaf.dtype.name for leaf in jax.tree.leaves(state.frozen)}
    assert kept == {"int8", "float32", "bfloat16"}  # with the scales of 8-bit matrices
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.model)} == {"float32"}
    table = describe(made.recipe.abstract_model, made.mesh, as_declared, made.recipe.group_of)
    by_group = {}
    for row in table.parameters:
        by_group[row.group] = by_group.get(row.group, 0) + row.size
    # Each matrix has rank · inputs and rank · outputs.
    assert by_group["down"] == 2 * (6 * 16 + 32)
    assert by_group["up"] == 2 * (5 * 16 + 2 * 32)
    assert f"down {by_group['down']:,}, up {by_group['up']:,}" in table.short()
    assert all(row.group is None for row in table.parameters if ".base" in row.path)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ({"a": Group(("*.mlp.upp",))}, r"trainable\['a'\]: no weight's path matches '\*.mlp.upp'"),
        ({"a": Group(axes=("vocabulary",))}, "there are vocab, embed, layer, head"),
        ({"a": Group(("*.mlp.*",)), "b": Group(axes=("mlp",))}, "in trainable.'a'. and in"),
        ({"a": Group()}, "names no weights: give it paths or axes"),
        ({}, "no weights would train; use None to train all"),
        ({"a": Group("*.mlp.*")}, "paths must be a tuple of texts"),
    ],
)
def test_groups_that_make_no_sense(groups, told):
    with pytest.raises(SelectionError, match=told):
        experiment(trainable=groups)


def test_adapters_need_groups_and_their_bases_cannot_train():
    model = functools.partial(lora, BASE, rank=2)
    with pytest.raises(
        ValueError, match=r"lmlib.optim.trainable.adapters\(\) trains the adapters alone"
    ):
        experiment(model)
    with pytest.raises(SelectionError, match="the base of an adapter, which gets no gradient"):
        experiment(model, trainable={"all": Group(("stack.*",))})
    with pytest.raises(ValueError, match="nothing is frozen: set trainable"):
        experiment(frozen_dtype="int8")
    with pytest.raises(ValueError, match=r"learning_rate of a group must be positive, got 0\.0"):
        Group(("*",), learning_rate=0.0)


def test_flops_leave_out_the_gradients_of_frozen_matrices():
    whole = experiment().flops_per_token(causal=False)
    model = functools.partial(lora, BASE, rank=2)
    part = experiment(model, trainable=adapters()).flops_per_token(causal=False)
    matrices = (4 * 16 * 16 + 3 * 16 * 32) + 64 * 16
    low_rank = 2 * (11 * 16 + 3 * 32)
    assert part == whole - 2 * matrices + 6 * low_rank


@pytest.mark.several_devices
def test_a_fingerprint_sees_every_bit_and_no_mesh():
    key = jax.random.key(0)
    tree = {"a": jax.random.normal(key, (8, 16)), "b": jnp.arange(8, dtype=jnp.int8)}
    found = fingerprint(tree)
    mesh = make_mesh(fsdp=4, tensor=2)
    rows = jax.NamedSharding(mesh, jax.P("fsdp"))
    assert fingerprint(jax.device_put(tree, rows)) == found
    other = np.asarray(tree["a"]).view(np.uint32).copy()
    other[3, 5] ^= 1
    swapped = tree["a"].at[jnp.array([0, 1])].set(tree["a"][jnp.array([1, 0])])
    for changed in (jnp.asarray(other.view(np.float32)), swapped, tree["a"].reshape(16, 8)):
        assert fingerprint({**tree, "a": changed}) != found
    assert fingerprint({"a": tree["a"], "c": tree["b"]}) != found


@pytest.mark.parametrize("dtype", [pytest.param("int8", marks=pytest.mark.landing), "bfloat16"])
def test_a_fingerprint_is_that_of_weights_as_a_run_keeps_them(dtype):
    recipe = experiment(
        functools.partial(lora, BASE, rank=2), trainable=adapters(), frozen_dtype=dtype
    ).recipe
    random = np.random.default_rng(0)
    model = jax.tree.map(
        lambda x: jnp.asarray(random.standard_normal(x.shape), jnp.float32), recipe.shapes
    )
    frozen = split_by_training(model, recipe.trained).frozen
    expected = fingerprint(
        split_by_training(map_weights(recipe.kept, model), recipe.trained).frozen
    )
    assert fingerprint(frozen, recipe.kept) == expected != fingerprint(frozen)
    other = jax.tree.map(lambda x: x.at[..., 0].multiply(1.01), frozen)
    assert fingerprint(other, recipe.kept) != expected
