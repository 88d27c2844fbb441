import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from lmlib.models.weights import fan_in, weight, zeros
from lmlib.parallel.axes import LayoutError, axis_names, map_weights
from lmlib.parallel.gathering import gather
from lmlib.parallel.layout import COMPUTE, STORED, partition, storage_spec
from lmlib.parallel.mesh import make_mesh


class Inner(eqx.Module):
    up: Float[Array, "embed mlp"] = weight(fan_in("embed"))
    bias: Float[Array, "mlp"] | None = weight(zeros)
    rate: float = eqx.field(static=True)


class Outer(eqx.Module):
    first: Inner
    table: Float[Array, "vocab embed"] = weight(fan_in("embed"))


def outer(stack=()):
    inner = Inner(jnp.ones((*stack, 2, 3)), jnp.ones((*stack, 3)), 0.5)
    return Outer(inner, jnp.ones((5, 2)))


def test_every_array_is_visited_with_its_path_and_axes():
    """Those of stacked layers lead; an optional weight may be absent."""
    seen = {}
    map_weights(lambda weight, array: seen.update({weight.path: weight.axes}), outer((4,)))
    layers = {"first.up": ("layer", "embed", "mlp"), "first.bias": ("layer", "mlp")}
    assert seen == {**layers, "table": ("vocab", "embed")}
    module = Inner(jnp.ones((2, 3)), None, 0.5)
    assert map_weights(lambda weight, _: weight.path, module).bias is None


def test_without_a_mesh_gather_only_casts():
    gathered = gather(outer(), jnp.bfloat16)
    assert {weight.dtype for weight in jax.tree.leaves(gathered)} == {jnp.dtype(jnp.bfloat16)}
    assert gathered.first.rate == 0.5


class Unannotated(eqx.Module):
    weight: jax.Array


class Undeclared(eqx.Module):
    scale: Float[Array, "embed"]


class Container(eqx.Module):
    weights: list[Array]


def test_arrays_without_axis_names_or_initial_values_are_refused():
    with pytest.raises(LayoutError, match=r"Unannotated.weight holds an array but names no axes"):
        map_weights(lambda *_: None, Unannotated(jnp.ones(3)))
    with pytest.raises(
        LayoutError, match=r"Undeclared.scale holds an array but declares no initial"
    ):
        map_weights(lambda *_: None, Undeclared(jnp.ones(3)))
    with pytest.raises(LayoutError, match=r"weights.0 lies in a container"):
        map_weights(lambda *_: None, Container([jnp.ones(3)]))
    with pytest.raises(LayoutError, match=r"up has shape \(3,\) but names the axes embed mlp"):
        shapes = eqx.tree_at(lambda m: m.first.up, outer(), jnp.ones(3))
        map_weights(lambda *_: None, shapes)


def test_an_axis_without_a_rule_is_named():
    message = r"axis 'columns' has no rule \(known: batch.*rules={'columns': None}"
    with pytest.raises(LayoutError, match=message):
        partition("columns embed", COMPUTE)


def test_fsdp_is_the_difference_between_the_tables():
    assert {name for name in COMPUTE if COMPUTE[name] != STORED[name]} == {"embed"}
    assert STORED["embed"] == ("stage", "fsdp", "expert", "context")


class Pair(eqx.Module):
    """An adapter of experts: two factors for each expert's "embed mlp" matrix."""

    down: Float[Array, "experts embed up_rank"] = weight(fan_in("embed"))
    up: Float[Array, "experts up_rank mlp"] = weight(fan_in("up_rank"))


@pytest.mark.several_devices
def test_a_matrix_rests_split_over_all_that_its_use_leaves():
    mesh, found = make_mesh(fsdp=2, expert=2, tensor=2), {}
    pair = Pair(jnp.ones((4, 8, 2)), jnp.ones((4, 2, 8)))
    map_weights(
        lambda weight, array: found.update({weight.path: storage_spec(weight, array.shape, mesh)}),
        pair,
    )
    assert found == {
        "down": PartitionSpec("expert", "fsdp", None),
        "up": PartitionSpec("expert", None, ("tensor", "fsdp")),
    }
    assert axis_names(Outer, "table") == ("vocab", "embed")
