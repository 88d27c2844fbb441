"""Warnings of needless communication: programs that do it, and programs that don't."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from aot import absent, needs_tpu_compiler
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from program_texts import program_text
from sentinels import sentinels

from lmlib.models.families.llama import llama
from lmlib.parallel.gathering import gather
from lmlib.parallel.layout import reshard
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.collectives import collectives
from lmlib.plan.communication_warnings import communication_warnings
from lmlib.plan.planner import stderr_kept
from lmlib.plan.program import read_program
from lmlib.state import abstract_model
from lmlib.terminal.quantities import bytes_text

pytestmark = pytest.mark.several_devices

V, E, F, L, H, D = 4_096, 512, 1_024, 2, 4, 64
make = functools.partial(llama, V, E, L, H, F, head_dim=D, key=jax.random.key(0))


def warnings_of(function, mesh, *arguments):
    model = abstract_model(make, mesh)
    with jax.set_mesh(mesh):
        text = jax.jit(function).lower(model, *arguments).compile().as_text()
    return communication_warnings(collectives(read_program(text), mesh), model, mesh)


def test_a_gathered_stack_is_named_with_its_bytes():
    mesh = make_mesh(fsdp=4, tensor=2)

    def gathered(model, whole_stack):
        stack = gather(model.stack, jnp.float32) if whole_stack else model.stack
        ((blocks,),) = stack.patterns

        def layer(total, block):
            block = block if whole_stack else gather(block, jnp.float32)
            return total + jnp.sum(jnp.sin(block.mlp.gate)), None

        # One weight, used once, is gathered whole for that.
        norm = gather(model.norm, jnp.float32)
        return jax.lax.scan(layer, 0.0, blocks)[0] + jnp.sum(jnp.sin(norm.scale))

    (warning,) = warnings_of(functools.partial(gathered, whole_stack=True), mesh)
    assert warning.problem == "gathered stack"
    assert "stack.patterns.0.0.mlp.gate" in warning.message
    stack = L * E * (F // 2) * 4
    assert bytes_text(stack) in warning.message
    assert warning.bytes_sent_per_step == stack * 3 // 4
    assert warnings_of(functools.partial(gathered, whole_stack=False), mesh) == ()


@needs_tpu_compiler
@pytest.mark.aot
@pytest.mark.landing
@pytest.mark.parametrize("topology", sentinels(["v4:4x4x4", "v5p:4x4x4"], "v5p:4x4x4".__eq__))
def test_a_cube_of_tpus_is_told_how_to_gather_and_scatter(topology):
    """And it is right: with the mesh that is named XLA does, in half of the bytes."""

    def loss(model):
        ((blocks,),) = model.stack.patterns
        gate_EF = gather(blocks, jnp.float32).mlp.gate[0]
        x_BE = reshard(jnp.ones((64, E)), ("batch", "embed"))
        return jnp.sum(jnp.sin(x_BE @ gate_EF))

    _, devices = absent(topology)
    told = warnings_of(jax.grad(loss), make_mesh(fsdp=64, devices=devices))
    problems = {one.problem for one in told}
    assert problems & {"all-reduce for all-gather", "all-reduce for reduce-scatter"}
    assert all("--fdl.mesh.fsdp=16 --fdl.mesh.expert=4." in one.message for one in told)
    for mesh in (
        make_mesh(fsdp=16, expert=4, devices=devices),
        make_mesh(data=4, fsdp=16, devices=devices),
    ):
        better = warnings_of(jax.grad(loss), mesh)
        assert {one.problem for one in better} <= {"gathered stack"}


def gradient_program(mesh, scattered):
    """The gradient of the table by its devices' sums, summed as one of the two ways would."""

    def whole(table_VE):
        return jax.lax.psum(jnp.sin(table_VE), "fsdp")

    def part(table_VE):
        return jax.lax.psum_scatter(jnp.sin(table_VE), "fsdp", scatter_dimension=1, tiled=True)

    return jax.shard_map(
        part if scattered else whole,
        mesh=mesh,
        in_specs=P(),
        out_specs=P(None, "fsdp") if scattered else P(),
        check_vma=False,
    )


