"""Warns of needless communication in a step and says how to avoid it."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.gathering import moves_of
from lmlib.parallel.mesh_axes import STORAGE
from lmlib.parallel.other_meshes import with_a_second_fsdp
from lmlib.plan.collectives import Collective
from lmlib.plan.program import ArrayType
from lmlib.plan.step_time import dimensions_of_torus
from lmlib.terminal.quantities import bytes_text

# Smaller arrays take less time than a message's latency. Fewer rounds of messages then matter more
# than fewer bytes, and an all-reduce is one round.
SMALL_BYTES = 2**20
# Seen with libtpu 0.0.42 and 0.0.50 on 4x4x4 of v4, v5p and 7x, for all sizes of arrays and
# orders of devices.
_CUBE = (
    "XLA for TPUs does so where an axis spans three dimensions of the torus, not where it spans "
    "two: give the third dimension to expert, which is a second fsdp: {flags}."
)
_ADVICE = {
    # Seen with libtpu 0.0.42, also for a jax.lax.psum_scatter.
    "tpu": "XLA for TPUs scatters sums only along one dimension of the torus, and not of every "
    "array: try a smaller fsdp axis that lies along one dimension, with data or tensor along the "
    "others. The all-reduce uses the links of all dimensions, so it loses less time than bytes.",
    "cpu": "XLA for CPUs sums gradients in no other way: plan for the hardware of the run instead.",
    "cuda": "Cast the gradient before it is summed rather than after, so that XLA sees the sum and "
    "the slice side by side; or sum it with jax.lax.psum_scatter in a jax.shard_map.",
}
_SMALL_SHARDS = (
    "XLA for TPUs does so with some shards that are no whole tiles (8 × 128): with a smaller fsdp "
    "axis each device has a larger shard of embed."
)
_REMATERIALIZED = re.compile(
    r"Involuntary full rematerialization\. The compiler \D*? from sharding (\{.*?\}) to "
    r"(\{.*?\}) (?:efficiently|without) .*?HLO operation:? %?(\S+) = "
    r"(\w+\[[\d,]*\])(.*)"
)


@dataclasses.dataclass(frozen=True)
class CommunicationWarning:
    """One finding: the kind of problem, and a paragraph with its bytes and the remedy.

    `bytes_sent_per_step` counts one device; 0 if unknown.
    """

    problem: str
    message: str
    bytes_sent_per_step: int

    def __str__(self) -> str:
        return f"warning: {self.message}"


_Shapes = Sequence[tuple[str, tuple[int, ...]]]  # paths of weights, and shapes on one device


def communication_warnings(
    collectives: Sequence[Collective], model: Any, mesh: Mesh, compiler_log: str = ""
) -> tuple[CommunicationWarning, ...]:
    """Returns warnings about a step's communication, the largest first.

    The weights of `model` may be abstract. `compiler_log` is the compiler's output to stderr.
    """
    stacks: list[tuple[str, tuple[int, ...]]] = []
    split: list[tuple[str, tuple[int, ...]]] = []

    def add(weight: Weight, array: jax.ShapeDtypeStruct) -> None:
        moves = moves_of(weight, array.shape, mesh)
        used = tuple(size * n for size, n in zip(array.shape, moves.repeats, strict=True))
        stored = NamedSharding(mesh, moves.stored).shard_shape(array.shape)
        computed = NamedSharding(mesh, moves.computed).shard_shape(used)
        if weight.stacked and computed[0] > 1:
            stacks.append((weight.path, computed))
        if math.prod(computed) // math.prod(stored) > 1:  # gathered before use
            split.extend((weight.path, shape) for shape in (computed[weight.stacked :], computed))

    map_weights(add, jax.eval_shape(lambda: model))
    found = [
        *_gathered_stacks(collectives, stacks),
        *_whole_sums(collectives, split, mesh),
        *_full_rematerializations(compiler_log),
    ]
    return tuple(sorted(found, key=lambda one: -one.bytes_sent_per_step))


def _gathered_stacks(
    collectives: Sequence[Collective], stacks: _Shapes
) -> Iterator[CommunicationWarning]:
    """Finds all-gathers of a weight in all layers at once, which undo FSDP."""
    for one in collectives:
        if one.kind == "all-gather" and (paths := _matches(one.arrays, stacks)):
            yield CommunicationWarning(
                "gathered stack",
                f"{one.name} gathers the weights of all layers at once ({paths}): "
                f"{bytes_text(one.bytes)} on each device over {_axes(one)}, where FSDP gathers one "
                "layer at a time. Gather inside the scan over layers, not before it "
                "(lmlib.parallel.gathering.gather), or keep XLA from moving the gather out of the "
                "loop.",
                one.bytes_sent_per_step,
            )


def _whole_sums(
    collectives: Sequence[Collective], split: _Shapes, mesh: Mesh
) -> Iterator[CommunicationWarning]:
    """Finds all-reduces of gradients whose shards would be enough, or of shards of weights."""
    platform = mesh.devices.flat[0].platform
    groups: dict[tuple[bool, str, str, str], list[Collective]] = {}
    for one in collectives:
        if one.kind == "all-reduce" and {*STORAGE}.intersection(one.mesh_axes):
            paths = _matches(_large(one), split)
            if paths:
                alike = (one.assembles, paths, _axes(one), one.where)
                groups.setdefault(alike, []).append(one)
    for (assembles, paths, axes, where), group in groups.items():
        n = group[0].group_size
        size = sum(array.bytes * one.count_per_step for one in group for array in _large(one))
        sends, would_send = (f"{round(times * (n - 1) / n * size):,}" for times in (2, 1))
        name = " and ".join(one.name for one in group)
        problem, message = (
            "all-reduce for reduce-scatter",
            (
                f"{name}: whole gradients ({paths}) are summed over {axes} {where}, though each "
                f"device keeps a shard of them only: an all-reduce sends {sends} bytes per step "
                f"where a reduce-scatter sends {would_send}. "
            ),
        )
        advice = _ADVICE.get(platform, _ADVICE["cuda"])
        if assembles:
            problem, advice = "all-reduce for all-gather", _SMALL_SHARDS
            message = (
                f"{name}: weights ({paths}) are gathered over {axes} {where} by adding each "
                f"device's shard to zeros, which sends {sends} bytes per step where an all-gather "
                f"sends {would_send}. "
            )
        message += _over_cube(group[0].mesh_axes, mesh) or advice
        sent = sum(one.bytes_sent_per_step for one in group)
        yield CommunicationWarning(problem, message, sent)


def _over_cube(axes: Sequence[str], mesh: Mesh) -> str:
    """Returns advice for a group of TPUs that spans three dimensions of the torus; "" for
    others."""
    if dimensions_of_torus(axes, mesh) < 3:
        return ""
    other = with_a_second_fsdp(mesh, len({device.coords[-1] for device in mesh.devices.flat}))
    if other is None:
        return ""
    changed = {axis: size for axis, size in other.shape.items() if size != mesh.shape[axis]}
    return _CUBE.format(flags=" ".join(f"--fdl.mesh.{axis}={n}" for axis, n in changed.items()))


def _large(one: Collective) -> list[ArrayType]:
    return [array for array in one.arrays if array.bytes >= SMALL_BYTES]


def _matches(arrays: Iterable[ArrayType], weights: _Shapes) -> str:
    """Returns the paths of weights with the shape of one of `arrays`, in any order of axes.

    XLA transposes weights, adds axes of size 1, and flattens arrays that it sends together.
    """
    paths: dict[str, None] = {}
    for array, (path, shape) in itertools.product(arrays, weights):
        sizes, expected = _long_axes(array.shape), _long_axes(shape)
        if sizes == expected or (len(expected) > 1 and sizes == [math.prod(expected)]):
            paths[path] = None
    return ", ".join(paths)


def _long_axes(shape: tuple[int, ...]) -> list[int]:
    return sorted(size for size in shape if size > 1)


def _axes(one: Collective) -> str:
    return " × ".join(one.mesh_axes)


def _full_rematerializations(compiler_log: str) -> Iterator[CommunicationWarning]:
    found = (_REMATERIALIZED.search(line) for line in compiler_log.splitlines())
    for source, target, name, array, rest in dict.fromkeys(x.groups() for x in found if x):
        path = re.search(r'op_name="([^"]*)"', rest)
        yield CommunicationWarning(
            "full rematerialization",
            f"XLA cannot get {array} ({path[1] if path else name}) from the layout {source} to "
            f"{target} directly: every device gathers all of it and cuts its shard out. Go there "
            "in two steps, each of which moves one mesh axis (jax.sharding.reshard), or choose "
            "layouts that differ in one axis.",
            0,
        )
