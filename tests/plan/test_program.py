"""Compiled programs read from their text: loops, calls, groups of devices.

The references are NumPy, the scans that were compiled, and JAX's own mesh.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from program_texts import program_text

from lmlib.parallel.mesh import make_mesh
from lmlib.plan.program import ArrayType, parse_replica_groups, read_program


def compiled_text(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


@st.composite
def transposed_ranges(draw):
    """XLA's text for groups of a transposed range, and the groups by NumPy."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    width = draw(st.sampled_from([n for n in range(1, 26) if math.prod(shape) % n == 0]))
    rows = math.prod(shape) // width
    groups = np.transpose(np.arange(math.prod(shape)).reshape(shape), order).reshape(rows, width)
    transposition = f"T({','.join(map(str, order))})" if draw(st.booleans()) else ""
    if not transposition:
        groups = np.arange(math.prod(shape)).reshape(rows, width)
    return f"[{rows},{width}]<=[{','.join(map(str, shape))}]{transposition}", groups


@given(transposed_ranges())
def test_groups_of_a_transposed_range(case):
    text, groups = case
    np.testing.assert_array_equal(parse_replica_groups(f"{text}, use_global_device_ids"), groups)


@given(groups=st.integers(1, 4), width=st.integers(1, 4), seed=st.integers(0, 99))
def test_groups_that_are_listed(groups, width, seed):
    order = np.random.default_rng(seed).permutation(groups * width).reshape(groups, width)
    text = ",".join("{" + ",".join(map(str, group)) + "}" for group in order)
    np.testing.assert_array_equal(parse_replica_groups("{" + text + "}, to_apply=%add"), order)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{}, to_apply=%add", None),
        ("mesh['a'=4,'b'=2] {'a'}, dimensions={0}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=4,'b'=2] {'b'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=4,'b'=1,'c'=2] {'a','b','c'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        # The outer and the inner half of an axis of four.
        ("mesh['a'=2,'b'=4] {'b':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # Devices 0 1 2 3 and 4 5 6 7 are the columns of the mesh.
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", [[1, 3], [0, 2]]),
    ],
)
def test_groups_of_mesh_axes(text, groups):
    found = parse_replica_groups(text)
    if groups is None:
        assert found is None
    else:
        assert {frozenset(group) for group in found.tolist()} == set(map(frozenset, groups))


def test_an_unknown_spelling_of_groups_is_an_error():
    with pytest.raises(ValueError, match="unknown spelling of replica groups"):
        parse_replica_groups("every<=[8]")


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("bf16", (3, 5), 30),
        ("f32", (), 4),
        ("pred", (7,), 7),
        ("s4", (5,), 3),
        ("f8e4m3fn", (8,), 8),
        ("c64", (2,), 16),
        ("token", (), 0),
    ],
)
def test_bytes_of_arrays(dtype, shape, size):
    assert ArrayType(dtype, shape).bytes == size


def test_nested_scans_turn_as_often_as_they_were_told():
    def twice_nested(x):
        def inner(x, _):
            return jnp.sin(x @ x), None

        def outer(x, _):
            return jax.lax.scan(inner, x, None, length=7)[0], None

        return jax.lax.scan(outer, x, None, length=5)[0]

    program = read_program(compiled_text(twice_nested, jnp.ones((16, 16))))
    times = [
        place.times
        for one, place in program.instructions()
        if one.opcode == "dot" or "matmul" in (one.attribute("custom_call_target") or "")
    ]
    assert times == [35]
    trips = {loop.trips for _, place in program.instructions() for loop in place.loops}
    assert trips == {5, 7}


@pytest.mark.parametrize(
    ("limit", "trips"),
    [
        ("%limit = s32[]{:T(128)} constant(8)", 6),
        ("%limit = s32[]{:T(128)} get-tuple-element(%p.2), index=2", 9),
        ('%limit = s32[]{:T(128)} custom-call(), custom_call_target="Unknown"', None),
    ],
)
def test_trips_without_a_known_count(limit, trips):
    """Compilers for GPUs and TPUs print none, or a limit that the loop carries along."""
    program = read_program(program_text("counted", LIMIT=limit))
    assert program.is_scheduled
    (add,) = (found for found in program.instructions() if found[0].name == "twice")
    instruction, place = add
    assert [loop.trips for loop in place.loops] == [trips]
    assert place.times == (trips or 1)
    assert instruction.results == (ArrayType("f32", (4,), memory=1),)
    assert [operand.name for operand in instruction.operands] == ["x.1", "x.1"]
    assert instruction.op_name == "jit(f)/layers/while/body/add"


def test_trips_of_a_loop_whose_comparison_is_fused():
    """XLA leaves such loops on GPUs after it moves a turn out of a loop."""
    fused = """\
%fused (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%b, %three), direction=LT
}

%body.1"""
    text = program_text("counted", LIMIT="%limit = s32[] constant(8)").replace("%body.1", fused, 1)
    text = text.replace(
        "%lt = pred[]{:T(512)} compare(%i.2, %limit), direction=LT",
        "%lt = pred[] fusion(%limit, %i.2), kind=kLoop, calls=%fused",
    )
    trips = {loop.trips for _, place in read_program(text).instructions() for loop in place.loops}
    assert trips == {3 - 2}


@pytest.mark.several_devices
def test_a_collective_inside_a_scan_is_found_with_its_groups():
    mesh = make_mesh(fsdp=4, tensor=2)

    def summed(x_SE, w_LEF):
        def layer(x_SE, w_EF):
            return jnp.einsum("se,ef->sf", x_SE, w_EF, out_sharding=PartitionSpec()), None

        return jax.lax.scan(layer, x_SE, w_LEF)[0]

    with jax.set_mesh(mesh):
        x_SE = jax.ShapeDtypeStruct((8, 16), jnp.float32)
        w_LEF = jax.ShapeDtypeStruct(
            (3, 16, 16),
            jnp.float32,
            sharding=jax.NamedSharding(mesh, PartitionSpec(None, "tensor", None)),
        )
        program = read_program(compiled_text(summed, x_SE, w_LEF))
    ((one, place),) = (
        found for found in program.instructions() if found[0].opcode.startswith("all-reduce")
    )
    assert place.times == 3
    # Two neighbours in the mesh's order of devices share a place on fsdp.
    assert sorted(map(sorted, one.replica_groups.tolist())) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        read_program("module @jit_f { func.func public @main() }")
