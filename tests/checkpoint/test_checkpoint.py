"""Checkpoints against the arrays that were saved: bitwise, across meshes."""

import logging

import absl.logging
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32
from states import bits

from lmlib.checkpoint import Checkpoints

pytestmark = pytest.mark.several_devices

NOTES = {"tokens": 123_456_789_012}


class Block(eqx.Module):
    """Layers are stacked; `name` is static."""

    up: Float[Array, "layers embed mlp"]
    scale: Float[Array, "layers embed"]
    name: str = eqx.field(static=True)


class State(eqx.Module):
    step: Int32[Array, ""]
    model: Block
    optimizer: optax.OptState
    key: jax.Array


def make_mesh(fsdp: int, tensor: int) -> Mesh:
    return jax.make_mesh(
        (1, fsdp, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 3
    )


def place(tree, mesh: Mesh):
    """Matrices split over fsdp and tensor, the rest whole."""
    split, whole = NamedSharding(mesh, P(None, "fsdp", "tensor")), NamedSharding(mesh, P())
    return jax.tree.map(lambda leaf: jax.device_put(leaf, split if leaf.ndim == 3 else whole), tree)


def make_state(mesh: Mesh, seed: int = 0) -> State:
    up, scale = jax.random.split(jax.random.key(seed))
    model = Block(
        jax.random.normal(up, (3, 16, 8)),
        jax.random.normal(scale, (3, 16), jnp.bfloat16),
        name="block",
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = State(
        jnp.int32(seed), model, optimizer.init(model), jax.random.key(seed + 1, impl="rbg")
    )
    return place(state, mesh)


def target_of(state: State, mesh: Mesh) -> State:
    def describe(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, leaf.sharding.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(describe, state)


@pytest.mark.parametrize(("fsdp", "tensor"), [(4, 2), (8, 1), (1, 4)])
def test_a_state_comes_back_bitwise_on_any_mesh(tmp_path, fsdp, tensor):
    state, mesh = make_state(make_mesh(4, 2)), make_mesh(fsdp, tensor)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.newest() is None
        checkpoints.save(7, state, NOTES)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.newest() == 7
        target = target_of(state, mesh)
        restored, notes = checkpoints.restore(7, target)
    assert bits(restored) == bits(state)
    assert notes == NOTES
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == wanted.sharding


def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path):
    mesh = make_mesh(4, 2)
    state = place({"weight": jnp.ones((8, 512, 1024))}, mesh)
    target = target_of(state, mesh)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: -x, tree), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, NOTES)
        jax.block_until_ready(overwrite(overwrite(overwrite(state))))
        checkpoints.wait()
        restored, _ = checkpoints.restore(1, target)
    np.testing.assert_array_equal(np.asarray(restored["weight"]), 1.0)


class Tied(eqx.Module):
    """Without a `head`, the embedding is the head."""

    embedding: Float[Array, "1 vocab embed"]
    head: Float[Array, "1 vocab embed"] | None


def test_a_tied_weight_stays_one_array(tmp_path):
    mesh = make_mesh(8, 1)
    tied = place(Tied(jnp.arange(16.0).reshape(1, 8, 2), head=None), mesh)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tied, NOTES)
        checkpoints.wait()
        restored, _ = checkpoints.restore(1, target_of(tied, mesh))
        assert restored.head is None
        assert bits(restored) == bits(tied)
        untied = place(Tied(tied.embedding, head=tied.embedding), mesh)
        with pytest.raises(ValueError, match="it lacks head; restore"):
            checkpoints.restore(1, target_of(untied, mesh))


@pytest.fixture
def saved(tmp_path):
    """A checkpoint at step 5 and its target."""
    state = make_state(make_mesh(4, 2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, NOTES)
        checkpoints.wait()
        yield checkpoints, target_of(state, make_mesh(4, 2))


def with_key(target: State, implementation: str) -> State:
    key = jax.random.key(0, impl=implementation)
    wanted = jax.ShapeDtypeStruct((), key.dtype, sharding=target.key.sharding)
    return eqx.tree_at(lambda state: state.key, target, wanted)


def with_up(target: State, shape: tuple[int, ...], dtype) -> State:
    wanted = jax.ShapeDtypeStruct(shape, dtype, sharding=target.model.up.sharding)
    return eqx.tree_at(lambda state: state.model.up, target, wanted)


ABSTRACT = jax.sharding.AbstractMesh(
    (1, 4, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 3
)


@pytest.mark.parametrize(
    ("step", "change", "message"),
    [
        (5, lambda target: with_up(target, (3, 16, 16), jnp.float32),
         r"model\.up as float32\[3, 16, 8\], but float32\[3, 16, 16\]"),
        (5, lambda target: with_up(target, (3, 16, 8), jnp.bfloat16),
         r"model\.up as float32\[3, 16, 8\], but bfloat16\[3, 16, 8\]"),
        (5, lambda target: with_key(target, "threefry2x32"), "checkpoint 5 has key as"),
        (5, lambda target: with_key(target, "unsafe_rbg"), "checkpoint 5 has key as"),
        (5, lambda target: {"model": {"up": target.model.up, "gate": target.model.up}},
         r"lacks model\.gate and also has key, model\.scale, .* 5 more"),
        (5, lambda target: jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), target),
         "is on no devices"),
        (5, lambda target: target_of(target, ABSTRACT), "is on no devices"),
        (6, lambda target: target, r"no whole checkpoint at step 6; it has \[5\]"),
    ],
)  # fmt: skip
def test_restore_refuses_a_target_that_does_not_fit(saved, step, change, message):
    checkpoints, target = saved
    with pytest.raises(ValueError, match=message):
        checkpoints.restore(step, change(target))


@pytest.mark.parametrize(
    ("step", "state", "message"),
    [
        (4, {"a": jnp.ones(2)}, "cannot save step 4: .* holds step 5"),
        (5, {"a": jnp.ones(2)}, "cannot save step 5: .* holds step 5"),
        *((6, {"a": {"b": leaf}}, r"cannot save a\.b") for leaf in (jnp.zeros((0, 4)), "text")),
        (6, {"model": {"activation": jax.nn.silu}}, r"cannot save model\.activation"),
        *(
            (6, {name: jnp.ones(2)}, "rename it")
            for name in ("../w", "a/b", ".zarray", "_METADATA")
        ),
    ],
)
def test_save_refuses_old_steps_and_states_that_cannot_be_stored(saved, step, state, message):
    checkpoints, _ = saved
    with pytest.raises(ValueError, match=message):
        checkpoints.save(step, state, NOTES)
    assert checkpoints.steps() == [5]


def test_the_terminal_stays_quiet_and_other_libraries_are_heard(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="absl"):  # as under absl.app.run
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, make_state(make_mesh(8, 1)), NOTES)
            checkpoints.wait()
            assert caplog.messages == []
            absl.logging.info("from somewhere else")
        assert caplog.messages == ["from somewhere else"]