def test_an_all_reduce_of_a_whole_gradient_is_named_and_a_reduce_scatter_is_not():
    mesh = make_mesh(fsdp=8)
    model = abstract_model(make, mesh)
    table_VE = jax.ShapeDtypeStruct((V, E), jnp.float32)
    found = []
    for scattered in (False, True):
        program = jax.jit(gradient_program(mesh, scattered)).lower(table_VE).compile()
        sent = collectives(read_program(program.as_text()), mesh)
        assert len(sent) == 1
        found.append(communication_warnings(sent, model, mesh))
    ((warning,), nothing) = found
    assert nothing == ()
    assert warning.problem == "all-reduce for reduce-scatter"
    size = V * E * 4
    for said in ("embedding", "fsdp", f"{size * 2 * 7 // 8:,}", f"{size * 7 // 8:,}"):
        assert said in warning.message
    assert str(warning).startswith("warning: ")


def test_a_gather_in_the_guise_of_a_sum_is_named():
    """XLA for TPUs gathers in this way shards that are smaller than a tile."""
    mesh = make_mesh(fsdp=8)
    sent = collectives(read_program(program_text("gathered_as_a_sum")), mesh)
    assert [one.assembles for one in sent] == [True]
    (warning,) = communication_warnings(sent, abstract_model(make, mesh), mesh)
    assert warning.problem == "all-reduce for all-gather"
    size = V * E * 4
    for said in ("embedding", f"{size * 2 * 7 // 8:,}", f"{size * 7 // 8:,}"):
        assert said in warning.message


def test_sums_over_tensor_and_of_small_arrays_are_no_gradients_to_scatter():
    mesh = make_mesh(fsdp=2, tensor=4)
    model = abstract_model(make, mesh)

    def sums(x_VE, x_E):
        return jax.lax.psum(jnp.sin(x_VE), "tensor"), jax.lax.psum(jnp.sin(x_E), "fsdp")

    by_hand = jax.shard_map(sums, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    shapes = jax.ShapeDtypeStruct((V // 4, E), jnp.float32), jax.ShapeDtypeStruct((E,), jnp.float32)
    sent = collectives(read_program(jax.jit(by_hand).lower(*shapes).compile().as_text()), mesh)
    assert len(sent) == 2
    assert communication_warnings(sent, model, mesh) == ()


@contextlib.contextmanager
def without_cache():
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the cache reads the setting only once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def test_full_rematerializations_are_named():
    mesh = make_mesh(data=2, fsdp=4)
    types = (AxisType.Auto,) * len(mesh.axis_names)
    automatic = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types)

    def moved(x):
        x = jax.lax.with_sharding_constraint(
            x * 2, NamedSharding(automatic, P("data", None, "fsdp"))
        )
        target = NamedSharding(automatic, P(None, ("data", "fsdp"), None))
        return jax.lax.with_sharding_constraint(jnp.sin(x), target)

    with without_cache(), stderr_kept() as log:  # a cached program gives no warning
        jax.jit(moved).lower(jnp.ones((8, 8, 8))).compile()
    (warning,) = communication_warnings((), abstract_model(make, mesh), mesh, log.text * 2)
    assert warning.problem == "full rematerialization"
    assert "sharding_constraint" in warning.message
    assert "f32[4,8,2]" in warning.message
    # Both layouts are named, as XLA prints them: by devices, or by axes of the mesh.
    by_devices = "{devices=[2,1,4]<=[8]} to {devices=[1,8,1]<=[8]} directly"
    axes = f"mesh[{','.join(f'{axis!r}={size}' for axis, size in mesh.shape.items())}]"
    by_axes = (
        f"{{{axes}, [{{'data'}}, {{}}, {{'fsdp'}}]}} to "
        f"{{{axes}, [{{}}, {{'data', 'fsdp'}}, {{}}]}} directly"
    )
    assert by_devices in warning.message or by_axes in warning.message


@pytest.mark.parametrize("log", ["", "W0000 spmd: all is well\n", "E0000 out of memory"])
def test_other_messages_are_no_warnings(log):
    mesh = make_mesh(fsdp=8)
    assert communication_warnings((), abstract_model(make, mesh), mesh, log) == ()
